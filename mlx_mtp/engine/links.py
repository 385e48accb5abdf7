"""Connections between rank 0 and the others, beside the collectives: messages and heartbeats.

A collective that waits for a rank that is gone can't be ended. So each rank hears from those that
it is linked with on threads of their own, and ends its process when one falls silent.
"""

import contextlib
import io
import json
import pickle
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mtp.engine import messages
from mlx_mtp.engine.messages import Answer, Failed
from mlx_mtp.errors import RankError, UsageError
from mlx_mtp.world import World, rank_zero_hosts, summed

BEAT_SECONDS = 0.5
LOST_SECONDS = 8.0
"""Without a sign of life after which a rank is taken to be lost."""
_CONNECT_SECONDS = 60.0
_REACH_SECONDS = 3.0
_TOLD_BYTES = 1024


class _Loader(pickle.Unpickler):
    """Of messages, and of nothing else that a pickle may bring."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(messages, name, None)
        # What that module imports, or a module has by itself, would lead on.
        if module != messages.__name__ or getattr(found, "__module__", None) != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no message")
        return found


class Link:
    """A connection to a rank, for those that have the key. Messages are pickled."""

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        on_lost: Callable[[str], None],  # called on a thread of its own
        *,
        to_lead: bool,
    ) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = 0  # its rank
        self.num_done = 0  # steps that the peer says it has computed
        self.own_done = 0  # what it is told
        self.memory = 0  # bytes that the rank with the least has
        self.answer = Answer(0, "")  # the peer's last one
        self.on_answer: Callable[[], None] = lambda: None  # on a thread of the link's own
        self._on_lost = on_lost
        self._connection = Connection(sock.detach())
        # Each proves that it has the key.
        turns = (answer_challenge, deliver_challenge)
        for turn in turns if to_lead else turns[::-1]:
            turn(self._connection, key)
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        for task in (self._read, self._beat):
            threading.Thread(target=task, name="mlx-mtp-link", daemon=True).start()

    def send(self, message: object) -> None:
        """Send what can be pickled. A failure is noticed where the peer's messages are read."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps(message))

    def fail(self, reason: str) -> None:
        """Tell the peer why this rank ends."""
        self.send(Failed(reason))

    def post(self, message: object) -> None:
        """Let this rank itself receive a message."""
        self._inbox.put(message)

    def receive(self) -> Any:
        """The next message; RankError when the peer is lost."""
        message = self._inbox.get()
        if isinstance(message, RankError):
            raise message
        return message

    def close(self) -> None:
        """One of the two is about to end: silence means nothing any more."""
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self.send(self.own_done)

    def _heard(self) -> bool:
        """Wait for a message; time in which this process is stopped (Ctrl-Z) does not count."""
        turns = range(round(LOST_SECONDS / BEAT_SECONDS))
        return any(self._connection.poll(BEAT_SECONDS) for _ in turns)

    def _read(self) -> None:
        try:
            while self._heard():
                message = _Loader(io.BytesIO(self._connection.recv_bytes())).load()
                if message is None:  # It ends, which is no loss.
                    self.close()
                if isinstance(message, int):
                    self.num_done = message
                elif isinstance(message, Answer):
                    self.answer = message
                    self.on_answer()
                elif isinstance(message, Failed):
                    raise RankError(message.reason)
                else:
                    self._inbox.put(message)
            reason = f"rank {self.peer} has not been heard of for {LOST_SECONDS:g} s"
        except (OSError, EOFError):
            reason = f"rank {self.peer} has ended"
        except RankError as error:
            reason = str(error)
        except Exception as error:  # Whatever a damaged pickle raises.
            reason = f"rank {self.peer} has sent what is no message: {error}"
        self._inbox.put(RankError(reason))
        if not self._closed.is_set():
            self._on_lost(reason)


class Links:
    """Rank 0's connections to all others, of which there may be none."""

    def __init__(self, on_failure: Callable[[str], None] = lambda _: None) -> None:
        self.all: list[Link] = []
        self.on_failure = on_failure  # called with the first reason, on any thread
        self.memory = 0  # bytes that the rank with the least has
        self._failed = threading.Lock()  # taken for good by the first failure

    def fail(self, reason: str) -> None:
        """The ranks can't go on together."""
        if self._failed.acquire(blocking=False):
            self.on_failure(reason)

    def send(self, message: object) -> None:
        for link in self.all:
            link.send(message)

    def wait(self) -> None:
        """Until each has sent something; RankError if one is lost."""
        for link in self.all:
            link.receive()

    def progress(self) -> str:
        """How many steps the others have computed, in words."""
        counts = {link.peer: link.num_done for link in self.all}
        return ", ".join(f"rank {peer} {counts[peer]}" for peer in sorted(counts))

    def close(self) -> None:
        """Let the others end."""
        for link in self.all:
            link.close()
            link.send(None)


def connect(
    ranks: World, facts: Mapping[str, object], memory: int, on_failure: Callable[[str], None]
) -> Links | Link:
    """Link rank 0 and the others, each with its memory in bytes.

    Addresses and key go by the collective itself. UsageError where ranks differ in their facts.
    """
    words, server = bytes(_TOLD_BYTES), None
    try:
        if ranks.rank == 0:
            server = socket.create_server(("", 0), backlog=ranks.size)
            server.settimeout(_CONNECT_SECONDS)
            port, key = server.getsockname()[1], secrets.token_hex()
            words = json.dumps([rank_zero_hosts(), port, key]).encode().ljust(_TOLD_BYTES)
        hosts, port, key = json.loads(bytes(np.array(summed(mx.array([*words]))).tolist()))
        if server is None:
            link = Link(_reach(hosts, port), key.encode(), on_failure, to_lead=True)
            link.send((ranks.rank, dict(facts), memory))
            refusal, link.memory = link.receive()
            if refusal:
                raise UsageError(refusal)
            return link
        with server:
            socks = [server.accept()[0] for _ in range(1, ranks.size)]
        links = Links(on_failure)
        links.all = [Link(sock, key.encode(), links.fail, to_lead=False) for sock in socks]
    # When a rank has gone, mlx raises a RuntimeError or sums to what can't be read (ValueError);
    # another program may listen at the port.
    except (OSError, EOFError, RuntimeError, ValueError, AuthenticationError) as error:
        raise RankError(f"Rank 0 and the others can't connect: {error}") from error
    refusal, links.memory = None, memory
    for link in links.all:
        link.peer, others, least = link.receive()
        links.memory = min(links.memory, least)
        if wrong := [name for name in facts if facts[name] != others.get(name)]:
            told = "; ".join(f"{n}: {facts[n]} and {others.get(n)}" for n in wrong)
            refusal = f"Ranks 0 and {link.peer} differ: {told:.1000}. All need the same."
    links.send((refusal, links.memory))
    if refusal:
        links.close()
        raise UsageError(refusal)
    return links


def _reach(hosts: Many[str], port: int) -> socket.socket:
    """Connect to rank 0 at the first address that leads to it."""
    for host in hosts:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port), _REACH_SECONDS)
    raise RankError(f"Rank 0 can't be reached at port {port} of {' or '.join(hosts)}.")
