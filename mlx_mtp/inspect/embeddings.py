"""Finds embedding models, and the memory that they take."""

import contextlib
from pathlib import Path
from typing import Any

from mlx_mtp.convert.source import HubRepo, on_hub
from mlx_mtp.embeddings import EmbeddingEngine, memory_need
from mlx_mtp.errors import ModelError
from mlx_mtp.machine import machine_memory
from mlx_mtp.models.files import read_json
from mlx_mtp.models.hub import cached_model, repository_size
from mlx_mtp.server.cards import EMBEDS


def embedding_directory(name: str | None) -> Path | None:
    """Returns the directory with config.json of an embedding model; None for any other model.

    An embedding model has "embedding" in its name, or sentence-transformers' modules.json; chat
    models of the same type have neither.
    """
    path = Path(name or "").expanduser()
    is_named = "embedding" in path.name.lower()
    with contextlib.suppress(ModelError):  # Loading the model reports it.
        if is_named and on_hub(name):
            path = cached_model(name) or HubRepo(name, None).directory
        if name and (is_named or (path / "modules.json").is_file()):
            return path if read_json(path / "config.json").get("model_type") == "qwen3" else None
    return None


def embedding_need(name: str | None, dtype: str, most: int | None) -> dict[str, Any] | None:
    """Returns an embedding model's line of `needs`, for texts of `most` tokens.

    Returns None for any other model. Raises ModelError if the model can't be used.
    """
    if (directory := embedding_directory(name)) is None:
        return None
    config, weights = read_json(directory / "config.json"), None
    if any(directory.glob("model*.safetensors")):
        engine = EmbeddingEngine(directory, dtype, machine_memory().nbytes)
        weights = engine.info.memory["weights"]
    if not (weights := weights or repository_size(str(name))):
        raise ModelError(f"The weights of {name} can't be found, so their size is not known.")
    tokens, nbytes = memory_need(config, weights, most)
    kind = {"kind": config["model_type"], "able": EMBEDS, "size": config["hidden_size"]}
    return {"refusal": None, "nbytes": nbytes, "weights": weights, "context": tokens, **kind}
