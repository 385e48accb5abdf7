"""Give an MLX model its MTP head back: from two names to a sidecar beside the model."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlx_mtp.convert.console import Console
from mlx_mtp.convert.hub import HubRepo
from mlx_mtp.convert.metadata import Existing, describe
from mlx_mtp.convert.output import MAX_FILE_BYTES, SidecarWriter
from mlx_mtp.convert.plan import Plan, make_plan
from mlx_mtp.convert.quantization import Flags
from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.convert.source import Source, head_of, open_source, weight_map_of
from mlx_mtp.convert.target import Target
from mlx_mtp.convert.tied import compare_tied
from mlx_mtp.convert.verify import verify
from mlx_mtp.convert.view import link_model, view_with
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.head_weights import Convention, has_router
from mlx_mtp.models.hub import HUB_ID, resolve_model
from mlx_mtp.units import size_text

_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Args:
        model: the MLX model, a directory or a hub id.
        source: where the head is, a directory or a hub id.
        flags: for the quantization.
        revision: of the source.
        output: a directory to make with the model's files and the head, the model left alone.
        dry_run: check and tell, and write nothing.
        force: replace a head that is there.
        verify: measure the head's drafts before it is put in place.
        mtp_norms: convention of the source's norms, where nothing else tells.
        max_file_bytes: where to begin a second file.
    """

    model: str
    source: str
    flags: Flags = field(default_factory=Flags)
    revision: str | None = None
    output: Path | None = None
    dry_run: bool = False
    force: bool = False
    verify: bool = False
    mtp_norms: Convention | None = None
    max_file_bytes: int = MAX_FILE_BYTES


def add_head(request: Request, console: Console) -> Path:
    """Convert a head, or say that it is there already.

    Returns:
        The directory of model and head.

    Raises:
        ModelError: the model or the source can't be used, or they don't fit together. The model's
            directory is as it was.
        UsageError: flags contradict each other.
    """
    model = _locate(request)
    directory = request.output or model
    target = Target.open(model)
    existing = None if request.force else Existing.find(directory)
    if existing is None and not request.force and head_of(weight_map_of(model)):
        console.say(f"{model} has its head in its own files: nothing to do (--force adds one).")
        return model
    source = open_source(request.source, request.revision)
    target.check_source(source.config, source.name, console.warn)
    if existing is not None and _is_of_commit(existing, source, target, request.flags):
        _nothing_to_do(directory, request, console)
    elif request.dry_run and source.download_size():
        _tell_undownloaded(source, target, request.flags, console)
    else:
        paths = source.fetch(console)
        with _opened(paths) as files:
            plan = make_plan(target, source, files, request.flags, request.mtp_norms)
            _tell(plan, target, source, console)
            if existing is not None and _is_same(existing, plan, directory):
                _nothing_to_do(directory, request, console)
            elif request.dry_run:
                console.say(f"Would write {size_text(plan.nbytes)} to {directory}; wrote nothing.")
            else:
                _write(plan, model, directory, request, console)
    return directory


def _locate(request: Request) -> Path:
    """The model's directory; of a hub id that isn't downloaded as little as will do."""
    path = Path(request.model).expanduser()
    if path.is_dir() or not HUB_ID.fullmatch(request.model):
        return resolve_model(request.model)
    if request.verify or request.output:
        return resolve_model(request.model)
    config = HubRepo(request.model, None).small("config.json")
    if config is None:
        raise ConvertError(f"{request.model} has no config.json, so it is not a model.")
    return config.parent


def _is_of_commit(existing: Existing, source: Source, target: Target, flags: Flags) -> bool:
    """Whether a head was made from this very commit in this very way: no need to download it."""
    if not existing.is_of_commit(source):
        return False
    quantization = target.quantization(target.head(moe=has_router(source.head_names)), flags)
    wanted = describe(source, target, quantization.default, quantization.settings, "hf")
    return not existing.differences(wanted)


def _is_same(existing: Existing, plan: Plan, directory: Path) -> bool:
    """Whether a head is what the plan would write; any other than that is not replaced.

    Raises:
        ConvertError: it is another one.
    """
    differences = existing.differences(plan.header)
    if not differences:
        plan.read_through()
        if existing.has_checksums(plan.metadata):
            return True
        differences = ["it was made from other weights than the source has now"]
    raise ConvertError(
        f"{directory} already has a different MTP head: {'; '.join(differences)}. "
        "Pass --force to replace it."
    )


def _nothing_to_do(directory: Path, request: Request, console: Console) -> None:
    console.say(f"{directory} already has this head: nothing to do.")
    if request.verify:
        verify(directory, console)


def _tell_undownloaded(source: Source, target: Target, flags: Flags, console: Console) -> None:
    head = target.head(moe=has_router(source.head_names))
    quantization = target.quantization(head, flags)
    files = sorted(set(source.file_of.values()))
    console.say(
        f"Would download {size_text(source.download_size())} from {source.name}: "
        f"{', '.join(files)}. Quantization: {quantization.default or 'none'}. Did nothing."
    )


def _tell(plan: Plan, target: Target, source: Source, console: Console) -> None:
    revision = f" at {source.revision[:12]}" if source.revision else ""
    console.say(
        f"Head of {source.name}{revision}: {plan.num_parameters / 1e6:,.1f} M parameters, "
        f"{size_text(plan.nbytes)}, {plan.quantization_text}."
    )
    centred = plan.header["source_norm_convention"] == "hf"
    console.say(
        "Norms: zero-centred in the source, 1 is added."
        if centred
        else "Norms: as MLX has them in the source already."
    )
    for note in plan.notes:
        console.say(note)
    for name, (is_equal, text) in compare_tied(plan.tied, target.path, source).items():
        line = f"mtp.{name} is left out, as the trunk's own is used: {text}."
        (console.say if is_equal else console.warn)(line)


def _write(plan: Plan, model: Path, directory: Path, request: Request, console: Console) -> None:
    with _disk_errors(directory):
        if directory != model:
            link_model(model, directory)
        free = shutil.disk_usage(directory).free
        if free < plan.nbytes + _HEADER_BYTES:
            raise ConvertError(
                f"{directory} has {size_text(free)} free; the head takes {size_text(plan.nbytes)}."
            )
        with SidecarWriter(directory, plan.specs, plan.metadata, request.max_file_bytes) as writer:
            with console.progress("Writing the head", plan.nbytes) as advance:
                plan.run(writer, advance)
                files = writer.finish(plan.metadata)
            if request.verify:
                with view_with(model, files) as view:
                    verify(view, console)
            writer.commit(files)
    console.say(f"Wrote {', '.join(files)} beside the model; deleting it undoes this.")


@contextlib.contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[list[SafetensorsFile]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(SafetensorsFile(path)) for path in paths]


@contextlib.contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EACCES: "you may not write there; --output DIR puts the result elsewhere",
            errno.EROFS: "the disk is read-only; --output DIR puts the result elsewhere",
        }.get(error.errno or 0, str(error))
        raise ConvertError(
            f"{directory} can't be written: {reason}. Nothing was changed."
        ) from error
