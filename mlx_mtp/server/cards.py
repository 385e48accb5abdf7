"""The entries of the APIs' lists of models."""

import hashlib
from datetime import UTC, datetime
from typing import Any

from mlx_mtp.errors import UnsupportedRouteError

EMBEDS = ["embedding"]
"""Ollama's list of capabilities for a model that makes embeddings."""


def wrong_kind(name: str, *, embeds: bool) -> UnsupportedRouteError:
    """Returns the error for a request for text to an embedding model (`embeds`), or the reverse."""
    does = "generates text and makes no embeddings; name an embedding model such as Qwen3-Embedding"
    if embeds:
        does = "makes embeddings and generates no text; it answers /v1/embeddings and /api/embed"
    return UnsupportedRouteError(f"The model {name!r} {does}.")


def model_card(name: str, created: datetime, max_model_len: int, **more: Any) -> dict[str, Any]:
    """Returns a model's entry with OpenAI's and Anthropic's fields, which don't clash."""
    return {
        "id": name,
        "object": "model",
        "created": int(created.timestamp()),
        "owned_by": "mlx-mtp",
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        **more,
    }


def model_list(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the answer of /v1/models with these entries."""
    first, last = (cards[0]["id"], cards[-1]["id"]) if cards else ("", "")
    cursor = {"first_id": first, "last_id": last, "has_more": False}
    return {"object": "list", "data": cards, **cursor}


def ollama_card(name: str, created: datetime, kind: str, size: int, **more: Any) -> dict[str, Any]:
    """Returns a model's entry in Ollama's form; `kind` is its model_type, `size` is in bytes."""
    return {
        "name": name,
        "model": name,
        "modified_at": created.isoformat(),
        "size": size,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": model_details(kind),
        **more,
    }


def ollama_unloaded(name: str) -> dict[str, Any]:
    """Returns Ollama's answer to a request that only unloads a model."""
    done = {"model": name, "created_at": datetime.now(UTC).isoformat(), "done": True}
    empty = {"response": "", "message": {"role": "assistant", "content": ""}}
    return done | empty | {"done_reason": "unload"}


def model_details(kind: str) -> dict[str, Any]:
    """Returns the details that Ollama lists about a model's file."""
    fields = {"parent_model": "", "format": "safetensors", "family": kind, "families": [kind]}
    return fields | {"parameter_size": "", "quantization_level": ""}


def ollama_show(
    kind: str, max_model_len: int, created: datetime, able: list[str], template: str = ""
) -> dict[str, Any]:
    """Returns the answer of Ollama's /api/show; `able` lists the model's capabilities."""
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": model_details(kind),
        "model_info": {"general.architecture": kind, f"{kind}.context_length": max_model_len},
        "capabilities": able,
        "modified_at": created.isoformat(),
    }
