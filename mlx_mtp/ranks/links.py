"""Connections between rank 0 and each other rank: messages and heartbeats.

A collective that waits for a lost rank can't be interrupted. So each link has its own threads, and
a rank whose peer falls silent ends its own process.
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
from mlx_mtp.ranks.messages import Failed, Fetched, PrefixOp

BEAT_SECONDS = 0.5
LOST_SECONDS = 8.0
"""A rank that sends nothing for this long is considered lost."""
CONNECT_SECONDS = 60.0
"""Time in which all ranks must connect to rank 0."""
PROVE_SECONDS = 10.0
"""Time in which a connection must prove that it comes from a rank."""
_REACH_SECONDS, _RETRY_SECONDS = 3.0, 0.1
_SHARED_BYTES = 1024
_MOST_STRANGERS = 64  # connections without proof yet; the oldest is closed for a new one
# Each side proves that it has the key without sending it. Rank 0 sends random bytes; the other rank
# sends its number, random bytes and an HMAC of all of these; rank 0 replies with another HMAC.
_RANDOM_BYTES, _RANK_BYTES, _PROOF_BYTES = 32, 4, 32
_HELLO_BYTES = _RANK_BYTES + _RANDOM_BYTES + _PROOF_BYTES


class _Loader(pickle.Unpickler):
    """Loads the classes of `messages`, and nothing else that a pickle can name."""

    def find_class(self, module: str, name: str) -> Any:
        loaded = getattr(messages, name, None)
        # Names that `messages` imports, or attributes of every module, would lead to other code.
        if module != messages.__name__ or getattr(loaded, "__module__", None) != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no message")
        return loaded


class Link:
    """An authenticated connection to another rank. Messages are pickled."""

    def __init__(
        self,
        sock: socket.socket,
        peer: int,  # the other rank
        on_lost: Callable[[str], None],  # called with the reason, on the link's thread
    ) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.num_done = 0  # steps that this rank has launched; sent in heartbeats
        self.peer_num_done = 0
        self.memory = 0  # bytes of memory of the rank with the least
        self.fetched = Fetched(0, "")  # the peer's last answer to a fetch
        self.on_fetched: Callable[[], None] = lambda: None  # called on the link's thread
        self._on_lost = on_lost
        self._connection = Connection(sock.detach())
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        for task in (self._read, self._beat):
            threading.Thread(target=task, name="mlx-mtp-link", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message. Failures are ignored: the reading thread notices a lost peer."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps(message))

    def fail(self, reason: str) -> None:
        """Tell the peer why this rank ends."""
        self.send(Failed(reason))

    def post(self, message: object) -> None:
        """Put a message into this rank's own inbox."""
        self._inbox.put(message)

    def receive(self) -> Any:
        """Wait for the next message and return it; raises RankError if the peer is lost."""
        message = self._inbox.get()
        if isinstance(message, RankError):
            raise message
        return message

    def close(self) -> None:
        """Stop heartbeats and report no lost peer from now on: one of the ranks is about to end."""
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self.send(self.num_done)

    def _heard(self) -> bool:
        """Wait for a message; returns False if there is none for `LOST_SECONDS`.

        Waits many times for a short time, so that time while this process is stopped (Ctrl-Z) does
        not count.
        """
        waits = range(round(LOST_SECONDS / BEAT_SECONDS))
        return any(self._connection.poll(BEAT_SECONDS) for _ in waits)

    def _read(self) -> None:
        try:
            while self._heard():
                message = _Loader(io.BytesIO(self._connection.recv_bytes())).load()
                if message is None:  # The peer ends normally.
                    self.close()
                if isinstance(message, int):
                    self.peer_num_done = message
                elif isinstance(message, Fetched):
                    self.fetched = message
                    self.on_fetched()
                elif isinstance(message, Failed):
                    raise RankError(message.reason)
                else:
                    self._inbox.put(message)
            reason = f"rank {self.peer} has not been heard of for {LOST_SECONDS:g} s"
        except (OSError, EOFError):
            reason = f"rank {self.peer} has ended"
        except RankError as error:
            reason = str(error)
        except Exception as error:  # A damaged pickle can raise anything.
            reason = f"rank {self.peer} has sent what is no message: {error}"
        self._inbox.put(RankError(reason))
        if not self._closed.is_set():
            self._on_lost(reason)


class Links:
    """Rank 0's links to all other ranks, if any. Records operations to send with the next step."""

    def __init__(self, on_failure: Callable[[str], None] = lambda _: None) -> None:
        self.all: list[Link] = []
        self.on_failure = on_failure  # called with the first reason, on any thread
        self.memory = 0  # bytes of memory of the rank with the least
        self._failed = threading.Lock()  # never released after the first failure
        self._ops: list[PrefixOp] = []

    def fail(self, reason: str) -> None:
        """Report that the ranks can't go on together; later reasons are ignored."""
        if self._failed.acquire(blocking=False):
            self.on_failure(reason)

    def send(self, message: object) -> None:
        for link in self.all:
            link.send(message)

    def record(self, *op: Any) -> None:
        self._ops.append(op)

    def take_ops(self) -> list[PrefixOp]:
        """Remove and return the recorded operations; more can be recorded meanwhile."""
        return [self._ops.pop(0) for _ in range(len(self._ops))]

    def wait(self) -> None:
        """Wait for one message from each rank; raises RankError if a rank is lost."""
        for link in self.all:
            with waiting(f"rank {link.peer} to read its weights"):
                link.receive()

    def launched_steps(self) -> str:
        """Returns a text that says how many steps each other rank has launched."""
        counts = {link.peer: link.peer_num_done for link in self.all}
        return ", ".join(f"rank {peer} {counts[peer]}" for peer in sorted(counts))

    def close(self) -> None:
        """Let the other ranks end."""
        for link in self.all:
            link.close()
            link.send(None)


def connect(
    ranks: World, facts: Mapping[str, object], memory: int, on_failure: Callable[[str], None]
) -> Links | Link:
    """Link rank 0 and the other ranks; all ranks call this. `memory` is this rank's, in bytes.

    A collective distributes rank 0's addresses and a random key. Raises UsageError if ranks differ
    in their `facts`, and RankError if a rank can't be reached.
    """
    shared, servers = bytes(_SHARED_BYTES), dict[str, socket.socket]()
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            for host in rank_zero_hosts():
                with contextlib.suppress(OSError):
                    server = socket.create_server((host, 0))
                    servers[host] = stack.enter_context(server)
            places = [(host, server.getsockname()[1]) for host, server in servers.items()]
            shared = json.dumps([places, secrets.token_hex()]).encode().ljust(_SHARED_BYTES)
        # If a rank has gone, mlx raises a RuntimeError, or the sum is no JSON.
        try:
            with waiting("the other ranks to look at the model's files"):
                mx.eval(total := all_reduce(mx.array([*shared])))
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
        asyncio.run(_accept_ranks([*servers.values()], key.encode(), ranks.size, links))
    refusal, links.memory = None, memory
    for link in links.all:
        others, least = link.receive()
        links.memory = min(links.memory, least)
        if wrong := [name for name in facts if facts[name] != others.get(name)]:
            values = "; ".join(f"{n}: {facts[n]} and {others.get(n)}" for n in wrong)
            refusal = f"Ranks 0 and {link.peer} differ: {values:.1000}. All need the same."
    links.send((refusal, links.memory))
    if refusal:
        links.close()
        raise UsageError(refusal)
    return links


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join((role, *parts)), "sha256")


def _reach(places: Many[tuple[str, int]], key: bytes, rank: int) -> socket.socket:
    """Connect to rank 0 at the first of its addresses that works.

    Retries if rank 0 hangs up, as it does on the oldest unproven connection if there are many.
    """
    until, reached = monotonic() + CONNECT_SECONDS, True
    while reached and monotonic() < until:
        reached = False
        for host, port in places:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                sock = stack.enter_context(socket.create_connection((host, port), _REACH_SECONDS))
                reached = True
                sock.settimeout(PROVE_SECONDS)
                challenge = _receive_bytes(sock, _RANDOM_BYTES)
                hello = rank.to_bytes(_RANK_BYTES, "big") + secrets.token_bytes(_RANDOM_BYTES)
                sock.sendall(hello + _proof(key, b"other", challenge, hello))
                expected = _proof(key, b"zero", hello, challenge)
                if hmac.compare_digest(_receive_bytes(sock, _PROOF_BYTES), expected):
                    stack.pop_all()
                    return sock
        sleep(_RETRY_SECONDS)
    addresses = " or ".join(f"{host}:{port}" for host, port in places)
    raise RankError(f"Rank 0 can't be reached at {addresses}.")


def _receive_bytes(sock: socket.socket, count: int) -> bytes:
    """Read `count` bytes, or fewer if the connection ends."""
    content = b""
    while len(content) < count and (piece := sock.recv(count - len(content))):
        content += piece
    return content


async def _accept_ranks(servers: Many[socket.socket], key: bytes, size: int, links: Links) -> None:
    """Add a link for each other rank, once it has connected and proved that it has the key.

    Connections without a proof are closed. Raises RankError if a rank is missing after
    `CONNECT_SECONDS`.
    """
    loop, complete = asyncio.get_running_loop(), asyncio.Event()
    missing, strangers = set(range(1, size)), deque[asyncio.Task[None]]()

    async def greet(sock: socket.socket) -> None:
        challenge, received = secrets.token_bytes(_RANDOM_BYTES), b""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(PROVE_SECONDS):
                await loop.sock_sendall(sock, challenge)
                while len(received) < _HELLO_BYTES:
                    piece = await loop.sock_recv(sock, _HELLO_BYTES - len(received))
                    if not piece:
                        return
                    received += piece
                hello, proof = received[:-_PROOF_BYTES], received[-_PROOF_BYTES:]
                rank = int.from_bytes(hello[:_RANK_BYTES], "big")
                expected = _proof(key, b"other", challenge, hello)
                if rank in missing and hmac.compare_digest(proof, expected):
                    await loop.sock_sendall(sock, _proof(key, b"zero", hello, challenge))
                    missing.remove(rank)
                    # The link owns the socket now. Heartbeats begin before other ranks connect.
                    links.all.append(Link(sock, rank, links.fail))
            if not missing:
                complete.set()

    def welcome(sock: socket.socket) -> None:
        strangers.append(asyncio.create_task(greet(sock)))
        strangers[-1].add_done_callback(lambda _: sock.close())  # no effect if a link owns it

    async def listen(server: socket.socket) -> None:
        server.setblocking(False)
        while True:
            try:
                sock, _ = await loop.sock_accept(server)
            except OSError:  # The peer hung up, or too many files are open.
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            welcome(sock)
            await asyncio.sleep(0)  # Let tasks run even if another connection waits already.
            while strangers and strangers[0].done():
                strangers.popleft()
            if len(strangers) > _MOST_STRANGERS:
                strangers.popleft().cancel()

    addresses = " or ".join("{}:{}".format(*server.getsockname()) for server in servers)

    def awaited() -> str:
        ranks = " and ".join(f"rank {rank}" for rank in sorted(missing))
        return f"{ranks} to connect to {addresses}"

    listening = [asyncio.create_task(listen(server)) for server in servers]
    try:
        with waiting(awaited):
            async with asyncio.timeout(CONNECT_SECONDS):
                await complete.wait()
    except TimeoutError:
        reason = f"Rank 0 has waited {CONNECT_SECONDS:g} s for {awaited()}."
        raise RankError(reason) from None
    finally:
        for task in listening:
            task.cancel()
