"""Conversations over HTTP whose earlier turns are in the prefix cache."""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import Rows, row
from benchmarks.servers import ours, running
from benchmarks.timed import medians
from mlx_mtp.bench.answer import timed_events
from mlx_mtp.bench.client import error_text
from mlx_mtp.errors import BenchError
from mlx_mtp.models.hub import BUNDLED_MODEL

_CAPTURES = Path(__file__).parents[1] / "tests" / "data" / "clients"
_CUT = re.compile(r"^(.*) \[\.\.\. (\d+) characters\]$", re.DOTALL)
_RESULT = "sum-42"  # the captured tool call's output
_CODE = ("def", "return", "value", "file", "the", "test", "import", "error", "line", "of", "path")
_NOUNS = ("fox", "lamp", "river", "owl", "map", "stone", "boat", "night", "song", "bread", "snow")
_TOKENS_PER_NOUN = 1.46
_TOWN = "You answer questions about a small town and the people in it. " * 12
Chat = list[dict[str, str]]


class Turn(NamedTuple):
    """A streamed answer."""

    text: str
    seconds: float  # from the request to the first token
    prompt: int  # prompt tokens
    cached: int  # prompt tokens found in the prefix cache


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Turn:
    """Stream an answer from OpenAI's chat API or from Anthropic's."""
    began = time.perf_counter()
    with client.stream("POST", path, json=body) as response:
        if response.is_error:
            response.read()
            raise BenchError(error_text(response))
        reads = [(time.perf_counter(), received) for received in response.iter_bytes()]
    first, text, usage = None, "", dict[str, Any]()
    for at, data in timed_events(reads):
        if data == "[DONE]":
            break
        event = json.loads(data)
        usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
        deltas = [choice["delta"] for choice in event.get("choices", ())]
        for delta in [event["delta"]] if event.get("type") == "content_block_delta" else deltas:
            if any(value for key, value in delta.items() if key not in ("role", "type")):
                first = at if first is None else first
            text += delta.get("content") or delta.get("reasoning_content") or ""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    cached += usage.get("cache_read_input_tokens", 0)
    prompt = usage.get("prompt_tokens") or usage["input_tokens"] + cached
    return Turn(text, (first or reads[-1][0]) - began, prompt, cached)


def agent_day(turns: int = 6, result: int = 2000, prefix_cache_size: str = "1GB") -> Rows:
    """Time to first token of each turn of an agent's session, and the prompt tokens it computes.

    Requests captured from opencode and Claude Code (tests/data/clients) are sent to a server of the
    bundled model: a question with the client's system prompt and tools, then turns that each append
    the captured tool call and a result. The model's own answers are not used, so each turn must
    also compute the captured call. Texts that were shortened in the captures are padded with words
    to their original length.

    Args:
        result: characters of a tool's result
        prefix_cache_size: size of the prefix cache; "0" disables it
    """
    for name in ("opencode", "claude"):
        with (
            running(ours(name, BUNDLED_MODEL, "--prefix-cache-size", prefix_cache_size)) as url,
            httpx.Client(base_url=url, timeout=1200) as client,
        ):
            for number, (path, body) in enumerate(_bodies(name, turns, result), 1):
                turn = ask(client, path, body)
                figures = turn.prompt, turn.prompt - turn.cached, turn.seconds
                yield row("client | turn | prompt | computed | seconds", name, number, *figures)


def _bodies(client: str, turns: int, characters: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path and body of each turn; tool results have `characters` characters."""
    sent = json.loads((_CAPTURES / f"{client}.json").read_text())["requests"][-1]
    body = _filled(sent["body"]) | {"model": "m", "stream": True, "max_tokens": 2}
    called = json.dumps(body["messages"][-2:])
    messages = body["messages"][:-2]
    for number in range(turns):
        yield sent["path"], body | {"messages": messages}
        text = re.sub(r"\b(call|toolu)_\w+", rf"\1_{number}", called)
        text = text.replace(_RESULT, _words(characters, str(number)))
        messages = [*messages, *json.loads(text)]


def _filled(value: Any) -> Any:
    """Returns a captured body with its shortened texts padded to their original length."""
    if isinstance(value, dict):
        return {key: _filled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner) for inner in value]
    if isinstance(value, str) and (cut := _CUT.match(value)):
        return cut[1] + _words(int(cut[2]) - len(cut[1]), value)
    return value


def _words(characters: int, seed: str) -> str:
    drawn = random.Random(seed).choices(_CODE, k=characters // 3 + 1)
    return " ".join(drawn)[: max(characters, 0)]


def prefix(tokens: int = 2000, rounds: int = 5) -> Rows:
    """Time to the first token of a conversation's second turn, with and without the prefix cache.

    Each round is a new conversation. Its second turn is sent twice: with the first turn's
    `cache_salt`, so that the first turn is cached ("warm"), and with another one ("cold").

    Args:
        tokens: approximate prompt tokens of the first turn
    """
    flags = ["--enable-mtp", "--mtp-num-draft-tokens", "1", "--prefix-cache-size", "1GB"]
    rows = []
    with (
        running(ours("prefix", BUNDLED_MODEL, *flags)) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        for number in range(rounds + 1):
            warm, cold = _second_turns(client, tokens, number)
            seconds = cold.seconds, warm.seconds, warm.seconds / cold.seconds
            names = "prompt | cached | cold, s | warm, s | ratio"
            if number:  # The first round compiles kernels and touches new memory.
                rows.append(row(names, warm.prompt, warm.cached, *seconds))
                yield rows[-1]
    yield "Medians:"
    yield medians(rows)


def _second_turns(client: httpx.Client, tokens: int, number: int) -> tuple[Turn, Turn]:
    def answer(chat: Chat, salt: str) -> Turn:
        body: dict[str, Any] = {"model": "m", "messages": chat, "max_tokens": 8, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt}
        return ask(client, "/v1/chat/completions", body)

    words = random.Random(number).choices(_NOUNS, k=int(tokens / _TOKENS_PER_NOUN))
    half = len(words) // 2
    system = "You know these words: " + " ".join(words[:half]) + "."
    chat = [{"role": "system", "content": system}]
    chat += [{"role": "user", "content": " ".join(words[half:]) + ". Tell me a story of them."}]
    chat += [{"role": "assistant", "content": answer(chat, f"{number}").text}]
    chat += [{"role": "user", "content": "And then?"}]
    return answer(chat, f"{number}"), answer(chat, f"{number} cold")


def replicas(
    url: str, model: str = "", conversations: int = 200, turns: int = 4, at_once: int = 8
) -> Rows:
    """Share of prompt tokens found in the prefix caches of several servers behind a router.

    Answers are counted by status and failures by exception, as servers can be drained or killed
    during the run. Cached tokens are those that the answers' usage reports.

    Args:
        url: address to send requests to, such as a router's
        model: model name in requests (default: the first one listed at the address)
        turns: questions of a conversation
        at_once: number of concurrent conversations
    """
    counts, tokens = Counter[str](), Counter[str]()

    def converse(number: int) -> None:
        """Ask one question after another, each with the whole conversation so far."""
        messages = [{"role": "system", "content": _TOWN}]
        for turn in range(turns):
            text = f"Question {turn} of visitor {number}: what is house {number * 7 + turn} like?"
            messages.append({"role": "user", "content": text})
            body = {"model": name, "messages": messages, "max_tokens": 16, "temperature": 0}
            headers = {"X-Session-Id": str(number)}
            try:
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
            except httpx.HTTPError as error:
                counts[type(error).__name__] += 1
                return
            counts[str(answer.status_code)] += 1
            if answer.is_error:
                return
            content = answer.json()
            messages.append(content["choices"][0]["message"])
            tokens["prompt"] += content["usage"]["prompt_tokens"]
            tokens["cached"] += content["usage"]["prompt_tokens_details"]["cached_tokens"]

    limits = httpx.Limits(max_connections=at_once)
    with (
        httpx.Client(base_url=url, timeout=300, limits=limits) as client,
        ThreadPoolExecutor(max_workers=at_once) as pool,
    ):
        name = model or client.get("/v1/models").json()["data"][0]["id"]
        list(pool.map(converse, range(conversations)))
    for status, number in counts.items():
        yield row("status | answers", status, number)
    share = tokens["cached"] / max(tokens["prompt"], 1)
    yield row("prompt tokens | cached | share", tokens["prompt"], tokens["cached"], share)
