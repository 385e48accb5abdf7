"""A client of an OpenAI-compatible server that records when its answers arrive."""

import asyncio
import os
import ssl
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Self

import httpx

from mlx_mtp.bench.answer import TimedAnswer, TimedRead, parse_answer
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.errors import UNEXPECTED, BenchError, UsageError

# Python's own HTTP servers let five connections wait, and refuse more.
_RETRIES = 40
_RETRY_SECONDS = 0.05
_CONNECT_SECONDS = 30.0
_STREAM_OPTIONS: tuple[dict[str, bool] | None, ...] = (
    # With a count in each chunk, as in vLLM, SGLang and this project; strict servers refuse it.
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)


class _RefusedError(BenchError):
    """The server refused the form of a request (400 or 422); it may accept another form."""


class HttpServer:
    """A server to measure; a context manager. `model` defaults to the first the server lists."""

    def __init__(
        self,
        url: str,
        asking: Asking,
        *,
        api_key: str | None = None,
        model: str | None = None,
        name: str | None = None,
    ) -> None:
        self.url, self.model, self._asking = base_url(url), model, asking
        self.name = name or self.url
        self._stream_options, self._connected = _STREAM_OPTIONS[0], False
        self._runner = asyncio.Runner()
        # Compression would delay chunks.
        headers = {b"Accept-Encoding": b"identity"}
        if api_key:
            headers[b"Authorization"] = f"Bearer {api_key}".encode()
        self._client = httpx.AsyncClient(
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(asking.timeout, connect=min(asking.timeout, _CONNECT_SECONDS)),
        )

    def __enter__(self) -> Self:
        try:
            self._runner.run(self._connect())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def ask(self, prompts: Sequence[Prompt]) -> list[TimedAnswer]:
        async def ask_all() -> list[TimedAnswer]:
            # The first failure raises here; requests still running are cancelled on exit.
            return await asyncio.gather(*(self._ask(p, self._asking.max_tokens) for p in prompts))

        return self._runner.run(ask_all())

    async def _connect(self) -> None:
        """Find the model, and a form of request that the server accepts."""
        if self.model is None:
            self.model = await self._first_model()
        for self._stream_options in _STREAM_OPTIONS:
            try:
                await self._ask(Prompt("Say hello.", seed=0), max_tokens=8)
                break
            except _RefusedError:
                if self._stream_options is None:
                    raise
        self._connected = True

    async def _first_model(self) -> str:
        where = f"{self.url}/models"
        try:
            response = await self._client.get(where)
            self._check_status(response, where)
            return str(response.json()["data"][0]["id"])
        except (httpx.TransportError, ssl.SSLError) as error:
            raise self._unreachable(error) from None
        except UNEXPECTED:
            raise BenchError(f"{where} lists no model; name one with --model.") from None

    async def _ask(self, prompt: Prompt, max_tokens: int) -> TimedAnswer:
        asking = self._asking
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": max_tokens,
            "temperature": asking.temperature,
            "stream": True,
            "stream_options": self._stream_options,
            "seed": prompt.seed if asking.temperature > 0 else None,
            "ignore_eos": asking.ignore_eos or None,
        }
        body = {name: value for name, value in body.items() if value is not None}
        sent = perf_counter()
        for retries in range(_RETRIES + 1):
            reads: list[TimedRead] = []
            try:
                await self._stream(body, reads)
                break
            except httpx.ReadTimeout:
                fault = f"{self.name} was silent for {asking.timeout:g} seconds (--timeout)."
                raise BenchError(fault) from None
            except (httpx.TransportError, ssl.SSLError) as error:
                if reads:
                    fault = f"{self.name} ended an answer in the middle: {_reason(error)}"
                    raise BenchError(fault) from None
                if not self._connected or retries == _RETRIES:
                    raise self._unreachable(error) from None
                await asyncio.sleep(_RETRY_SECONDS)
        try:
            return parse_answer(sent, reads, retries)
        except BenchError as error:
            raise BenchError(f"{self.name}: {error}") from None

    async def _stream(self, body: dict[str, Any], reads: list[TimedRead]) -> None:
        where = f"{self.url}/chat/completions"
        async with self._client.stream("POST", where, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                self._check_status(response, where)
            kind = response.headers.get("content-type", "nothing").partition(";")[0]
            if kind != "text/event-stream":
                raise BenchError(
                    f"{where} answered {kind} instead of text/event-stream: it does not stream."
                )
            async for received in response.aiter_bytes():
                reads.append((perf_counter(), received))

    def _check_status(self, response: httpx.Response, where: str) -> None:
        status = response.status_code
        if status == httpx.codes.OK:
            return
        text = f"{where} answered {status}: {error_text(response)}"
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise BenchError(f"{text} Give the server's key with --api-key.")
        if status == httpx.codes.NOT_FOUND and where.endswith("/models"):
            raise BenchError(f"{where} does not exist; name the model with --model.")
        refused = status in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)
        raise (_RefusedError if refused else BenchError)(text)

    def _unreachable(self, error: Exception) -> BenchError:
        if self._connected:
            return BenchError(f"{self.name} no longer answers: {_reason(error)}")
        return BenchError(f"{self.url} can't be reached: {_reason(error)} Is the server running?")


def base_url(url: str) -> str:
    """Returns the address for routes to append to: `http://host:1` becomes `http://host:1/v1`."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(
            f"{url!r} is not a server's address; it should look like http://127.0.0.1:8000."
        )
    path = parsed.path.rstrip("/") or "/v1"
    return str(parsed.copy_with(path=path, query=None, fragment=None))


def error_text(response: httpx.Response) -> str:
    """Returns a response's error message, on one line of at most about 300 characters."""
    try:
        error = response.json()["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except UNEXPECTED:
        text = response.text
    line = " ".join(text.split())[:300] or "nothing more."
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _reason(error: BaseException | None) -> str:
    """Returns the operating system's message, which httpx's message omits, or else httpx's."""
    text = " ".join(str(error).split()) or type(error).__name__
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            # asyncio rewords the message, and resolvers have error numbers of their own.
            code = error.errno or 0
            text = os.strerror(code) if code > 0 else error.strerror
        error = error.__cause__ or error.__context__
    return text if text.endswith(".") else f"{text}."
