"""An engine without a model: a thread that plays scripts, one output per request and step."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlx_mtp.engine.request import Request, RequestOutput, TokenLogprobs
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.errors import EngineStoppedError
from mlx_mtp.vision.images import ImageSizes

EOS = 4089

Output = RequestOutput | None
"""A script's item: a step's output, whose request id is filled in, or None for no output."""
Script = Callable[[Request], Iterator[Output]]


@dataclass(frozen=True)
class FakeInfo:
    vocab_size: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)
    max_model_len: int = 1024
    model_type: str = "qwen3_next"
    num_draft_tokens: int | str = 2
    mtp_enabled: bool = True
    max_num_seqs: int = 32
    prefix_cache_size: int = 8 * 10**9
    memory: Mapping[str, int] = field(default_factory=lambda: {"weights": 10**9})
    draft_sources: tuple[str, ...] = ("mtp",)
    images: ImageSizes | None = None
    embedding_size: int = 0


def out(*token_ids: int, finish: str | None = None, **more: object) -> RequestOutput:
    """Returns one step's output."""
    return RequestOutput("", token_ids=token_ids, finish_reason=finish, **more)


def answer(tokens: Sequence[int], sizes: Iterable[int] = (1, 2, 3)) -> Script:
    """Returns a script of `tokens`, `sizes` per step in turn, up to the end or max_tokens."""

    def script(request: Request) -> Iterator[Output]:
        ids, rounds = [*tokens, EOS], list(sizes)
        limit, given, step = request.sampling.max_tokens, 0, 0
        while True:
            window = ids[given : given + rounds[step % len(rounds)]][: limit - given]
            given, step = given + len(window), step + 1
            ended = "stop" if given == len(ids) else "length" if given == limit else None
            yield out(
                *window,
                finish=ended,
                logprobs=tuple(fake_logprobs(t, request) for t in window)
                if request.sampling.top_logprobs is not None
                else (),
                num_draft_tokens=2,
                draft_source="mtp",
                num_accepted_tokens=max(len(window) - 1, 0),
                prompt_logprobs=fake_prompt_logprobs(request) if step == 1 else (),
            )
            if ended:
                return

    return script


def fake_logprobs(token: int, request: Request) -> TokenLogprobs:
    """Returns recognizable logprobs: of the token, and as top ids of it and the ids after it."""
    top = tuple((token + i, -0.25 * (i + 1)) for i in range(request.sampling.top_logprobs or 0))
    return TokenLogprobs(logprob=-0.25, top=top)


def fake_prompt_logprobs(request: Request) -> tuple[TokenLogprobs, ...]:
    """Returns logprobs in which each prompt token has rank 2 and twice the first one's logprob."""
    top = request.sampling.prompt_logprobs
    if top is None:
        return ()
    return tuple(
        TokenLogprobs(-0.5, ((token - 1, -0.25), (token, -0.5), (token - 2, -1.0))[:top], rank=2)
        for token in request.prompt_token_ids[1:]
    )


def endless(token: int) -> Script:
    """Returns a script that repeats a token forever."""

    def script(request: Request) -> Iterator[Output]:
        while True:
            yield out(token)

    return script


class FakeEngine:
    """Plays `script` for each request. Its waits are bounded, so that a test that hangs fails."""

    measuring = False

    def expect_request(self) -> None:
        pass

    def __init__(self, script: Script, info: FakeInfo | None = None) -> None:
        self.script = script
        self.info = info or FakeInfo()
        self.submitted: list[Request] = []
        self.cancelled: set[str] = set()
        self.reported = EngineStats()
        self.refusal: Exception | None = None
        self.unhealthy_reason: str | None = None
        self.hang_reason: str | None = None
        self._running: dict[str, Iterator[Output]] = {}
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def start(self, deliver: Callable[[Sequence[RequestOutput]], None]) -> None:
        self._deliver = deliver
        if self._thread.ident is None:
            self._thread.start()

    def submit(self, request: Request) -> None:
        request.sampling.validate(self.info.vocab_size)
        with self._changed:
            if self.refusal is not None:
                raise self.refusal
            assert request.request_id not in self._running
            self.submitted.append(request)
            self._running[request.request_id] = self.script(request)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self.cancelled.add(request_id)
            self._running.pop(request_id, None)
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        return self.reported

    def stop(self, timeout: float | None = None) -> bool:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until `condition` holds, checked after each change; False after 30 seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout=30)

    @property
    def running(self) -> set[str]:
        return set(self._running)

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._stopping)
                if self._stopping:
                    ended = out(finish="error", error=EngineStoppedError("stopped"))
                    self._deliver([replace(ended, request_id=name) for name in self._running])
                    return
                outputs = self._step()
                # A pause between steps, so that an endless script doesn't flood the event loop.
                self._changed.wait(0.001)
            if outputs:
                self._deliver(outputs)

    def _step(self) -> list[RequestOutput]:
        outputs = []
        for name, script in list(self._running.items()):
            output = next(script)
            if output is not None:
                outputs.append(replace(output, request_id=name))
                if output.finish_reason is not None:
                    del self._running[name]
        self._changed.notify_all()
        return outputs
