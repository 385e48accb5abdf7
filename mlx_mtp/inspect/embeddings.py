"""Which models make embeddings, and the memory that they take."""

import contextlib
from pathlib import Path
from typing import Any

from mlx_mtp.console import size_text
from mlx_mtp.convert.source import HubRepo, on_hub, weight_map_of
from mlx_mtp.errors import ModelError
from mlx_mtp.machine import MemoryLimit, machine_memory
from mlx_mtp.models.embedding import EmbeddingModel, memory_need
from mlx_mtp.models.files import read_json
from mlx_mtp.models.hub import cached_model
from mlx_mtp.server.cards import EMBEDS


def embedding_directory(name: str | None) -> Path | None:
    """The directory with config.json of a model that makes embeddings; None for any other model.

    Chat models of the same type differ in their names, or in lacking sentence-transformers' file.
    """
    if name is None:
        return None
    path, is_named = Path(name).expanduser(), "embedding" in Path(name).name.lower()
    with contextlib.suppress(ModelError):  # Whoever loads the model explains it.
        if on_hub(name) and is_named:
            path = cached_model(name) or HubRepo(name, None).directory
        if is_named or (path / "modules.json").is_file():
            return path if read_json(path / "config.json").get("model_type") == "qwen3" else None
    return None


def embedding_need(name: str | None, dtype: str, most: int | None) -> dict[str, Any] | None:
    """The line of `needs` of a model, for texts of `most` tokens; None if it makes no embeddings.

    Raises ModelError.
    """
    if name is None or (directory := embedding_directory(name)) is None:
        return None
    if any(directory.glob("model*.safetensors")):
        model = EmbeddingModel(directory, dtype, machine_memory().nbytes, most)
        config, weights, tokens, need = model.config, model.nbytes, model.max_tokens, model.need
    else:
        repo, config = HubRepo(name, None), read_json(directory / "config.json")
        files = map(repo.remote, set(weight_map_of(repo).values()))
        weights = sum(file.size or 0 for file in files if file)
        tokens, need = memory_need(config, weights, most)
    kind = {"kind": config["model_type"], "able": EMBEDS, "size": config["hidden_size"]}
    return {"refusal": None, "nbytes": need, "weights": weights, "context": tokens, **kind}


def embedding_rows(name: str | None, need: dict[str, Any], limit: MemoryLimit) -> dict[str, str]:
    """What `inspect` shows of a model."""
    room, fits = f"{size_text(limit.nbytes)} ({limit.source})", need["nbytes"] <= limit.nbytes
    return {
        "fits": f"yes, in {room}" if fits else f"no, in {room}",
        "model": f"{name}, a {need['kind']}, makes embeddings of {need['size']:,} numbers",
        "weights": size_text(need["weights"]),
        "memory": f"{size_text(need['nbytes'])}, with a text of {need['context']:,} tokens",
        "next": f"mlx-mtp serve {name}" if fits else "none, as `serve` would refuse it",
    }
