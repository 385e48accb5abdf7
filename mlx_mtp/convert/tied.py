"""Compares copies of the trunk's matrices, which some heads have, with the trunk's own."""

import mlx.core as mx

from mlx_mtp.convert.files import FP8, TYPES, SafetensorsFile, StoredTensor
from mlx_mtp.convert.source import LocalRepo, Source, weight_map_of
from mlx_mtp.convert.target import Setting, Target, setting_of
from mlx_mtp.models.head_weights import head_name

_ROWS = 1024
_MAX_ERROR_RATIO = 1.5


def compare_tied(name: str, copy: StoredTensor, target: Target, source: Source) -> tuple[bool, str]:
    """Compare a copy with the target's trunk, or else with the source's.

    Returns whether they are equal, and a description. A copy counts as equal to a quantized trunk
    if they differ by at most 1.5 times the error of quantizing the copy.
    """
    # With tied embeddings there is no lm_head.
    endings = (*(["lm_head"] if "head" in name else []), "embed_tokens")
    for repo, config in ((LocalRepo(target.path), target.config), (source.repo, source.config)):
        for ending in endings:
            parts = _trunk_matrix(repo, ending) if isinstance(repo, LocalRepo) else []
            if parts and parts[0].dtype in TYPES and parts[0].dtype != FP8:
                table = config.get("quantization") or {}
                entry = table.get(parts[0].name.removesuffix(".weight"))
                setting = setting_of(entry if isinstance(entry, dict) else table)
                return _compare(copy, parts, setting if len(parts) > 1 else None)
    return True, "not compared: the trunk's weights are not on this machine"


def _trunk_matrix(repo: LocalRepo, ending: str) -> list[StoredTensor]:
    """Returns the weight, with scales and biases if it is quantized; empty if there is none."""
    files = {key: path for key, name in weight_map_of(repo).items() if (path := repo.file(name))}
    stems = (key.removesuffix(".weight") for key in files if head_name(key) is None)
    stem = next((stem for stem in stems if stem.endswith(ending)), None)
    names = [f"{stem}.{part}" for part in ("weight", "scales", "biases")]
    return [SafetensorsFile(files[name]).tensors[name] for name in names if name in files]


def _compare(
    copy: StoredTensor, parts: list[StoredTensor], setting: Setting | None
) -> tuple[bool, str]:
    copy.like()  # raises CheckpointError for a type that can't be read
    rows, columns = copy.shape[0], copy.shape[-1]
    packed = columns * setting.bits // 32 if setting else columns
    if parts[0].shape != (*copy.shape[:-1], packed):
        return False, f"of shape {copy.shape}, the trunk's of {parts[0].shape}"
    difference = own_error = norm = 0.0
    step = rows if copy.scales else _ROWS
    with mx.stream(mx.cpu):
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            ours, *trunk = (tensor.sliced(start, stop).read() for tensor in (copy, *parts))
            if setting:
                trunk = [setting.dequantize(trunk)]
                own_error += _distance(ours, setting.dequantize(setting.quantize(ours)))
            difference += _distance(ours, trunk[0])
            norm += _distance(ours, mx.zeros_like(ours))
    if difference == 0:
        return True, "equal to the trunk's"
    if difference <= _MAX_ERROR_RATIO**2 * own_error:
        return True, f"equal to the trunk's as far as {setting} can tell"
    relative = (difference / norm) ** 0.5 if norm else float("inf")
    return False, f"different from the trunk's (relative error {relative:.1%})"


def _distance(one: mx.array, other: mx.array) -> float:
    return float(mx.square(one.astype(mx.float32) - other.astype(mx.float32)).sum())
