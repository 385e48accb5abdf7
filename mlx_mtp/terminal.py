"""`mlx-mtp generate`: one answer, streamed to the terminal."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from mlx_mtp.engine.engine import Engine, read_outputs, start_queued
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.stats import EngineInfo
from mlx_mtp.options import ANSWER_TOKENS
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.http_errors import from_validation
from mlx_mtp.server.openai.wire import CompletionRequest
from mlx_mtp.server.output_stream import OutputStream
from mlx_mtp.server.params import engine_requests, model_defaults, sampling_params
from mlx_mtp.server.parsing.answer import PlainParser
from mlx_mtp.server.parsing.events import Text
from mlx_mtp.server.tokenizer import Tokenizer

_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "stop"),
)


def stream_answer(
    engine: Engine,
    tokenizer: Tokenizer,
    generation_config: Mapping[str, Any],
    options: argparse.Namespace,
) -> int:
    """Print an answer as it comes, and its speed on standard error; returns the exit status.

    The engine is not yet started.
    """
    request, stops = _request(engine, tokenizer, generation_config, options)
    stream = OutputStream(0, Detokenizer(tokenizer.text_bytes, stops), PlainParser())
    arrived = start_queued(engine)
    try:
        began = time.perf_counter()
        engine.submit(request)
        times: list[tuple[float, int]] = []
        for at, output in read_outputs(engine, arrived, 1):
            for event in stream.push(output).events:
                assert isinstance(event, Text), "plain text has no other events"
                print(event.text, end="", flush=True)
            times.append((at, stream.num_tokens))
            if stream.finish_reason is not None:
                break
    finally:
        engine.stop()
    print(flush=True)
    prompt_tokens = len(request.prompt_token_ids)
    print(summary(stream, prompt_tokens, began, times, engine.info), file=sys.stderr)
    return 0


def summary(
    stream: OutputStream,
    prompt_tokens: int,
    began: float,
    times: list[tuple[float, int]],
    info: EngineInfo,
) -> str:
    """Speed and acceptance in one line.

    `times` say when each output came, and how many tokens there were by then.
    """
    (first, first_tokens), (last, tokens) = times[0], times[-1]
    # The first step's tokens belong to the prompt's time.
    rate = (tokens - first_tokens) / (last - first) if last > first else 0.0
    drafts = "no drafts"
    if stream.num_drafts:
        share = stream.num_accepted / stream.num_drafts
        drafts = f"{stream.num_accepted} of {stream.num_drafts} drafts accepted ({share:.0%})"
    depth = f", depth {info.num_draft_tokens}" if info.mtp_enabled else ""
    return (
        f"[{tokens} tokens, {rate:.1f} tokens/s; prompt of "
        f"{prompt_tokens} tokens in {first - began:.2f} s; {drafts}{depth}]"
    )


def _request(
    engine: Engine,
    tokenizer: Tokenizer,
    generation_config: Mapping[str, Any],
    options: argparse.Namespace,
) -> tuple[Request, list[str]]:
    roles = (("system", options.system), ("user", options.prompt))
    messages = [{"role": role, "content": text} for role, text in roles if text is not None]
    sampling = {name: getattr(options, name) for name in _SAMPLING}
    try:
        # The prompt is not used: the chat below is what the model gets.
        body = CompletionRequest.model_validate({"model": "-", "prompt": "-", **sampling})
    except ValidationError as error:
        raise from_validation(error) from None
    defaults = model_defaults(generation_config)
    wanted = body.options()
    params = sampling_params(wanted, defaults, random.Random(), engine.info.vocab_size)
    prompt = tokenizer.encode_chat(messages, limit=engine.info.max_model_len)
    (request,) = engine_requests("generate", [prompt], params, wanted, engine.info.max_model_len)
    if options.max_tokens is None:
        limit = min(request.sampling.max_tokens, ANSWER_TOKENS)
        request = replace(request, sampling=replace(request.sampling, max_tokens=limit))
    return request, body.stop
