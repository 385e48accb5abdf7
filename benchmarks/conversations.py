"""Conversations over HTTP, of which the prefix cache has what was said before."""

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
_RESULT = "sum-42"  # what the captured call printed
_CODE = ("def", "return", "value", "file", "the", "test", "import", "error", "line", "of", "path")
_NOUNS = ("fox", "lamp", "river", "owl", "map", "stone", "boat", "night", "song", "bread", "snow")
_TOKENS_PER_NOUN = 1.46
_TOWN = "You answer questions about a small town and the people in it. " * 12
Chat = list[dict[str, str]]


class Turn(NamedTuple):
    """An answer."""

    text: str
    seconds: float  # from the request to the first token
    prompt: int  # tokens
    cached: int  # tokens of the prompt


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Turn:
    """Stream an answer of OpenAI's chat API or of Anthropic's."""
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
    """Seconds to the first token of an agent's turns, and the tokens that each computes.

    What opencode and Claude Code sent (tests/data/clients) is sent to a server of the bundled
    model: a question with the client's system prompt and tools, then turns that each append the
    captured tool call and a result. The model's own answers are not used, so each turn also
    computes a call that no answer had. Texts that the captures shortened are filled up with words
    to their length.

    Args:
        result: characters of a tool's result
        prefix_cache_size: "0" computes everything
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
    """Path and body of each turn: the question, then results of so many characters."""
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
    """A captured body with all its texts as long as they were."""
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

    Each round has a conversation of its own: its first turn, then the second one, which finds the
    first ("warm"); and the second one again with another `cache_salt`, which finds nothing.

    Args:
        tokens: about so many in the first turn
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
            if number:  # The first compiles, and touches memory.
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
    """Conversations through a router to several servers: the share of their prompts in the cache.

    Answers are counted by status, and failures by the error: servers may be drained or killed
    meanwhile. What is cached is what the answers' usage says.

    Args:
        url: the address that is asked, such as a router's
        model: name in requests (default: the first that is listed there)
        turns: questions of a conversation
        at_once: conversations at once
    """
    counts, tokens = Counter[str](), Counter[str]()

    def converse(number: int) -> None:
        """Ask one question after another; each has all that was said before."""
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
