"""Agent sessions over HTTP, with and without the thinking of earlier turns in the prompt."""

import tempfile
from typing import Any

import httpx

from benchmarks import Rows, row
from benchmarks.servers import ours, running
from mlx_mtp.bench.client import error_text
from mlx_mtp.errors import BenchError
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.text.tokenizer import Tokenizer

_QUESTIONS = ("What is the weather in Paris?", "Tell me about Anna the fox.", "Who found the boat?")
_KEPT = "loop.index0 > last.user"  # where the bundled template keeps thinking
_THINKS = "enable_thinking is defined and enable_thinking"
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


def preserved_thinking(turns: int = 12, steps: int = 3, thinking: int = 40) -> Rows:
    """Share of prompt tokens from the prefix cache in an agent's session, by `preserve_thinking`.

    In each turn the bundled model thinks, calls a tool and gets a result, several times, and then
    answers. Its template drops the thinking of earlier turns, as Qwen3.5's does; the benchmark adds
    the `preserve_thinking` variable of Qwen3.6's template. Tokens are counted; nothing is timed.

    Args:
        turns: number of user questions
        steps: tool calls in each turn
        thinking: tokens of thinking before each call and answer
    """
    template = Tokenizer.load(BUNDLED_MODEL).template
    kept = f"(preserve_thinking is defined and preserve_thinking or {_KEPT})"
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(template.replace(_KEPT, kept).replace(_THINKS, "true"))
        file.flush()
        for preserve in ("false", "true"):
            flags = "--chat-template", file.name, "--prefix-cache-size", "1GB"
            kwargs = f'{{"preserve_thinking": {preserve}, "thinking_budget": {thinking}}}'
            server = ours("m", BUNDLED_MODEL, *flags, "--chat-template-kwargs", kwargs)
            with running(server) as url, httpx.Client(base_url=url, timeout=1200) as client:
                (prompt, cached), (first, first_cached) = _session(client, turns, steps)
            names = "preserve_thinking | requests | prompt tokens | cached | share"
            names += " | share of each turn's first"
            count = turns * (steps + 1)
            yield row(names, preserve, count, prompt, cached, cached / prompt, first_cached / first)


def _session(client: httpx.Client, turns: int, steps: int) -> tuple[list[int], list[int]]:
    """Returns [prompt tokens, cached tokens]: of all requests, and of each later turn's first."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful agent. " * 9}
    ]
    every, firsts = [0, 0], [0, 0]
    for turn in range(turns):
        messages.append({"role": "user", "content": _QUESTIONS[turn % len(_QUESTIONS)]})
        for step in range(steps + 1):
            choice = "none" if step == steps else "required"
            body = {"model": "m", "messages": messages, "tools": [_TOOL], "tool_choice": choice}
            answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 160})
            if answer.is_error:
                raise BenchError(error_text(answer))
            usage, message = answer.json()["usage"], answer.json()["choices"][0]["message"]
            found = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
            for counts in (every, *([firsts] if turn and not step else [])):
                counts[:] = [count + more for count, more in zip(counts, found)]
            messages.append({**message, "content": message["content"] or ""})
            for call in message.get("tool_calls", []):
                result = f"Sunny, and {10 + turn} degrees. " * 4
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return every, firsts
