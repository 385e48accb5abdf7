"""The models and their processes: requests wait here for a model, and `policy` decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_mtp.bounded_json import shortened
from mlx_mtp.config import RouterConfig
from mlx_mtp.console import size_text
from mlx_mtp.errors import (
    UNEXPECTED,
    UNKNOWN_RETRY_SECONDS,
    EngineStoppedError,
    ModelNotFoundError,
    RequestTimeoutError,
    UnavailableError,
    UsageError,
)
from mlx_mtp.router.child import Child
from mlx_mtp.router.policy import (
    DEATHS,
    DEATHS_SECONDS,
    ModelState,
    Resident,
    decide,
    most_room,
)
from mlx_mtp.unix_http import BROKEN, ask

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 30.0
"""A process that does not answer for so long is killed."""
_LEAST_FAILURES = 3  # to answer, after which it is: this process may have been suspended
_POLL_SECONDS = 0.1
_SHOWN_LINES = 3  # of a log, in errors
_STOP_SECONDS = 15.0  # for a process to end, after which it is killed
_PATH_BYTES = 100  # that a Unix socket's path may have on a Mac

Plans = AsyncIterator[dict[str, Any]]
"""The lines of `mlx_mtp.inspect.needs`."""


@dataclass(eq=False)
class ServedModel(Resident):
    """A model with its names, what is known of it, and its process if there is one."""

    names: tuple[str, ...] = ()  # that requests may give; the first is `name`
    source: str | None = None  # a directory or a hub id; None: the bundled model
    plan: dict[str, Any] = field(default_factory=dict)  # its line of `mlx_mtp.inspect.needs`
    card: dict[str, Any] = field(default_factory=dict)  # its own, in /v1/models
    shown: bytes = b""  # its own answer to /api/show
    child: Child | None = None
    loaded_at: float = 0.0  # since 1970
    last_lines: list[str] = field(default_factory=list)  # of the log of the last process
    is_found: bool = False  # on the disk, not named by the user

    @property
    def refusal(self) -> str | None:
        """Why it can't be served; None: it can, or that is not known yet."""
        return self.plan.get("refusal")

    @property
    def is_ready(self) -> bool:
        return self.state is ModelState.READY

    @property
    def shown_state(self) -> str:
        """The state that clients see."""
        return "busy" if self.is_ready and self.busy else self.state.value


class Fleet:
    """All models. Used on one event loop, between `start` and `stop`."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: RouterConfig,
        *,
        command: Callable[[ServedModel], Sequence[str]],  # of a model's process; its share is set
        plans: Callable[[Sequence[ServedModel]], Plans],
        num_keys: int,
        max_queue: int,
        any_name: bool = False,
    ) -> None:
        self.models, self.config = list(models), config
        self.limit: int | None = None  # bytes for all models; None: not known yet
        self.counts: Counter[tuple[str, str]] = Counter()  # of events, by their name and the model
        self._command, self._plans = command, plans
        self._num_keys, self._max_queue, self._any_name = num_keys, max_queue, any_name
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_started = self._num_ends = 0

    def start(self) -> None:
        """Plan the memory of all models, and start those that are pinned."""
        self._clock = asyncio.get_running_loop().time
        self._folder = _private_folder()
        self._run(self._plan())

    async def stop(self) -> None:
        """End all processes; those that don't end are killed."""
        self.end_waiting()
        if self._timer is not None:
            self._timer.cancel()
        children = [model.child for model in self.models if model.child is not None]
        for child in children:
            child.terminate()
        ends = [asyncio.ensure_future(child.wait()) for child in children]
        if ends:
            await asyncio.wait(ends, timeout=_STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        for child, end in zip(children, ends):
            if not end.done():
                child.kill()
        await asyncio.gather(*ends, *self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def end_waiting(self) -> None:
        """End the requests that wait for a model, with an error."""
        for model in self.models:
            _fail(model, EngineStoppedError("The server is shutting down."))

    def end_all(self) -> None:
        """End all requests: those that wait, and by a second signal those that are answered."""
        self.end_waiting()
        self._num_ends += 1
        if self._num_ends <= 2:
            for model in self.models:
                if model.child is not None:
                    model.child.terminate()

    def find(self, name: str) -> ServedModel:
        """Return the model of this name, the first one for ""; raises ModelNotFoundError."""
        if not name and self.models:
            return self.models[0]
        for model in self.models:
            # Ollama's clients add the tag to names without one.
            if name in model.names or name.removesuffix(":latest") in model.names:
                return model
        if self._any_name and self.models:
            return self.models[0]
        served = f"this server has {', '.join(repr(each.name) for each in self.models) or 'none'}"
        message = f"The model {name[:120]!r} is not served here; {served}."
        raise ModelNotFoundError(message, param="model")

    @property
    def running(self) -> list[ServedModel]:
        """The models whose processes answer."""
        return [model for model in self.models if model.is_ready]

    def seconds_left(self, model: ServedModel) -> float:
        """How long a model stays if nobody asks for it, unless another one needs its room."""
        if model.pinned or not model.is_ready:
            return math.inf
        began = self._clock() if model.busy else model.idle_since
        return max(0.0, began + model.keep_alive - self._clock())

    def keep(self, model: ServedModel, seconds: float | None) -> None:
        """Set how long the model stays when it is idle; None: as the flag says."""
        model.keep_alive = self.config.keep_alive if seconds is None else seconds
        self._decide()

    @contextlib.asynccontextmanager
    async def using(self, model: ServedModel, seconds: float | None) -> AsyncIterator[Child]:
        """Wait until the model takes a request, at most so long; it is busy during the block.

        Raises UnavailableError, RequestTimeoutError or EngineStoppedError.
        """
        model.asked = self._clock()
        if model.is_ready and not model.draining and model.child is not None:
            model.busy += 1
            child = model.child
        else:
            child = await self._admission(model, seconds)
        try:
            yield child
        finally:
            self._release(model)

    async def _admission(self, model: ServedModel, seconds: float | None) -> Child:
        """Wait for the model's process; the request counts as busy then."""
        self._check_waiting(model)
        begins: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        model.waiting[begins] = model.asked
        self._decide()
        try:
            async with asyncio.timeout(seconds):
                return await begins
        except BaseException as error:
            model.waiting.pop(begins, None)
            if begins.done() and not begins.cancelled() and begins.exception() is None:
                self._release(model)  # The client left at the moment at which it was admitted.
            else:
                self._decide()
            if isinstance(error, TimeoutError):
                raise RequestTimeoutError(
                    f"The model {model.name!r} could not take the request within {seconds:g} "
                    "seconds: it was loading, or other models were busy."
                ) from None
            raise

    def _release(self, model: ServedModel) -> None:
        model.busy -= 1
        model.idle_since = self._clock()
        self._decide()

    def _check_waiting(self, model: ServedModel) -> None:
        """Raise UnavailableError if it would be of no use to wait for the model."""
        now, numbers = self._clock(), ""
        if model.refusal is not None:
            raise UnavailableError(f"The model {model.name!r} can't be served: {model.refusal}")
        if now < model.refused_until:
            left = math.ceil(model.refused_until - now)
            raise UnavailableError(
                f"The process of the model {model.name!r} has ended {DEATHS} times within "
                f"{DEATHS_SECONDS:g} seconds, so the model is refused for {left} seconds. "
                f"{_last_words(model)}",
                retry_after=left,
            )
        if self.limit is not None and model.need is not None:
            room = most_room(model, self.models, self.limit)
            if model.need > room:
                raise UnavailableError(
                    f"The model {model.name!r} needs {size_text(model.need)}, and beside the "
                    f"pinned models there are {size_text(max(room, 0))} of "
                    f"{size_text(self.limit)} at most."
                )
            used = sum(each.share for each in self.models)
            numbers = f" {size_text(used)} of {size_text(self.limit)} are in use."
        if (waiting := sum(len(each.waiting) for each in self.models)) >= self._max_queue:
            raise UnavailableError(
                f"{waiting} requests wait for models to be loaded, and no more than "
                f"{self._max_queue} may (--max-queue).{numbers} Try again later.",
                retry_after=UNKNOWN_RETRY_SECONDS,
            )

    def _decide(self) -> None:
        """Do what follows from a change."""
        if self.limit is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        decision = decide(self.models, self.limit, now, self.config.switch_after)
        for model in self.models:
            if model in decision.stops:
                self._end(model)
            elif model in decision.starts:
                self._run(self._life(model))
            elif model.is_ready and not model.draining and model.child is not None:
                for begins in [*model.waiting]:
                    del model.waiting[begins]
                    if not begins.done():
                        model.busy += 1
                        begins.set_result(model.child)
        if decision.again < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(decision.again, now + 0.01), self._decide)

    def _end(self, model: ServedModel) -> None:
        """Let a process end that has nothing to do."""
        seconds, share = self._clock() - model.idle_since, size_text(model.share)
        logger.info("%s: ended after %.0f s without requests; has %s", model.name, seconds, share)
        self.counts["unloads", model.name] += 1
        if (child := model.child) is not None:
            child.terminate()
            asyncio.get_running_loop().call_later(_STOP_SECONDS, child.kill)

    async def _life(self, model: ServedModel) -> None:
        """Run the model's process from its start to its end."""
        self._num_started += 1
        self.counts["loads", model.name] += 1
        began = self._clock()
        logger.info("%s: loading, with %s of memory", model.name, size_text(model.share))
        child = model.child = Child(model.name, self._folder / str(self._num_started))
        what = "could not be started"
        try:
            await child.start(self._command(model), self._num_keys)
            watch = asyncio.create_task(self._watch(model, child, began))
            try:
                status = await child.wait()
            finally:
                watch.cancel()
            what = f"has ended with status {status}"
        except OSError as error:
            child.last_lines.append(str(error))
        was_stopped, was_loading = _is(model, ModelState.STOPPING), _is(model, ModelState.LOADING)
        model.state, model.child = ModelState.ON_DISK, None
        freed, model.share = model.share, 0
        model.last_lines = [*child.last_lines]
        if was_stopped:
            logger.info("%s: its process is gone, %s are free", model.name, size_text(freed))
        else:
            self.counts["deaths", model.name] += 1
            model.count_death(self._clock())
            logger.error("%s: its process %s.", model.name, what)
            if was_loading:
                message = f"The model {model.name!r} could not be loaded: its process {what}. "
                _fail(model, UnavailableError(message + _last_words(model)))
        self._decide()

    async def _watch(self, model: ServedModel, child: Child, began: float) -> None:
        """Wait until the process is ready, and kill it if it no longer answers."""
        try:
            async with asyncio.timeout(self.config.model_timeout):
                while not await child.is_healthy():
                    await asyncio.sleep(_POLL_SECONDS)
                with contextlib.suppress(*BROKEN, *UNEXPECTED):
                    await self._look_at(model, child)
        except TimeoutError:
            logger.error("%s: not loaded after %g s", model.name, self.config.model_timeout)
            child.kill()
            return
        if not _is(model, ModelState.LOADING):
            return
        model.state, model.loaded_at = ModelState.READY, time.time()
        last = model.idle_since = self._clock()
        logger.info("%s: ready after %.1f s", model.name, last - began)
        self._decide()
        failures = 0
        while failures < _LEAST_FAILURES or self._clock() - last < HEALTH_SECONDS:
            await asyncio.sleep(HEALTH_SECONDS / 6)
            asked, healthy = self._clock(), False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_SECONDS / 6):
                    healthy = await child.is_healthy()
            if healthy or _is(model, ModelState.STOPPING):
                last, failures = asked, 0
            else:
                failures += 1
        logger.error("%s: killed, as it was not healthy for %g s", model.name, HEALTH_SECONDS)
        child.kill()

    async def _look_at(self, model: ServedModel, child: Child) -> None:
        """Keep what a running model says about itself."""
        async with ask(child.path, "GET", "/v1/models") as answer:
            model.card = json.loads(await answer.body())["data"][0]
        body = json.dumps({"model": model.name}).encode()
        async with ask(child.path, "POST", "/api/show", body=body) as answer:
            model.shown = await answer.body()

    async def _plan(self) -> None:
        """Learn what the models need. Those that can't be served and weren't named are left out."""
        fault = "its memory could not be planned"
        unknown = dict(enumerate([*self.models]))
        try:
            async for line in self._plans([*self.models]):
                if "limit" in line:
                    self.limit = int(line["limit"])
                    text = "%s of memory for all models (%s)"
                    logger.info(text, size_text(self.limit), line["source"])
                    continue
                self._know(unknown.pop(line["model"]), line)
                self._decide()
        except (OSError, *UNEXPECTED) as error:
            fault += f": {error}"
        for model in unknown.values():
            self._know(model, {"refusal": fault})

    def _know(self, model: ServedModel, plan: dict[str, Any]) -> None:
        model.plan, model.need = plan, plan.get("nbytes")
        if model.refusal is None:
            return
        message = f"The model {model.name!r} can't be served: {model.refusal}"
        _fail(model, UnavailableError(message))
        if model.is_found:
            logger.debug(message)
            self.models.remove(model)
        else:
            logger.error(message)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is(model: ServedModel, state: ModelState) -> bool:
    return model.state is state  # A task beside may have changed it, which mypy doesn't know.


def _fail(model: ServedModel, error: Exception) -> None:
    waiting, model.waiting = model.waiting, {}
    for begins in waiting:
        if not begins.done():
            begins.set_exception(error)


def _last_words(model: ServedModel) -> str:
    lines = [shortened(line) for line in model.last_lines[-_SHOWN_LINES:]]
    return f"The last lines of its log: {' | '.join(lines) or 'none'}"


def _private_folder() -> Path:
    """Make a directory that only this user can enter, with a path that is short enough."""
    for base in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="mlx-mtp-", dir=base))  # of mode 0700
        if len(os.fsencode(folder)) + len("/999999") <= _PATH_BYTES:
            return folder
        folder.rmdir()
    raise UsageError(f"The path of the directory for temporary files is too long: {folder}.")
