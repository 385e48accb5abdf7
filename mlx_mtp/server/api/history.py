"""Text for what a chat's history has that this server's models don't read.

Sessions that another model began have images, files and calls of tools that only a vendor's servers
run. Each further request has them too, so refusing them would end the session.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from mlx_mtp.server.api.schema import note_ignored

_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    "image_generation_call": "image",
    **dict.fromkeys(("document", "file", "input_file"), "file"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
# Calls of vendors' tools and their results, in Responses and in Anthropic's messages.
_VENDORS = re.compile(r"(?!function_call)\w+(_call|_output)|(server|mcp)_tool_use|\w+_tool_result")
_UNTOLD = {"type", "id", "status", "cache_control", "encrypted_content", "signature"}


def _readable(value: object, info: ValidationInfo) -> object:
    """The messages or items of a chat, in which text stands for what no model here reads.

    Media of the message that asks for the answer are left as they are: without them it would be
    wrong, so they are an error.
    """
    if not isinstance(value, list) or info.context is None:
        return value
    asking = max((n for n, entry in enumerate(value) if _is_asked(entry)), default=-1)
    note = partial(note_ignored, info.context)
    return [
        entry if n == asking and _is_question(entry) else _as_text(entry, note)
        for n, entry in enumerate(value)
    ]


readable = BeforeValidator(_readable)


def _is_asked(entry: object) -> bool:
    """Whether a message or item is a user's or a tool's, which the model answers."""
    if not isinstance(entry, dict):
        return False
    return entry.get("role") in ("user", "tool") or _is_output(entry.get("type"))


def _is_question(entry: object) -> bool:
    """Whether a message is a user's, and no tool's result, which Anthropic's API has within it."""
    if not isinstance(entry, dict) or entry.get("role") != "user":
        return False
    content = entry.get("content")
    parts = content if isinstance(content, list) else []
    return not any(isinstance(p, dict) and p.get("type") == "tool_result" for p in parts)


def _is_output(kind: object) -> bool:
    return isinstance(kind, str) and kind.endswith("_output")


def _as_text(entry: Any, note: Callable[[str], None]) -> Any:
    """A message, item or part."""
    if not isinstance(entry, dict):
        return entry
    kind = entry.get("type")
    if isinstance(kind, str) and (medium := _MEDIA.get(kind)):
        note(f"content[].{kind}")
        return _part(kind, f"[{medium} left out: this model reads text only]")
    for key in ("content", "output"):
        inner = entry.get(key)
        if isinstance(inner, list):
            entry = entry | {key: [_as_text(part, note) for part in inner]}
        elif inner is not None:
            entry = entry | {key: _as_text(inner, note)}
    if isinstance(kind, str) and _VENDORS.fullmatch(kind):
        return _part(kind, f"[{kind} {json.dumps(_told(entry), ensure_ascii=False)}]")
    if images := entry.get("images"):  # Ollama's
        note("messages[].images")
        texts = ["[image left out: this model reads text only]"] * len(images)
        return entry | {"images": [], "content": "\n".join([entry.get("content") or "", *texts])}
    return entry


def _part(kind: str, text: str) -> dict[str, Any]:
    """A text as a part of content, or for an item of Responses as a message."""
    if not kind.endswith(("_call", "_output")):
        return {"type": "text", "text": text}
    role = "user" if _is_output(kind) else "assistant"
    return {"type": "message", "role": role, "content": text}


def _told(value: Any) -> Any:
    """What a text says of a vendor's call or its result."""
    if isinstance(value, dict):
        return {key: _told(inner) for key, inner in value.items() if key not in _UNTOLD}
    return [_told(inner) for inner in value] if isinstance(value, list) else value
