"""What `serve` prints when it is ready."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlx_mtp.config import HOST_DRAFTS, EngineConfig, ServerConfig
from mlx_mtp.console import labelled

if TYPE_CHECKING:
    from mlx_mtp.engine.stats import EngineInfo
    from mlx_mtp.models.model import LoadedModel

_OPTIMISTIC = (
    "drafts with {:g} times the probability of the token drawn are accepted too: answers are not "
    "those of plain decoding"
)


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
    """The text that `serve` prints: addresses, settings, a curl command to try, and how to stop.

    `memory` are the lines of the plan; `prefixes`, `answers` and, for each source of drafts, `off`
    are texts of the three functions below. Rows are wrapped to `width`.
    """
    from mlx_mtp.distributed import own_address

    unused, depth = ", ".join(loaded.unused_kernels), engine.num_draft_tokens
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
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
        "optimistic": config.optimistic and _OPTIMISTIC.format(config.optimistic),
        "backend": backend,
        "kernels": unused and f"slower code in place of {unused}; see the warnings",
        "prefixes": prefixes,
        "answers": answers,
        "memory": "\n".join(memory),
    }
    curl = [f"curl {rows['address']}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if config.api_keys:
        # Only the variable's name, as this text ends up in logs and on shared screens.
        curl.append('-H "Authorization: Bearer $MLX_MTP_API_KEY"')
    messages = json.dumps([{"role": "user", "content": "Tell me a story."}])
    body = f'{{"model": {json.dumps(config.model_name)},\n       "messages": {messages}}}'
    curl.append(f"-d {shlex.quote(body)}")
    command = " \\\n  ".join(curl)
    page = " A browser finds a chat at the address." if config.page else ""
    ready = f"Ready.{page} Ctrl-C stops the server."
    shown = {name: str(text) for name, text in rows.items() if text}
    return f"\n{labelled(shown, width, '  ')}\n\n{command}\n\n{ready}\n"


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def prefixes_text(config: EngineConfig) -> str:
    """A sentence on the prefixes that are kept in memory."""
    if not config.prefix_cache_size:
        return "not kept (--prefix-cache-size is 0)"
    text = f"up to {config.prefix_cache_size / 1e9:.2f} GB of earlier prompts and answers are kept"
    if (bits := config.kv_cache_quantization) is not None:
        text += f", in {bits} bits: answers that reuse them may differ slightly"
    return text


def answers_text(config: EngineConfig, loaded: LoadedModel) -> str:
    """A sentence on when the same request with the same seed gets the same answer."""
    same = "the same with MTP on or off, beside any other requests, from a cold or a warm cache"
    if config.exact and loaded.can_be_exact:
        return f"{same}, to the bit (--exact)"
    if loaded.dtype.size == 4:
        return f"{same}, but for ties of rounding (float32)"
    return "may part where two tokens are about as good: 16-bit sums depend on what runs beside"


def off_text(options: argparse.Namespace, source: str) -> str:
    """A sentence on why a source drafts nothing, if it is off."""
    if source not in options.drafts.split(","):
        return f"off: --drafts {options.drafts}"
    if source != "mtp":
        return f"off: --mtp-num-draft-tokens {options.mtp_num_draft_tokens}"
    return "off: --no-enable-mtp" if options.enable_mtp is False else "off: the model has no head"
