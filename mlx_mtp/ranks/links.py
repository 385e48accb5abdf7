"""Connections between rank 0 and the others, beside the collectives: messages and heartbeats.

A collective that waits for a rank that is gone can't be ended. So each rank hears from those that
it is linked with on threads of their own, and ends its process when one falls silent.
"""

import asyncio
import contextlib
import hmac
import io
import json
import pickle
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mtp.distributed import World, all_reduce, rank_zero_hosts, waiting
from mlx_mtp.errors import RankError, UsageError
from mlx_mtp.ranks import messages
from mlx_mtp.ranks.messages import Answer, Failed

BEAT_SECONDS = 0.5
LOST_SECONDS = 8.0
"""Without a sign of life after which a rank is taken to be lost."""
CONNECT_SECONDS = 60.0
"""Within which all ranks must have connected to rank 0."""
PROVE_SECONDS = 10.0
"""Within which a connection must show that it is a rank's."""
_REACH_SECONDS, _RETRY_SECONDS = 3.0, 0.1
_TOLD_BYTES = 1024
_MOST_STRANGERS = 64  # connections that have shown nothing yet; the oldest gives way to a new one
# Each side shows that it has the key without sending it. Rank 0 sends random bytes; the other one
# its rank, random bytes of its own, and a proof of all this; rank 0 another proof.
_RANDOM_BYTES, _RANK_BYTES, _PROOF_BYTES = 32, 4, 32
_HELLO_BYTES = _RANK_BYTES + _RANDOM_BYTES + _PROOF_BYTES


class _Loader(pickle.Unpickler):
    """Of messages, and of nothing else that a pickle may bring."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(messages, name, None)
        # What that module imports, or a module has by itself, would lead on.
        if module != messages.__name__ or getattr(found, "__module__", None) != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no message")
        return found


class Link:
    """A connection to a rank that has shown that it has the key. Messages are pickled."""

    def __init__(
        self,
        sock: socket.socket,
        peer: int,  # its rank
        on_lost: Callable[[str], None],  # called on a thread of its own
    ) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.num_done = 0  # steps that the peer says it has computed
        self.own_done = 0  # what it is told
        self.memory = 0  # bytes that the rank with the least has
        self.answer = Answer(0, "")  # the peer's last one
        self.on_answer: Callable[[], None] = lambda: None  # on a thread of the link's own
        self._on_lost = on_lost
        self._connection = Connection(sock.detach())
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
            with waiting(f"rank {link.peer} to read its weights"):
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

    Addresses and key go by the collective itself. UsageError where ranks differ in their facts,
    RankError where one can't be reached.
    """
    words, servers = bytes(_TOLD_BYTES), dict[str, socket.socket]()
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            for host in rank_zero_hosts():
                with contextlib.suppress(OSError):
                    server = socket.create_server((host, 0))
                    servers[host] = stack.enter_context(server)
            places = [(host, server.getsockname()[1]) for host, server in servers.items()]
            words = json.dumps([places, secrets.token_hex()]).encode().ljust(_TOLD_BYTES)
        # When a rank has gone, mlx raises a RuntimeError or sums to what can't be read.
        try:
            with waiting("the other ranks to look at the model's files"):
                mx.eval(total := all_reduce(mx.array([*words])))
            places, key = json.loads(bytes(np.array(total).tolist()))
        except (RuntimeError, ValueError) as error:
            raise RankError(f"Rank 0 and the others can't connect: {error}") from error
        if not places:
            raise RankError("Rank 0's machine doesn't have the address that it is listed with.")
        if ranks.rank:
            link = Link(_reach(places, key.encode(), ranks.rank), 0, on_failure)
            link.send((dict(facts), memory))
            refusal, link.memory = link.receive()
            if refusal:
                raise UsageError(refusal)
            return link
        links = Links(on_failure)
        asyncio.run(_admit([*servers.values()], key.encode(), ranks.size, links))
    refusal, links.memory = None, memory
    for link in links.all:
        others, least = link.receive()
        links.memory = min(links.memory, least)
        if wrong := [name for name in facts if facts[name] != others.get(name)]:
            told = "; ".join(f"{n}: {facts[n]} and {others.get(n)}" for n in wrong)
            refusal = f"Ranks 0 and {link.peer} differ: {told:.1000}. All need the same."
    links.send((refusal, links.memory))
    if refusal:
        links.close()
        raise UsageError(refusal)
    return links


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join((role, *parts)), "sha256")


def _reach(places: Many[tuple[str, int]], key: bytes, rank: int) -> socket.socket:
    """Connect to rank 0 at the first address that leads to it.

    Again where it hangs up, as it does on the oldest of many strangers.
    """
    until, reached = monotonic() + CONNECT_SECONDS, True
    while reached and monotonic() < until:
        reached = False
        for host, port in places:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                sock = stack.enter_context(socket.create_connection((host, port), _REACH_SECONDS))
                reached = True
                sock.settimeout(PROVE_SECONDS)
                theirs = _read(sock, _RANDOM_BYTES)
                own = rank.to_bytes(_RANK_BYTES, "big") + secrets.token_bytes(_RANDOM_BYTES)
                sock.sendall(own + _proof(key, b"other", theirs, own))
                zero = _proof(key, b"zero", own, theirs)
                if hmac.compare_digest(_read(sock, _PROOF_BYTES), zero):
                    stack.pop_all()
                    return sock
        sleep(_RETRY_SECONDS)
    named = " or ".join(f"{host}:{port}" for host, port in places)
    raise RankError(f"Rank 0 can't be reached at {named}.")


def _read(sock: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer where the connection ends before."""
    found = b""
    while len(found) < count and (piece := sock.recv(count - len(found))):
        found += piece
    return found


async def _admit(servers: Many[socket.socket], key: bytes, size: int, links: Links) -> None:
    """Wait until all other ranks have connected and shown that they have the key.

    A connection that says nothing, or something else, is closed. RankError if a rank is missing
    after `CONNECT_SECONDS`.
    """
    loop, complete = asyncio.get_running_loop(), asyncio.Event()
    missing, strangers = set(range(1, size)), deque[asyncio.Task[None]]()

    async def greet(sock: socket.socket) -> None:
        sent, hello = secrets.token_bytes(_RANDOM_BYTES), b""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(PROVE_SECONDS):
                await loop.sock_sendall(sock, sent)
                while len(hello) < _HELLO_BYTES:
                    piece = await loop.sock_recv(sock, _HELLO_BYTES - len(hello))
                    if not piece:
                        return
                    hello += piece
                own, proof = hello[:-_PROOF_BYTES], hello[-_PROOF_BYTES:]
                rank = int.from_bytes(own[:_RANK_BYTES], "big")
                if rank in missing and hmac.compare_digest(proof, _proof(key, b"other", sent, own)):
                    await loop.sock_sendall(sock, _proof(key, b"zero", own, sent))
                    missing.remove(rank)
                    # It takes the socket over; heartbeats must not wait for the other ranks.
                    links.all.append(Link(sock, rank, links.fail))
            if not missing:
                complete.set()

    def welcome(sock: socket.socket) -> None:
        strangers.append(asyncio.create_task(greet(sock)))
        strangers[-1].add_done_callback(lambda _: sock.close())  # Nothing, if a link has it.

    async def listen(server: socket.socket) -> None:
        server.setblocking(False)
        while True:
            try:
                sock, _ = await loop.sock_accept(server)
            except OSError:  # The connection has gone, or there are too many open files.
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            welcome(sock)
            await asyncio.sleep(0)  # Else those that wait to be accepted are taken all at once.
            while strangers and strangers[0].done():
                strangers.popleft()
            if len(strangers) > _MOST_STRANGERS:
                strangers.popleft().cancel()

    places = " or ".join("{}:{}".format(*server.getsockname()) for server in servers)

    def waited() -> str:
        return f"{' and '.join(f'rank {rank}' for rank in sorted(missing))} to connect to {places}"

    listening = [asyncio.create_task(listen(server)) for server in servers]
    try:
        with waiting(waited):
            async with asyncio.timeout(CONNECT_SECONDS):
                await complete.wait()
    except TimeoutError:
        told = f"Rank 0 has waited {CONNECT_SECONDS:g} s for {waited()}."
        raise RankError(told) from None
    finally:
        for task in listening:
            task.cancel()
