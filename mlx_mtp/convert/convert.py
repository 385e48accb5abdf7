"""The two conversions: adding a head to an MLX model, and making an MLX model with its head."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_mtp.console import say_wrapped, size_text
from mlx_mtp.convert.files import FORMAT_VERSION_KEY, Existing, link_model, new_sidecar
from mlx_mtp.convert.plan import ConversionPlan
from mlx_mtp.convert.source import (
    HubRepo,
    LocalRepo,
    find_source,
    head_of,
    on_hub,
    open_source,
    weight_map_of,
)
from mlx_mtp.convert.target import Target
from mlx_mtp.convert.tower import add_tower
from mlx_mtp.convert.trunk import convert_trunk
from mlx_mtp.convert.verify import verify_head
from mlx_mtp.errors import ConvertError, MlxMtpError, ModelError
from mlx_mtp.models.files import few_names
from mlx_mtp.models.head_weights import SIDECAR, Convention, read_sidecar
from mlx_mtp.models.hub import resolve_model


def add_head(
    model_name: str,
    source_name: str | None,
    *,
    flags: Mapping[str, Any] | None = None,
    revision: str | None = None,
    output: Path | None = None,
    dry_run: bool = False,
    force: bool = False,
    verify: bool = False,
    mtp_norms: Convention | None = None,
    vision_bits: int | None = None,
    with_tower: bool = True,
) -> Path | None:
    """Add the MTP head to an MLX model, unless the model has it; an error changes nothing.

    `find_source` finds the source if `source_name` is None. `output` is a new directory to fill
    instead of changing the model's; it is returned, except if the model's own files have the head.
    A vision tower that the model lost is added too, in `vision_bits` bits per weight, unless
    `with_tower` is false. Raises ModelError.
    """
    # Otherwise only config.json of a model on the hub is needed.
    is_whole = verify or output is not None or not on_hub(model_name)
    model = resolve_model(model_name) if is_whole else HubRepo(model_name, None).directory
    directory = output or model
    target = Target(model)
    existing = None if force else Existing.find(directory)
    if existing is None and not force and head_of(weight_map_of(LocalRepo(model))):
        say_wrapped(f"{model} has its head in its own files: nothing to do (--force adds one).")
        return None
    asked = source_name or flags or output
    if existing and not asked and _is_foreign_head(directory, existing):
        say_wrapped(f"{model} came with its head: nothing to do (--force replaces it).")
        return None
    source = (
        open_source(source_name, revision) if source_name else find_source(model_name, revision)
    )
    target.check_source(source.config, source.name)
    plan = ConversionPlan(target, source, flags or {})
    commit = source.repo.commit_hash
    if not existing or not commit or existing.differences(plan.header, but=["created_by"]):
        missing = source.repo.missing(source.files)
        size = size_text(sum(missing.values()))
        if missing and dry_run:
            files = f"Would download {size} from {source.name}: {', '.join(source.files)}."
            say_wrapped(f"{files} Quantization: {plan.default or 'none'}. Did nothing.")
            return output
        if missing and isinstance(source.repo, HubRepo):
            which = f"{len(missing)} of {len(source.files)} files from {source.name}"
            say_wrapped(f"Downloading {which} at {commit or ''!s:.12}: {size}.")
            source.repo.fetch(list(missing))
        paths = [path for name in source.files if (path := source.repo.file(name))]
        plan.open(paths, mtp_norms)
        if existing is None:
            if dry_run:
                say_wrapped(f"Would write {size_text(plan.nbytes)} to {directory}; wrote nothing.")
            else:
                _write_head(plan, model, directory, verify)
            if with_tower:
                add_tower(model_name, model, directory, source, bits=vision_bits, dry_run=dry_run)
            return output
        _check_same(existing, plan, directory)
    say_wrapped(f"{directory} already has this head: nothing to do.")
    if with_tower:
        add_tower(model_name, model, directory, source, bits=vision_bits, dry_run=dry_run)
    if verify:
        verify_head(directory)
    return output


def convert_model(
    source_name: str,
    output: Path,
    *,
    quantize: bool,
    flags: Mapping[str, Any],
    dtype: str | None,
    revision: str | None,
    verify: bool,
    vision_bits: int | None = None,
) -> None:
    """Convert trunk and head into a new directory, which appears complete or not at all."""
    if output.exists():
        raise ConvertError(f"{output} already exists: give --output a new directory.")
    source = open_source(source_name, revision)
    table = source.config.get("quantization_config")
    method = table.get("quant_method", "fp8") if isinstance(table, dict) else "fp8"
    if method != "fp8":
        raise ConvertError(
            f"{source.name} is quantized ({method}), which is not converted. Convert the BF16 "
            f"original or an FP8 release: `mlx-mtp convert ORIGINAL -q --output {output}`."
        )
    path = resolve_model(source_name, revision)
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        hub_id = source_name if on_hub(source_name) else None
        convert_trunk(path, unfinished, hub_id, quantize=quantize, flags=flags, dtype=dtype)
        given: dict[str, Any] = {"revision": revision, "verify": verify}
        add_head(str(unfinished), source_name, vision_bits=vision_bits, **given)
        unfinished.rename(output)
    except MlxMtpError:
        raise
    except OSError as error:
        raise ConvertError(f"{output} can't be written: {error}. Nothing was changed.") from error
    except Exception as error:
        # mlx-lm and mlx raise errors of any type.
        why = few_names(f"{error}".split(",\n"))
        raise ConvertError(
            f"{source_name} can't be converted: {why:.1000} "
            f"`mlx-mtp inspect {source_name}` shows what its config.json and files say."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _is_foreign_head(directory: Path, existing: Existing) -> bool:
    """Returns True if another program wrote the sidecar and it can be served as it is."""
    with contextlib.suppress(ModelError):
        return FORMAT_VERSION_KEY not in existing.metadata and bool(read_sidecar(directory))
    return False


def _check_same(existing: Existing, plan: ConversionPlan, directory: Path) -> None:
    # Compare the source's contents, not its name and revision.
    differences = existing.differences(plan.header, ["created_by", "source", "source_revision"])
    if not differences:
        plan.read_through()
        if existing.metadata.get("source_files") == plan.metadata()["source_files"]:
            return
        differences = ["it was made from other weights than the source has now"]
    raise ConvertError(
        f"{directory} already has a different MTP head: {'; '.join(differences)}. "
        "Pass --force to replace it."
    )


def _write_head(plan: ConversionPlan, model: Path, directory: Path, verify: bool) -> None:
    start, size = time.perf_counter(), size_text(plan.nbytes)
    try:
        if directory != model:
            link_model(model, directory)
        free = shutil.disk_usage(directory).free
        if free < plan.nbytes + (1 << 20):  # with room for the header
            raise ConvertError(f"{directory} has {size_text(free)} free; the head takes {size}.")
        with new_sidecar(directory, plan.like, plan.metadata, plan.converted()) as path:
            say_wrapped(f"Converted to {size} in {time.perf_counter() - start:.1f} s.")
            if verify:
                with tempfile.TemporaryDirectory(prefix="mlx-mtp-view-") as folder:
                    link_model(model, Path(folder))
                    (Path(folder) / SIDECAR).symlink_to(path.resolve())
                    verify_head(Path(folder))
    except OSError as error:
        raise ConvertError(
            f"{directory} can't be written: {error.strerror or error}. Nothing was changed; "
            "--output DIR puts the result elsewhere."
        ) from error
    say_wrapped(f"Wrote {SIDECAR} beside the model; deleting it undoes this.")
