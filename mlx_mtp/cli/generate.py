"""`mlx-mtp generate`: streams one answer of its own engine to the terminal.

It doesn't reuse `chat`: without a server, the output is the model's text byte for byte, reasoning
included, and the process takes an eighth less memory.
"""

import argparse
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from mlx_mtp import build
from mlx_mtp.console import clean, say, speed_text
from mlx_mtp.engine.engine import Engine
from mlx_mtp.options import ANSWER_TOKENS, SAMPLING, wants_head
from mlx_mtp.server.api.openai.protocol import CompletionRequest
from mlx_mtp.server.generation.inputs import engine_requests, model_defaults, sampling_params
from mlx_mtp.server.http.errors import from_validation
from mlx_mtp.text.parsing.answer import PlainParser
from mlx_mtp.text.stop_strings import StopStrings
from mlx_mtp.text.stream import Detokenizer, OutputStream
from mlx_mtp.text.tokenizer import Tokenizer


def generate(options: argparse.Namespace) -> int:
    """Load the model and print its answer; returns the exit status.

    The backend must have been prepared.
    """
    loaded, tokenizer = build.load(options, enable_mtp=wants_head(options))
    engine = build.engine(loaded, tokenizer, options)
    return stream_answer(engine, tokenizer, loaded.generation_config, options)


def stream_answer(
    engine: Engine,
    tokenizer: Tokenizer,
    generation_config: Mapping[str, Any],
    options: argparse.Namespace,
) -> int:
    """Start the engine and print an answer as it arrives, and its speed on standard error.

    Returns the exit status.
    """
    room = engine.info.max_model_len
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    sampling = {name: getattr(options, name) for name in SAMPLING}
    try:
        body = CompletionRequest.model_validate({"model": "-", "prompt": "-", **sampling})
    except ValidationError as error:
        raise from_validation(error) from None
    fields, defaults = body.options(), model_defaults(generation_config)
    params = sampling_params(fields, defaults, random.Random(), engine.info)
    prompt = tokenizer.encode_chat(messages, limit=room)
    (request,) = engine_requests("generate", [prompt], params, fields, room)
    if options.max_tokens is None:
        limit = min(request.sampling.max_tokens, ANSWER_TOKENS)
        request = replace(request, sampling=replace(request.sampling, max_tokens=limit))
    stream = OutputStream(
        0, Detokenizer(tokenizer.text_bytes), PlainParser(), StopStrings(body.stop)
    )
    # A file or another program gets the model's text unchanged.
    shown = clean if sys.stdout.isatty() else str
    engine.start(lambda _: None)  # The engine's start is not a part of the prompt's time.
    began, times = time.perf_counter(), list[tuple[float, int]]()
    try:
        for at, output in build.run_requests(engine, [request]):
            for event in stream.push(output).events:
                sys.stdout.write(shown(event.text))  # type: ignore[union-attr]
                sys.stdout.flush()
            times.append((at, stream.num_tokens))
            if stream.finish_reason is not None:
                break
    finally:
        engine.stop()
    say("")
    (first, first_tokens), (last, tokens) = times[0], times[-1]
    # The first step's tokens belong to the prompt's time.
    rate = (tokens - first_tokens) / (last - first) if last > first else 0.0
    counts = stream.drafts.total(), stream.accepted.total()
    say(speed_text(tokens, rate, len(prompt), first - began, *counts), file=sys.stderr)
    return 0
