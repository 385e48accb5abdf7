"""Replaces content in a chat's history that this server's models can't read by text.

Sessions that began with another model have images, files and calls of tools that only a vendor's
servers run. Each later request repeats them, so refusing them would end the session.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from mlx_mtp.server.api.schema import note_ignored

_IMAGES = frozenset(("image", "image_url", "input_image"))
_MEDIA = {
    **dict.fromkeys((*_IMAGES, "computer_screenshot"), "image"),
    "image_generation_call": "image",
    **dict.fromkeys(("document", "file", "input_file"), "file"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
# Calls of vendors' tools and their results, in Responses and in Anthropic's messages.
_VENDORS = re.compile(r"(?!function_call)\w+(_call|_output)|(server|mcp)_tool_use|\w+_tool_result")
_UNTOLD = {"type", "id", "status", "cache_control", "encrypted_content", "signature"}


def _readable(value: object, info: ValidationInfo) -> object:
    """Returns a chat's messages or items, with text for content that the model can't read.

    Media in the message that asks for the answer stay, and cause an error later: without them the
    answer would be wrong.
    """
    if not isinstance(value, list) or info.context is None:
        return value
    asking = max((n for n, entry in enumerate(value) if _is_asked(entry)), default=-1)
    note = partial(note_ignored, info.context)
    seen = _IMAGES if getattr(info.context, "sees", False) else frozenset[str]()
    return [
        entry if n == asking and _is_question(entry) else _as_text(entry, note, seen)
        for n, entry in enumerate(value)
    ]


readable = BeforeValidator(_readable)


def _is_asked(entry: object) -> bool:
    """Returns True for a message or item of a user or a tool, which the model answers."""
    if not isinstance(entry, dict):
        return False
    return entry.get("role") in ("user", "tool") or _is_output(entry.get("type"))


def _is_question(entry: object) -> bool:
    """Returns True for a user's message without tool results (Anthropic's API has them there)."""
    if not isinstance(entry, dict) or entry.get("role") != "user":
        return False
    content = entry.get("content")
    parts = content if isinstance(content, list) else []
    return not any(isinstance(p, dict) and p.get("type") == "tool_result" for p in parts)


def _is_output(kind: object) -> bool:
    return isinstance(kind, str) and kind.endswith("_output")


def _as_text(entry: Any, note: Callable[[str], None], seen: frozenset[str]) -> Any:
    """Replace media of types that are not in `seen`, and whole calls of vendors' tools, by text."""
    if not isinstance(entry, dict):
        return entry
    kind = entry.get("type")
    of_vendor = isinstance(kind, str) and _VENDORS.fullmatch(kind)
    if of_vendor:
        seen = frozenset()
    if isinstance(kind, str) and kind not in seen and (medium := _MEDIA.get(kind)):
        note(f"content[].{kind}")
        return _part(kind, f"[{medium} left out: this model reads text only]")
    for key in ("content", "output"):
        inner = entry.get(key)
        if isinstance(inner, list):
            entry = entry | {key: [_as_text(part, note, seen) for part in inner]}
        elif inner is not None:
            entry = entry | {key: _as_text(inner, note, seen)}
    if of_vendor and isinstance(kind, str):
        return _part(kind, f"[{kind} {json.dumps(_told(entry), ensure_ascii=False)}]")
    if (images := entry.get("images")) and not seen:  # Ollama's
        note("messages[].images")
        texts = ["[image left out: this model reads text only]"] * len(images)
        return entry | {"images": [], "content": "\n".join([entry.get("content") or "", *texts])}
    return entry


def _part(kind: str, text: str) -> dict[str, Any]:
    """Returns a text as a content part or, if `kind` is an item of Responses, as a message."""
    if not kind.endswith(("_call", "_output")):
        return {"type": "text", "text": text}
    role = "user" if _is_output(kind) else "assistant"
    return {"type": "message", "role": role, "content": text}


def _told(value: Any) -> Any:
    """Returns the fields of a vendor's call or result that are shown as text."""
    if isinstance(value, dict):
        return {key: _told(inner) for key, inner in value.items() if key not in _UNTOLD}
    return [_told(inner) for inner in value] if isinstance(value, list) else value
