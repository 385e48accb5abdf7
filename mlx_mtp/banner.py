"""What `serve` prints when it is ready."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_mtp.config import ServerConfig

if TYPE_CHECKING:
    from mlx_mtp.backend import BackendInfo
    from mlx_mtp.engine.stats import EngineInfo
    from mlx_mtp.models.loaded import LoadedModel


def banner(
    config: ServerConfig,
    loaded: LoadedModel,
    engine: EngineInfo,
    info: BackendInfo,
    memory: Sequence[str],
) -> str:
    """Address, model, backend, memory plan (its lines) and a curl command to try."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{config.port}"
    depth = engine.num_draft_tokens
    drafts = f"{depth} (follows measured cost and acceptance)"
    if depth != "auto":
        drafts = f"{depth} tokens per step"
    drafts += f", head from {loaded.head_source}"
    message = {"role": "user", "content": "Tell me a story."}
    body = json.dumps({"model": config.model_name, "messages": [message]})
    curl = [f"curl {address}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if config.api_keys:
        # Only the variable's name: this text ends up in logs and on shared screens.
        curl.append('-H "Authorization: Bearer $MLX_MTP_API_KEY"')
    curl.append(f"-d {shlex.quote(body)}")
    return (
        f"\n  address  {address}\n"
        f"  model    {config.model_name} ({loaded.model_type}, {loaded.path})\n"
        f"  backend  {info}\n"
        f"  prefixes {_prefixes(engine)}\n"
        f"  drafts   {drafts if engine.mtp_enabled else 'none (--enable-mtp turns MTP on)'}\n"
        f"  memory   {f'{chr(10)}           '.join(memory)}\n\n" + " \\\n  ".join(curl) + "\n"
    )


def _prefixes(engine: EngineInfo) -> str:
    if not engine.prefix_cache_size:
        return "not kept (--prefix-cache-size is 0)"
    text = f"up to {engine.prefix_cache_size / 1e9:.2f} GB of earlier prompts and answers are kept"
    if engine.kv_cache_quantization is not None:
        text += (
            f", in {engine.kv_cache_quantization} bits: answers that reuse them may differ slightly"
        )
    if engine.prefix_cache_dir is not None:
        text += f"; up to {engine.prefix_cache_dir_size / 1e9:.2f} GB in {engine.prefix_cache_dir}"
    return text
