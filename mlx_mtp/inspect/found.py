"""What a model is, and whether it has its MTP head, from config.json and its files' headers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlx_mtp.cache.specs import AttentionSpec
from mlx_mtp.console import size_text
from mlx_mtp.convert import source
from mlx_mtp.convert.files import FORMAT_VERSION_KEY, Existing, SafetensorsFile
from mlx_mtp.convert.target import Target
from mlx_mtp.models.hub import resolve_model
from mlx_mtp.models.published import fetched_head_nbytes, source_of
from mlx_mtp.models.tower_weights import SIDECAR, tower_name


class FoundModel(NamedTuple):
    """A model on this machine or on the hub."""

    name: str  # a directory or a hub id
    target: Target  # its config.json
    trunk: tuple[int, int]  # size in bytes and number of the model's own files
    head: str | None  # a description; None without a head
    head_bytes: int = 0  # besides the trunk's; without a head, of the one `serve` fetches
    directory: Path | None = None  # of the weights, if they are local
    refusal: str | None = None  # the known reason why `serve` would refuse the model
    tower: str | None = None  # where its vision tower is; None without one


def find_model(name: str | None) -> FoundModel:
    """Find a model by its directory or hub id, or the bundled one (None); raises ModelError."""
    if source.on_hub(name):
        return _remote(source.HubRepo(name, None))
    return _local(resolve_model(name))


def quantization(config: Mapping[str, Any]) -> str:
    """Returns a description of a model's quantization."""
    table = config.get("quantization") or config.get("quantization_config")
    if not isinstance(table, dict):
        return "none"
    if "quant_method" in table and "bits" not in table:
        return str(table["quant_method"])
    others = sum(isinstance(value, (dict, bool)) for value in table.values())
    mode = str(table.get("mode", "affine")) + (f"; {others} matrices differ" if others else "")
    return f"{table.get('bits')} bits, groups of {table.get('group_size')}, {mode}"


def family(model: FoundModel) -> str:
    """Returns a description of a model's type and sizes."""
    args = model.target.args
    layers = model.target.family.layer_specs(args)
    attention = sum(isinstance(layer, AttentionSpec) for layer in layers)
    experts = layers[0].mlp.num_experts
    mlp = f"{experts} experts" if experts else "dense"
    return (
        f"{model.target.config['model_type']}: {len(layers)} layers, {attention} of them with "
        f"attention; hidden size {args.hidden_size}, vocabulary {args.vocab_size:,}, {mlp}"
    )


def next_command(model: FoundModel, ranks: int, *, served: bool) -> str:
    """Returns the command to type next: to serve the model, or to give it its head first."""
    if not served:
        return "none, as `serve` would refuse it (see the first line)"
    serve = "mlx-mtp serve" if ranks == 1 else f"mlx.launch -n {ranks} -- mlx-mtp serve"
    if model.head:
        return f"{serve} {model.name}"
    if source.on_hub(model.name) and source_of(model.name):
        return f"{serve} {model.name} (it fetches the head)"
    adding = f"mlx-mtp add-mtp-weights {model.name}"
    return f"{adding}; or without the head: {serve} {model.name}"


def _local(path: Path) -> FoundModel:
    target = Target(path)
    files = sorted(path.glob("model*.safetensors"))
    trunk = (_total(files), len(files))
    existing = Existing.find(path)
    head, head_bytes = None, 0
    if existing is not None:
        head_bytes = _total(existing.files)
        head = _sidecar(existing, head_bytes)
    elif tensors := source.head_of(source.weight_map_of(repo := source.LocalRepo(path))):
        repo.missing(sorted(set(tensors.values())))
        files_of_head = [SafetensorsFile(path / name) for name in set(tensors.values())]
        size = sum(
            t.nbytes for file in files_of_head for key, t in file.tensors.items() if key in tensors
        )
        head = f"in {_file_names(tensors.values())}: {size_text(size)} of the weights"
    beside = SIDECAR if (path / SIDECAR).is_file() else None
    tower = _tower(source.weight_map_of(source.LocalRepo(path)), target) or beside
    return FoundModel(str(path), target, trunk, head, head_bytes, path, tower=tower)


def _sidecar(existing: Existing, size: int) -> str:
    if not existing.files:
        return "can't be read: write it again with `mlx-mtp add-mtp-weights --force`"
    metadata = existing.metadata
    place = f"in {_file_names(file.name for file in existing.files)}: {size_text(size)}"
    if FORMAT_VERSION_KEY not in metadata:
        return f"{place}, not made by this program"
    bits = f"{metadata['bits']} bits, {metadata['mode']}"
    bits = "unquantized" if metadata["mode"] == "none" else bits
    revision = f" at {metadata['source_revision'][:12]}" if metadata["source_revision"] else ""
    return f"{place}, {bits}; from {metadata['source']}{revision}, by {metadata['created_by']}"


def _remote(repo: source.HubRepo) -> FoundModel:
    target = Target(repo.directory)
    weights = source.weight_map_of(repo)
    files = set(weights.values())
    trunk = _sizes(repo, files)
    refusal = None
    if absent := files - trunk.keys():
        refusal = f"{repo.repo_id} has no {min(absent)}, which its index names."
    head, head_bytes = None, 0
    if inside := source.head_of(weights):
        head = f"in {_file_names(inside.values())}"
    elif added := source.cached_sidecar(repo):
        head_bytes, names = _total(added), _file_names(file.name for file in added)
        head = f"in {names} of the local cache: {size_text(head_bytes)}"
    elif beside := source.remote_sidecar(repo):
        head_bytes = sum(_sizes(repo, beside).values())
        head = f"in {_file_names(beside)}: {size_text(head_bytes)}"
    else:
        head_bytes = fetched_head_nbytes(repo.repo_id)
    total = sum(trunk.values()), len(trunk)
    tower = _tower(weights, target)
    return FoundModel(repo.repo_id, target, total, head, head_bytes, refusal=refusal, tower=tower)


def _tower(weights: Mapping[str, str], target: Target) -> str | None:
    files = {file for key, file in weights.items() if tower_name(key)}
    return _file_names(files) if files and "vision_config" in target.config else None


def _sizes(repo: source.HubRepo, names: Iterable[str]) -> dict[str, int]:
    """Returns the bytes of each of these files that the hub has."""
    return {name: file.size for name in names if (file := repo.remote(name))}


def _total(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _file_names(files: Iterable[str]) -> str:
    return ", ".join(sorted(set(files)))
