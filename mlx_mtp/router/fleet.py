"""The models and their processes. Requests wait here; `policy` decides which models load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_mtp import errors
from mlx_mtp.bounded_json import shortened
from mlx_mtp.config import RouterConfig
from mlx_mtp.console import size_text
from mlx_mtp.router import policy
from mlx_mtp.router.child import Child
from mlx_mtp.router.policy import ModelState, Resident
from mlx_mtp.unix_http import ask, private_folder

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 30.0  # A process that is unhealthy for this time is killed.
_PROBES = 3  # health checks within `HEALTH_SECONDS`; all must fail
_STOP_SECONDS = 30.0  # for an idle process to write its prefixes and end, before it is killed
EVENTS = ("loads", "unloads", "deaths")
Wait = Callable[[asyncio.Future[Any]], Awaitable[None]]  # waits until the future is done
Plans = AsyncIterator[dict[str, Any]]  # the lines of `mlx_mtp.inspect.needs`


@dataclass(eq=False)
class ServedModel(Resident):
    """A model: its names, its plan and card, and its process if it has one."""

    names: tuple[str, ...] = ()  # accepted in requests; the first is `name`
    source: str | None = None  # a directory or a hub id; None: the bundled model
    given: str = ""  # `source` as the user wrote it
    is_found: bool = False  # in the cache (--all), not named by the user
    plan: dict[str, Any] = field(default_factory=dict)  # its line of `Plans`
    card: dict[str, Any] = field(default_factory=dict)  # its process's entry in /v1/models
    child: Child | None = None
    last_lines: list[str] = field(default_factory=list)  # of its last process's log

    @property
    def is_ready(self) -> bool:
        return self.state is ModelState.READY

    @property
    def shown_state(self) -> str:
        return "busy" if self.is_ready and self.busy else self.state.value

    @property
    def last_words(self) -> str:
        """The last lines of the last process's log, in a sentence."""
        lines = [shortened(line) for line in self.last_lines[-3:]]
        return f"The last lines of its log: {' | '.join(lines)}" if lines else "Its log is empty."

    def take_waiting(self) -> list[asyncio.Future[Child]]:
        """Remove and return the futures of the requests that wait for the model."""
        waiting, self.waiting = self.waiting, {}
        return [begins for begins in waiting if not begins.done()]

    def fail_waiting(self, error: Exception) -> None:
        for begins in self.take_waiting():
            begins.set_exception(error)


class Fleet:
    """All models. Used on one event loop, between `start` and `stop`."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: RouterConfig,
        *,
        command: Callable[[ServedModel], Sequence[str]],  # of the process, once `share` is set
        plans: Callable[[Sequence[ServedModel]], Plans],
        num_keys: int = 0,
        max_queue: int = 256,
        any_name: bool = False,
    ) -> None:
        self.models, self.config = list(models), config
        self.counts: Counter[tuple[str, str]] = Counter()  # by event (of `EVENTS`) and model
        self._limit: int | None = None  # bytes for all models; None: not known yet
        self._command, self._plans = command, plans
        self._num_keys, self._max_queue, self._any_name = num_keys, max_queue, any_name
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Plan the memory of all models, and start those that are pinned."""
        self._loop, self._folder = asyncio.get_running_loop(), private_folder()
        self._run(self._plan())

    async def stop(self) -> None:
        """End all processes; those that don't end are killed."""
        self._limit = None  # From now on `_decide` does nothing.
        self.end_all()
        children = [model.child for model in self.models if model.child is not None]
        for model in self.models:
            model.state = ModelState.STOPPING
        for child in children:
            child.terminate(1)
        ends = [asyncio.ensure_future(child.wait()) for child in children]
        if ends:
            await asyncio.wait(ends, timeout=_STOP_SECONDS)
        for child in children:
            child.kill()
        await asyncio.gather(*ends)
        for task in self._tasks:
            task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    def end_all(self) -> None:
        """End all requests with an error; each process ends those that it answers."""
        for model in self.models:
            model.fail_waiting(errors.EngineStoppedError("The server is shutting down."))
            if model.busy and model.child is not None:
                model.child.terminate(2)

    def find(self, name: str) -> ServedModel:
        """Returns the model named `name`, or the first for ""; raises ModelNotFoundError."""
        for model in self.models:
            # Ollama's clients add the tag :latest to names without a tag.
            if not name or name in model.names or name.removesuffix(":latest") in model.names:
                return model
        if self._any_name and self.models:
            return self.models[0]
        served = f"this server has {', '.join(repr(each.name) for each in self.models) or 'none'}"
        message = f"The model {name[:120]!r} is not served here; {shortened(served, 500)}."
        raise errors.ModelNotFoundError(message, param="model")

    @property
    def running(self) -> list[ServedModel]:
        """The models whose processes are ready."""
        return [model for model in self.models if model.is_ready]

    def seconds_left(self, model: ServedModel) -> float:
        """Returns the seconds until an unused model is unloaded, if no other needs its memory."""
        if model.pinned or not model.is_ready:
            return math.inf
        idle = 0.0 if model.busy else self._loop.time() - model.idle_since
        return max(0.0, model.keep_alive - idle)

    def keep(self, model: ServedModel, seconds: float | None) -> None:
        """Set the seconds that the model stays loaded while idle; None: the --keep-alive flag's."""
        model.keep_alive = self.config.keep_alive if seconds is None else seconds
        self._decide()

    async def take(self, model: ServedModel, seconds: float, wait: Wait) -> Child:
        """Wait at most `seconds` until the model takes a request; it is busy until `release`.

        Raises UnavailableError, RequestTimeoutError or EngineStoppedError.
        """
        model.asked = self._loop.time()
        if model.is_ready and not model.draining and model.child is not None:
            model.busy += 1
            return model.child
        return await self._admission(model, seconds, wait)

    def release(self, model: ServedModel) -> None:
        """Note that a request that `take` admitted has ended."""
        model.busy -= 1
        model.idle_since = self._loop.time()
        self._decide()

    async def _admission(self, model: ServedModel, seconds: float, wait: Wait) -> Child:
        """Wait for the model's process; then the request counts in `busy`."""
        self._check_waiting(model)
        begins: asyncio.Future[Child] = self._loop.create_future()
        model.waiting[begins] = model.asked
        self._decide()
        try:
            async with asyncio.timeout(seconds):
                await wait(begins)
                return begins.result()
        except BaseException as error:
            model.waiting.pop(begins, None)
            if begins.done() and begins.exception() is None:
                self.release(model)  # The client left just after it was admitted.
            else:
                self._decide()
            if isinstance(error, TimeoutError):
                raise errors.RequestTimeoutError(
                    f"The model {model.name!r} could not take the request within {seconds:g} "
                    "seconds: it was loading, or other models were busy."
                ) from None
            raise

    def _check_waiting(self, model: ServedModel) -> None:
        """Raise UnavailableError if the model can't be loaded, or if the queue is full."""
        name, retry, total = f"The model {model.name!r}", None, self._limit or 0
        left, room = model.refused_until - model.asked, policy.most_room(model, self.models, total)
        waiting, need = sum(len(each.waiting) for each in self.models), model.need or 0
        if (refusal := model.plan.get("refusal")) is not None:
            reason = f"{name} can't be served: {refusal}"
        elif left > 0:
            retry = math.ceil(left)
            reason = f"{name} is refused for {retry} seconds, as its process has ended again and "
            reason += f"again. {model.last_words}"
        elif total and need > room:
            reason = f"{name} needs {size_text(need)} of memory; beside the pinned models there "
            reason += f"are {size_text(max(room, 0))} of {size_text(total)} at most."
        elif waiting >= self._max_queue:
            retry = errors.UNKNOWN_RETRY_SECONDS
            reason = f"The queue for models is full: {waiting} of {self._max_queue} (--max-queue); "
            reason += f"{len(self.running)} of {len(self.models)} models are loaded."
        else:
            return
        raise errors.UnavailableError(reason, retry_after=retry)

    def _decide(self) -> None:
        """Apply the policy's decision, and admit the requests that wait for a ready model."""
        if self._limit is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        now = self._loop.time()
        decision = policy.decide(self.models, self._limit, now, self.config.switch_after)
        for model in self.models:
            if model in decision.stops:
                logger.info("%s: unloading, idle for %.0f s", model.name, now - model.idle_since)
                self.counts["unloads", model.name] += 1
                if model.child is not None:
                    model.child.terminate(1)
                    self._loop.call_later(_STOP_SECONDS, model.child.kill)
            elif model in decision.starts:
                self._run(self._life(model))
            elif model.is_ready and not model.draining and model.child is not None:
                for begins in model.take_waiting():
                    model.busy += 1
                    begins.set_result(model.child)
        if decision.again < math.inf:
            self._timer = self._loop.call_at(max(decision.again, now + 0.01), self._decide)

    async def _life(self, model: ServedModel) -> None:
        """Run the model's process from its start to its end."""
        self.counts["loads", model.name] += 1
        logger.info("%s: loading, with %s of memory", model.name, size_text(model.share))
        # The total grows with each load, so the path is a new one.
        path, model.last_lines = self._folder / str(self.counts.total()), []
        try:
            child = await Child.start(model.name, path, self._command(model), self._num_keys)
            model.child = child
            if model.state is ModelState.STOPPING:  # It was stopped meanwhile.
                child.kill()
            watch = asyncio.create_task(self._watch(model, child))
            end = await child.wait()
            watch.cancel()
            model.last_lines = [*child.last_lines]
        except OSError as error:
            end = f"could not be started: {error}"
        state, model.state, model.child = model.state, ModelState.ON_DISK, None
        freed, model.share = size_text(model.share), 0
        if state is ModelState.STOPPING:
            logger.info("%s: its process has ended, which frees %s", model.name, freed)
        else:
            self.counts["deaths", model.name] += 1
            model.count_death(self._loop.time())
            logger.error("%s: its process %s", model.name, end)
        if state is ModelState.LOADING:
            reason = f"The model {model.name!r} could not be loaded: its process {end}."
            model.fail_waiting(errors.UnavailableError(f"{reason} {model.last_words}"))
        self._decide()

    async def _watch(self, model: ServedModel, child: Child) -> None:
        """Wait until the process is ready, and kill it if it no longer answers."""
        began = self._loop.time()
        try:
            async with asyncio.timeout(self.config.model_timeout):
                while not await child.is_healthy():
                    await asyncio.sleep(0.1)
                lost = contextlib.suppress(OSError, *errors.UNEXPECTED)
                with lost, await ask(child.path, "GET", "/v1/models") as answer:
                    model.card = json.loads(await answer.body())["data"][0]
        except TimeoutError:
            logger.error("%s: killed, not loaded in %g s", model.name, self.config.model_timeout)
            child.kill()
            return
        now, failures = self._loop.time(), 0
        if model.state is ModelState.LOADING:
            logger.info("%s: ready after %.1f s", model.name, now - began)
            model.state, model.idle_since = ModelState.READY, now
            self._decide()
        while failures < _PROBES:
            asked, seconds = self._loop.time(), HEALTH_SECONDS / _PROBES
            healthy = await child.is_healthy(seconds) or model.state is ModelState.STOPPING
            failures = 0 if healthy else failures + 1
            await asyncio.sleep(asked + seconds - self._loop.time())
        logger.error("%s: killed, as it was not healthy for %g s", model.name, HEALTH_SECONDS)
        if model.state is ModelState.READY:  # From now on requests wait for the next process.
            model.state = ModelState.STOPPING
            self.counts["deaths", model.name] += 1
            model.count_death(self._loop.time())
        child.kill()

    async def _plan(self) -> None:
        """Read what the models need; drop those that can't be served and that nobody named."""
        fault, unknown = "its memory could not be planned", dict(enumerate([*self.models]))
        try:
            async for line in self._plans([*self.models]):
                if "limit" in line:
                    self._limit = int(line["limit"])
                    logger.info("Memory: %s for all (%s)", size_text(self._limit), line["source"])
                else:
                    self._know(unknown.pop(line["model"]), line)
        except (OSError, *errors.UNEXPECTED) as error:
            fault += f": {error}"
        for model in unknown.values():
            self._know(model, {"refusal": fault})

    def _know(self, model: ServedModel, plan: dict[str, Any]) -> None:
        model.plan, model.need = plan, plan.get("nbytes")
        if (refusal := plan.get("refusal")) is not None:
            message = f"The model {model.name!r} can't be served: {refusal}"
            model.fail_waiting(errors.UnavailableError(message))
            logger.log(logging.DEBUG if model.is_found else logging.ERROR, message)
            self.models = [m for m in self.models if m is not model or not m.is_found]
        self._decide()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
