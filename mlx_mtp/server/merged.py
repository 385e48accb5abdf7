"""Merges /live and /metrics of several models' servers."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mlx_mtp.errors import UNEXPECTED
from mlx_mtp.unix_http import ask

SECONDS = 0.5  # between two messages

_TOTALS = ("prompt_tokens", "generation_tokens", "drafts", "accepted", "first_tokens")
_PREFIXES = ("queries", "hits", "nbytes", "num_entries", "num_files", "file_nbytes", "limit")
# The merged parts of a message of /live when no model runs.
_NOTHING: dict[str, Any] = {
    "totals": dict.fromkeys((*_TOTALS, "first_token_seconds"), 0),
    "rows": [],
    "failures": [],
    **dict.fromkeys(("running", "waiting", "held", "capacity"), 0),
    "rejected": {},
    "drafts": {"sources": {}, "choice": None},
    "memory": {"plan": {}, "active": 0, "rows": 0},
    "prefixes": {**dict.fromkeys(_PREFIXES, 0), "evicted": {}},
}


async def merged_stream(
    running: Callable[[], Mapping[str, Path]],
) -> AsyncIterator[dict[str, Any]]:
    """Yields merged messages of /live forever; `running` returns the servers' sockets by model."""
    latest: dict[str, dict[str, Any]] = {}
    readers: dict[Path, asyncio.Task[None]] = {}

    async def read(name: str, path: Path) -> None:
        rest = b""
        lost = contextlib.suppress(OSError, *UNEXPECTED)
        with lost, await ask(path, "GET", "/live") as answer:
            while piece := await answer.piece():
                *events, rest = (rest + piece).split(b"\n\n")
                if events:
                    latest[name] = json.loads(events[-1].removeprefix(b"data: "))
        latest.pop(name, None)

    try:
        while True:
            # A server whose stream has ended, or that refused to begin one, is asked again.
            readers = {path: task for path, task in readers.items() if not task.done()}
            for name, path in running().items():
                if path not in readers:
                    readers[path] = asyncio.create_task(read(name, path))
            yield merged_live(latest)
            await asyncio.sleep(SECONDS)
    finally:
        for task in readers.values():
            task.cancel()


def merged_live(messages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge each model's latest message, without `history`; rows get their model's name."""
    named = [
        message | {"rows": [row | {"model": name} for row in message["rows"]]}
        for name, message in messages.items()
    ]
    keys = _NOTHING.keys()
    merged: dict[str, Any] = _sum([_NOTHING, *({k: each[k] for k in keys} for each in named)])
    choices = [each["drafts"]["choice"] for each in named]
    servers = [each["server"] for each in named]
    merged["drafts"]["choice"] = next(filter(None, choices), None)
    merged["memory"]["rows"] /= max(1, len(named))
    merged["totals"]["time"] = time.time()
    merged["server"] = {
        "context": max((each["context"] for each in servers), default=0),
        "most_rows": sum(each["most_rows"] for each in servers),
        "drafts": next((each["drafts"] for each in servers), "auto"),
        "restarts": sum(each["restarts"] for each in servers),
    }
    return merged


def _sum(parts: list[Any]) -> Any:
    """Add nested values: numbers at the same place are summed, other lists concatenated."""
    first = next((part for part in parts if part is not None), None)
    if isinstance(first, dict):
        keys = dict.fromkeys(key for part in parts if part for key in part)
        return {key: _sum([part[key] for part in parts if part and key in part]) for key in keys}
    if isinstance(first, list):
        flat = [value for part in parts for value in part]
        if all(isinstance(value, int | float) for value in flat):
            return [sum(column) for column in zip_longest(*parts, fillvalue=0)]
        return flat
    return sum(part or 0 for part in parts) if isinstance(first, int | float) else first


def merged_metrics(own: str, others: dict[str, str]) -> str:
    """Merge metrics; the samples of `others`, texts by model name, get the label `model`."""
    families: dict[str, list[str]] = {}
    _add_metrics(families, own, "")
    for name, text in others.items():
        escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        _add_metrics(families, text, f'model="{escaped}"')
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _add_metrics(families: dict[str, list[str]], text: str, label: str) -> None:
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("# HELP"):
            name = line.split(" ", 3)[2]
            is_new = name not in families
            lines = families.setdefault(name, [])
        if line.startswith("#"):
            lines += [line] if is_new else []
            continue
        name, brace, rest = line.partition("{")
        if not label:
            lines.append(line)
        elif brace:
            lines.append(f"{name}{{{label},{rest}")
        else:
            name, _, value = line.partition(" ")
            lines.append(f"{name}{{{label}}} {value}")
