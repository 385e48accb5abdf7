"""Frozen settings, put together by `cli.py` and read by everything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MAX_DRAFT_TOKENS = 8
REASONING_PARSERS = ("auto", "qwen3", "gpt_oss", "none")
DTYPE_NAMES = ("float32", "bfloat16", "float16")
TOOL_CALL_PARSERS = ("auto", "hermes", "qwen3_coder", "none")

DraftTokens = int | Literal["auto"]
"""Drafts per step: a fixed number, or "auto" to follow what they cost and bring."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine batches and speculates.

    Args:
        num_draft_tokens: drafts per step (the depth k), 0 to 8; 0 is plain decoding. "auto": the
            depth that brings most tokens per second.
        max_num_seqs: rows that may be in the engine at once, prefilling ones included.
        max_model_len: most tokens of prompt and answer together; None: what the model allows.
        prefill_step_size: most tokens, padding included, that one prefill chunk computes.
        overlap: launch step i+1 before the tokens of step i are read.
        calibration_seconds: how long "auto" may measure steps before the first request is served;
            0 doesn't, and leaves it to be learned in use, or to what an earlier run measured.
        prefix_cache_size: bytes that the prefixes of earlier prompts and answers may take; 0 keeps
            none.
        kv_cache_quantization: bits that their KV is stored with, 8 or 4; None: as it is. What runs
            is never quantized.
        draft_source: where drafts come from: a name in `speculative/draft_sources.py`.
    """

    num_draft_tokens: DraftTokens = "auto"
    max_num_seqs: int = 32
    max_model_len: int | None = None
    prefill_step_size: int = 512
    overlap: bool = True
    calibration_seconds: float = 0.0
    prefix_cache_size: int = 0
    kv_cache_quantization: int | None = None
    draft_source: str = "mtp"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the HTTP server answers.

    Args:
        model_name: the id that clients see and may ask for.
        host: the address that is listened on; its name is one that clients may call the server by.
        api_keys: when there are some, every route but /health and / wants one of them.
        allowed_hosts: more names that clients may call the server by; "*": any name.
        cors_origins: web pages that may call the server beside its own; "*": all of them.
        seed: seeds the generator of seeds for requests that bring none.
        keep_alive_seconds: a stream silent for longer gets an SSE comment.
        max_choices: largest `n` of one request.
        max_body_bytes: longer bodies are refused. A million tokens are some 4 MB of text; parsing
            holds up the other streams for a time that grows with it.
        max_stored_completions: chat completions with `store: true` that are kept, in memory, until
            newer ones take their place; 0 refuses `store: true`.
        template_seconds: most time that the chat template may take for one request.
        reasoning_parser: how the model writes its reasoning; "auto": as its template shows.
        tool_call_parser: how the model writes tool calls; "auto": as its template shows.
        max_queue: sequences, of all requests together, that may wait for a row; more are refused.
        request_timeout: seconds that a request may wait and run; 0: any.
        drain_timeout: seconds that running requests get to finish when the server is stopped.
        body_timeout: seconds that a request's body may take to come.
        head_timeout: seconds from a connection's begin, or from the answer before, to the end of a
            request's head.
        stall_timeout: seconds in which a client must take what waits for it; 64 KiB do at most.
        max_connections: clients that may be connected at once.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    seed: int | None = None
    keep_alive_seconds: float = 10.0
    max_choices: int = 16
    max_body_bytes: int = 8 << 20
    max_stored_completions: int = 100
    template_seconds: float = 10.0
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    max_queue: int = 256
    request_timeout: float = 0.0
    drain_timeout: float = 30.0
    body_timeout: float = 60.0
    head_timeout: float = 20.0
    stall_timeout: float = 60.0
    max_connections: int = 512
