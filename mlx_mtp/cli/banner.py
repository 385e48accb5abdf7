"""The banner that `serve` prints when it is ready, and its entry for `mlx-mtp ps`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_mtp.config import HOST_DRAFTS, EngineConfig, ServerConfig
from mlx_mtp.console import labelled
from mlx_mtp.running import RunningServer, announced

if TYPE_CHECKING:
    from mlx_mtp.engine.stats import EngineInfo
    from mlx_mtp.models.model import LoadedModel

_PAGE = " A browser finds a chat at the address."
_OPTIMISTIC = (
    "drafts with {:g} times the probability of the token drawn are accepted too: answers are not "
    "those of plain decoding"
)
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this machine reaches a wildcard address


def announced_alone(
    config: ServerConfig, path: Path, engine: EngineInfo, memory_limit: int
) -> AbstractContextManager[None]:
    """Let `mlx-mtp ps` and other commands find a server of one model (`running.announced`)."""
    return announced(
        RunningServer(
            pid=os.getpid(),
            url=local_url(config.host, config.port),
            models=[config.model_name, *config.other_names],
            directories=[str(path.absolute())],
            needs_key=bool(config.api_keys),
            max_model_len=engine.max_model_len,
            weights=engine.memory["weights"] + engine.memory["head"],
            memory_limit=memory_limit,
            started=time.time(),
        )
    )


def local_url(host: str, port: int) -> str:
    """Returns the URL, without /v1, at which this machine reaches a server listening at `host`."""
    return _url(_LOCAL.get(host, host), port)


def banner(
    config: ServerConfig,
    loaded: LoadedModel,
    engine: EngineInfo,
    backend: str,
    memory: Sequence[str],
    prefixes: str,
    answers: str,
    off: Mapping[str, str],
    width: int | None = None,  # of the terminal
) -> str:
    """Returns the text that `serve` prints: addresses, settings, a curl command, and how to stop.

    `memory` has the lines of the memory plan. `prefixes`, `answers` and `off`, which has a text for
    each draft source, are from `prefixes_text`, `answers_text` and `off_text`. Rows are wrapped to
    `width`.
    """
    from mlx_mtp.distributed import own_address

    unused, depth = ", ".join(loaded.unused_kernels), engine.num_draft_tokens
    local = _LOCAL.get(config.host, config.host)
    drafts = f"{depth} drafts per step"
    if depth == "auto":
        drafts = "drafts follow measured cost and acceptance"
    rows = {
        "address": _url(local, config.port),
        "network": local != config.host and _url(own_address(config.host), config.port),
        "model": f"{config.model_name} ({loaded.model_type}, {loaded.path})",
        "ranks": loaded.num_ranks > 1 and f"{loaded.num_ranks}, each with a part",
        "MTP": f"on, {drafts}; head from {loaded.head_source}"
        if engine.mtp_enabled
        else off["mtp"],
        **{
            word: text if name in engine.draft_sources else off[name]
            for name, (word, text) in HOST_DRAFTS.items()
        },
        "images": seen_text(config, engine),
        "optimistic": config.optimistic and _OPTIMISTIC.format(config.optimistic),
        "backend": backend,
        "kernels": unused and f"slower code in place of {unused}; see the warnings",
        "prefixes": prefixes,
        "answers": answers,
        "memory": "\n".join(memory),
    }
    curl = [f"curl {rows['address']}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if config.api_keys:
        # The variable's name, not the key, as this text ends up in logs and on shared screens.
        curl.append('-H "Authorization: Bearer $MLX_MTP_API_KEY"')
    messages = json.dumps([{"role": "user", "content": "Tell me a story."}])
    body = f'{{"model": {json.dumps(config.model_name)},\n       "messages": {messages}}}'
    curl.append(f"-d {shlex.quote(body)}")
    command = " \\\n  ".join(curl)
    page = _PAGE if config.page else ""
    ready = f"Ready.{page} Ctrl-C stops the server."
    shown = {name: str(text) for name, text in rows.items() if text}
    return f"\n{labelled(shown, width, '  ')}\n\n{command}\n\n{ready}\n"


def router_banner(url: str, models: Sequence[str], keep_alive: float, *, has_page: bool) -> str:
    """Returns the text that `serve` prints for several models: address, names, use of memory."""
    ends = f"after {keep_alive:g} s without one, or " if keep_alive < float("inf") else ""
    memory = f"a request loads its model, which is unloaded {ends}when another needs the room"
    shown = {"address": url, "models": "\n".join(models), "memory": memory}
    return _short(shown, _PAGE if has_page else "")


def embeddings_banner(config: ServerConfig, engine: EngineInfo, path: Path, backend: str) -> str:
    """Returns the text that `serve` prints for an embedding model."""
    made = f"{engine.embedding_size:,} numbers for a text of up to {engine.max_model_len:,} tokens"
    address, model = local_url(config.host, config.port), f"{config.model_name} ({path})"
    rows = {"address": address, "model": model, "embeddings": made, "backend": backend}
    return _short(rows)


def _short(rows: Mapping[str, str], page: str = "") -> str:
    return f"\n{labelled(rows, None, '  ')}\n\nReady.{page} Ctrl-C stops the server.\n"


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def prefixes_text(config: EngineConfig) -> str:
    """Returns a sentence on the prefixes that are kept in memory."""
    if not config.prefix_cache_size:
        return "not kept (--prefix-cache-size is 0)"
    text = f"up to {config.prefix_cache_size / 1e9:.2f} GB of earlier prompts and answers are kept"
    if (bits := config.kv_cache_quantization) is not None:
        text += f", in {bits} bits: answers that reuse them may differ slightly"
    return text


def answers_text(config: EngineConfig, loaded: LoadedModel) -> str:
    """Returns a sentence on when the same request with the same seed gets the same answer."""
    from mlx_mtp.calibration.exactness import known_exactness

    found = known_exactness(loaded)
    same = "the same with MTP on or off, beside any other requests, from a cold or a warm cache"
    if found is not None and found.faults:
        return found.text(config.exact)
    if config.exact and loaded.can_be_exact:
        exact = f"{same}, to the bit (--exact)"
        return exact if found is None else f"exact: {exact}; {found.text(True)}"
    if loaded.dtype.size == 4:
        return f"{same}, but for ties of rounding (float32)"
    differ = (
        "can differ where two tokens are about equally likely: 16-bit sums depend on other rows"
    )
    return differ if found is None else f"{differ}; {found.text(False)}"


def seen_text(config: ServerConfig, engine: EngineInfo) -> str:
    """Returns the limits on images; empty if the model takes none."""
    if engine.images is None:
        return ""
    return (
        f"up to {config.max_images} a request, each of up to {engine.images.most_tokens:,} tokens"
    )


def off_text(options: argparse.Namespace, source: str) -> str:
    """Returns a sentence on why a draft source is off, and on which setting says so."""
    if source not in options.drafts.split(","):
        key, why = "drafts", f"--drafts {options.drafts}"
    elif source != "mtp":
        key = "mtp_num_draft_tokens"
        why = f"--mtp-num-draft-tokens {options.mtp_num_draft_tokens}"
    elif options.enable_mtp is False:
        key, why = "enable_mtp", "--no-enable-mtp"
    else:
        return "off: the model has no head"
    place = options.given.get(key)
    return f"off: {why} (from {place})" if place else f"off: {why}"
