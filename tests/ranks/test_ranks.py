"""Several ranks, as threads of this process and as processes, answer as one rank does."""

import contextlib
import io
import itertools
import json
import pickle
import queue
import re
import socket
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.convert import convert as mlx_lm_convert

from mlx_mtp import distributed
from mlx_mtp.build import build_engine
from mlx_mtp.calibration import calibrator
from mlx_mtp.calibration.calibrator import Calibrator
from mlx_mtp.config import EngineConfig
from mlx_mtp.convert.convert import add_head
from mlx_mtp.distributed import World
from mlx_mtp.engine.chunk_costs import PrefillCosts
from mlx_mtp.engine.request import RequestOptions
from mlx_mtp.errors import EngineStoppedError, ModelError, RankError, UsageError
from mlx_mtp.models.loader import load_model
from mlx_mtp.ranks import launch, links
from mlx_mtp.ranks.messages import Compare
from mlx_mtp.speculative.costs import StepCosts
from tests.conftest import DEMO, DENSE_DEMO
from tests.engine.test_optimistic import optimistic, replay
from tests.ranks.rank import answers, requests_of
from tests.support.cases import EOS, make_requests
from tests.support.exchange import Exchange, Queue, led
from tests.support.harness import Driver, greedy, plain, request
from tests.support.process import start_ranks
from tests.support.quick import full
from tests.support.tiny_models import FAMILIES, VOCAB, Layout, write_checkpoint
from tests.support.waiting import wait_until
from tests.vision.seeing import slow

DEPTHS = (0, 1, 2, 3, "erratic")
KINDS = ("greedy", "sampled", "greedy grammars", "sampled grammars")
QUICK = {
    ("qwen3_next", "erratic", "sampled grammars"),
    ("qwen3_5", 3, "sampled"),
    ("qwen3_5_moe", 1, "greedy grammars"),
}
CASES = [
    pytest.param(*case) if case in QUICK else full(*case)
    for case in itertools.product(FAMILIES, DEPTHS, KINDS)
]


def by_threads(monkeypatch, models, *case, **more):
    """Returns the answers of rank 0, with a thread for each rank's model."""
    work = partial(answers, models[0], *case, **more)
    tokens, reused = led(monkeypatch, models, lambda together: work(links=together))
    assert reused > 20, "the second round reuses prefixes of the first"
    return tokens


def with_branch(references, tiny_models, family, kind):
    branch = requests_of(kind)[-1]
    answer = plain(tiny_models[family], branch, VOCAB, (EOS,))
    return {**references(family, kind), "branch": answer}


@pytest.mark.parametrize(("family", "depth", "kind"), CASES)
def test_ranks_answer_as_one(
    tmp_path, monkeypatch, tiny_models, references, ties, family, depth, kind
):
    write_checkpoint(tmp_path, Layout(family, stacked_experts=family == "qwen3_5_moe"))
    models = [load_model(tmp_path, enable_mtp=True, part=(rank, 2)) for rank in range(2)]
    few = (family, depth, kind) in QUICK
    expected = with_branch(references, tiny_models, family, kind)
    ids = range(EOS, VOCAB, 2) if depth == 3 else None  # of a reduced draft vocabulary
    check(ties, expected, by_threads(monkeypatch, models, depth, kind, few=few, ids=ids))


@pytest.mark.parametrize("family", [FAMILIES[0], *(full(each) for each in FAMILIES[1:])])
def test_optimistic_acceptance(tmp_path, monkeypatch, tiny_models, family):
    """Each step follows the acceptance rule, and all ranks agree on it."""
    write_checkpoint(tmp_path, Layout(family, stacked_experts=family == "qwen3_5_moe"))
    models = [load_model(tmp_path, enable_mtp=True, part=(rank, 2)) for rank in range(2)]
    shares = itertools.cycle((0.5, 0.0, 1e-3))
    requests = [
        optimistic(*each, options=RequestOptions(trace=True))
        for each in zip(make_requests("sampled"), shares)
    ]

    def work(together):
        run = Driver(models[0], vocab_size=VOCAB, stop_ids=(EOS,), links=together)
        run.run_arrivals({0: requests[:5], 4: requests[5:]})
        return run.outputs

    outputs = led(monkeypatch, models, work)
    monkeypatch.undo()
    assert sum(replay(tiny_models[family], r, outputs[r.request_id]) for r in requests) > 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "size"),
    [("bundled", 2), ("bundled", 4), ("sibling", 2), ("sibling", 4), ("4 bits", 2)],
)
def test_the_bundled_model_and_its_sibling(tmp_path, monkeypatch, ties, name, size):
    path = DENSE_DEMO if name == "sibling" else DEMO
    if name == "4 bits":  # An expert has one group of 32 for each of two ranks.
        path = tmp_path / "model"
        mlx_lm_convert(str(DEMO), str(path), quantize=True, q_bits=4, q_group_size=32)
        add_head(str(path), str(DEMO))
    load = partial(load_model, path, enable_mtp=True, memory=0)  # 0: weights stay quantized
    kind, whole = "sampled grammars", load()
    expected = {r.request_id: plain(whole, r, VOCAB, (EOS,)) for r in requests_of(kind)}
    models = [load(part=(rank, size)) for rank in range(size)]
    assert ("scales" in models[1].causal_lm.lm_head) == (name == "4 bits")
    check(ties, expected, by_threads(monkeypatch, models, "erratic", kind, cache=1 << 24))


@pytest.mark.parametrize(
    ("path", "size", "depth", "kind"),
    [
        (None, 2, 2, "sampled"),  # so that steps are launched before the last ones are read
        full(None, 2, "erratic", "sampled grammars"),
        full(None, 2, 2, "sampled images"),
        full(DEMO, 4, "erratic", "sampled grammars"),
        full(DEMO, 4, 0, "sampled"),
        full(DENSE_DEMO, 4, 3, "sampled"),
    ],
)
def test_processes_answer_as_one(tmp_path, ties, path, size, depth, kind):
    if path is None:
        path = tmp_path / "tiny"
        sees = kind.endswith("images")
        write_checkpoint(path, Layout("qwen3_5" if sees else "qwen3_next", sees=sees))
    command = ["-m", "tests.ranks.rank", str(path), str(tmp_path), str(depth), kind]
    started = start_ranks(tmp_path, [command] * size)
    outputs = [each.communicate(timeout=600)[0] for each in started]
    assert [each.returncode for each in started] == [0] * size, outputs
    tokens, reused = json.loads((tmp_path / "answers.json").read_text())
    model = load_model(path, enable_mtp=True)
    reference = slow if kind.endswith("images") else plain
    expected = {r.request_id: reference(model, r, VOCAB, (EOS,)) for r in requests_of(kind)}
    check(ties, expected, tokens)
    assert reused > 20


def test_costs_are_measured_by_all_ranks(tmp_path, monkeypatch, references, ties):
    """Requests that arrive during the calibration are answered."""
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    models = [load_model(tmp_path, enable_mtp=True, part=(rank, 2)) for rank in range(2)]
    config = EngineConfig(
        prefill_step_size=64, max_decode_pause=1e9, calibration_seconds=1e9, max_num_seqs=2
    )
    monkeypatch.setattr(calibrator, "_TIMES", 1)
    monkeypatch.setattr(calibrator, "_TIMED_STEPS", 4)
    costs, chunks = StepCosts(), PrefillCosts(config.prefill_step_size)
    requests = make_requests("sampled")[:4]

    def work(together):
        run = Driver(models[0], vocab_size=VOCAB, stop_ids=(EOS,), config=config, links=together)
        calibration = Calibrator(costs, chunks, config, None, "")
        for number, each in enumerate(requests, 1):
            for _ in range(7 * number):
                calibration.step(run.runner)
            calibration.pause()
            run.add(each)
            run.run()
            run.core.release()
        while calibration.busy:
            calibration.step(run.runner)
        return {each.request_id: run.tokens(each.request_id) for each in requests}

    answers_by_id = led(monkeypatch, models, work)
    for name, tokens in answers_by_id.items():
        ties.check(name, tokens, references("qwen3_next", "sampled")[name])
    assert {cell.rows for cell in costs.table()} == {1, 2}
    assert [cell.size for cell in chunks.table()] == [16, 32, 64]


def check(ties, expected, answers_by_id) -> None:
    for name, tokens in answers_by_id.items():
        ties.check(name, tokens, expected[name.split()[1]])


def test_links_tell_what_differs_and_who_is_lost(monkeypatch):
    exchange = Exchange(2, monkeypatch)
    monkeypatch.setattr(links, "all_reduce", exchange.all_reduce)
    monkeypatch.setattr(links, "rank_zero_hosts", lambda: ["255.255.255.255", "127.0.0.1"])

    monkeypatch.setattr(links, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(links, "LOST_SECONDS", 2.0)

    on_lead, on_follower = queue.SimpleQueue(), queue.SimpleQueue()

    def join(facts: list[dict[str, object]]) -> list[object]:
        def one(rank: int) -> object:
            try:
                lost = [on_lead, on_follower][rank].put
                return links.connect(World(rank, 2), facts[rank], (8 - rank) << 30, lost)
            except UsageError as error:
                return str(error)

        return exchange.run(one)

    versions = [{"mlx": "0.32.4", "model": "a"}, {"mlx": "0.32.2", "model": "a"}]
    refusal = "Ranks 0 and 1 differ: mlx: 0.32.4 and 0.32.2. All need the same."
    assert join(versions) == [refusal, refusal]
    lead, follower = join([{}, {}])
    assert lead.memory == follower.memory == 7 << 30
    follower.num_done = 5
    lead.send({"a": 1})
    assert follower.receive() == {"a": 1}
    wait_until(lambda: "rank 1 5" in lead.launched_steps())
    # The heartbeat of a rank that hangs as a whole stops.
    follower._closed.set()
    assert on_lead.get(timeout=60) == "rank 1 has not been heard of for 2 s"
    lead.fail("again")
    assert on_lead.empty()
    lead, follower = join([{}, {}])
    follower._connection.close()
    assert on_lead.get(timeout=60) == "rank 1 has ended"
    with pytest.raises(RankError, match="rank 1 has ended"):
        lead.wait()


@pytest.fixture
def start(monkeypatch):
    """`start(size)` returns the results of `connect` on `size` ranks, or the errors' texts."""

    def started(size, lost=lambda _: None):
        exchange = Exchange(size, monkeypatch)
        monkeypatch.setattr(links, "all_reduce", exchange.all_reduce)
        monkeypatch.setattr(links, "rank_zero_hosts", lambda: ["127.0.0.1"])

        def one(rank):
            try:
                return links.connect(World(rank, size), {}, 1 << 30, lost)
            except RankError as error:
                return str(error)

        return exchange.run(one)

    return started


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["127.0.0.1:4", "127.0.0.1:5"], ["127.0.0.1"]),
        (["127.0.0.1:4", "127.0.0.1:5", "127.0.0.1:6"], ["127.0.0.1"]),
        (["10.0.0.1:4", "10.0.0.2:4"], ["10.0.0.1"]),
        # The first address can belong to a cable that leads only to the last rank.
        (["10.0.0.1:4", "10.0.1.2:4", "10.0.2.1:4"], ["10.0.0.1", "192.168.1.5"]),
    ],
)
def test_rank_zero_listens_where_the_hostfile_says(hosts, expected, monkeypatch, tmp_path):
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([[host] for host in hosts]))
    monkeypatch.setenv("MLX_HOSTFILE", str(file))
    monkeypatch.setattr(distributed, "own_address", lambda: "192.168.1.5")
    assert distributed.rank_zero_hosts() == expected


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MLX_JACCL_COORDINATOR", "10.0.0.1:4", ["10.0.0.1"]),
        ("MLX_JACCL_COORDINATOR", "mac:4", ["mac", "192.168.1.5"]),
        ("NCCL_HOST_IP", "10.0.0.1", ["10.0.0.1"]),
        ("NCCL_HOST_IP", "box", ["box", "192.168.1.5"]),
    ],
)
def test_a_name_may_lead_elsewhere_on_its_own_machine(variable, value, expected, monkeypatch):
    for other in ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(distributed, "own_address", lambda: "192.168.1.5")
    assert distributed.rank_zero_hosts() == expected


def test_strangers_take_no_ranks_place(start, monkeypatch, caplog):
    """Neither silent strangers, more than rank 0 keeps, nor some that send a false hello."""
    strangers, listen, call = [], socket.create_server, socket.create_connection

    def called(*given, **more):
        server = listen(*given, **more)
        assert server.getsockname()[0] == "127.0.0.1", "nobody else on the network can call"
        for number in range(links._MOST_STRANGERS + 10):
            strangers.append(call(server.getsockname(), timeout=60))
            if number % 10 == 0:
                strangers[-1].sendall(bytes(links._HELLO_BYTES))
        return server

    def late(*given, **more):
        """One of two ranks connects only after rank 0 has logged that it waits."""
        if not threads:
            threads.append(threading.current_thread())
            wait_until(lambda: re.search(r"Waiting for rank \d to connect to 127", caplog.text))
        return call(*given, **more)

    threads = []
    monkeypatch.setattr(distributed, "NOTICE_SECONDS", 0.05, raising=False)
    monkeypatch.setattr(socket, "create_server", called)
    monkeypatch.setattr(socket, "create_connection", late)
    lead, *others = start(3)
    assert sorted(link.peer for link in lead.all) == [1, 2]
    lead.send("begin")
    assert [other.receive() for other in others] == ["begin"] * 2
    for each in strangers:
        with each, contextlib.suppress(ConnectionError):
            while each.recv(99):
                pass
    lead.close()


def test_a_silent_stranger_is_dropped_and_a_missing_rank_is_named(start, monkeypatch):
    monkeypatch.setattr(links, "PROVE_SECONDS", 1.0)
    reach = links._reach

    def silent_first(places, *key):
        with socket.create_connection(places[0], 60) as stranger:
            while stranger.recv(99):
                pass
        return reach(places, *key)

    with monkeypatch.context() as patch:
        patch.setattr(links, "_reach", silent_first)
        lead, _ = start(2)
        lead.close()

    def never(places, *key):
        raise RankError("it gave up")

    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(links, "_reach", never)
    lead, *others = start(3)
    reason = r"Rank 0 has waited 0.2 s for rank 1 and rank 2 to connect to 127.0.0.1:\d+."
    assert re.fullmatch(reason, lead) and others == ["it gave up"] * 2


def test_a_rank_that_is_hung_up_on_calls_again():
    """Rank 0 hangs up on the oldest of many strangers, which can be a rank."""
    key, challenge = b"key", bytes(links._RANDOM_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            server.accept()[0].close()
            sock, _ = server.accept()
            with sock:
                sock.sendall(challenge)
                hello = links._receive_bytes(sock, links._HELLO_BYTES)[: -links._PROOF_BYTES]
                sock.sendall(links._proof(key, b"zero", hello, challenge))

        thread = threading.Thread(target=answer)
        thread.start()
        place = server.getsockname()
        links._reach([place], key, 1).close()
        thread.join()
    with pytest.raises(RankError, match="can't be reached"):
        links._reach([place], key, 1)  # Fails immediately, as nobody listens.


def test_a_rank_that_is_lost_at_the_start_is_named(start, monkeypatch):
    send, lost = links.Link.send, queue.SimpleQueue()

    def end(link, message):
        if isinstance(message, tuple) and {} in message:  # its first message, with its facts
            link._closed.set()
            link._connection.close()
        else:
            send(link, message)

    monkeypatch.setattr(links.Link, "send", end)
    assert start(2, lost.put)[0] == "rank 1 has ended"
    assert lost.get(timeout=60) == "rank 1 has ended"


@pytest.mark.parametrize("factor", [1.2, 1.0001])
def test_a_rank_that_computes_other_numbers_is_found_at_the_start(
    tmp_path, monkeypatch, caplog, factor
):
    """Numbers that are only rounded differently cause a warning."""
    write_checkpoint(tmp_path, Layout("qwen3_5"))
    models = [load_model(tmp_path, enable_mtp=True, part=(rank, 2)) for rank in range(2)]
    norm = models[1].causal_lm.model.norm
    norm.weight = norm.weight * factor
    mx.eval(norm.weight)

    def work(together):
        run = Driver(models[0], vocab_size=VOCAB, links=together)
        run.add(request("r", range(5), greedy(9)))
        while run.runner.batches.decoding is None:
            run.step()
        refusal = pytest.raises(ModelError, match="rank 1 computes other numbers than rank 0")
        with refusal if factor > 1.1 else nullcontext():
            run.runner.check_ranks_agree()

    led(monkeypatch, models, work)
    assert ("The ranks round differently" in caplog.text) == (factor < 1.1)


def test_a_lost_rank_ends_all_requests(tiny_models):
    """Requests end even if the engine's thread is stuck, as in a collective that never ends."""
    together = links.Links(lambda _: None)
    config = EngineConfig(num_draft_tokens=1)
    engine = build_engine(tiny_models["qwen3_5"], config, VOCAB, (), links=together)
    stuck, outputs = threading.Event(), queue.SimpleQueue()
    threads = []

    def deliver(arrived) -> None:
        for output in arrived:
            outputs.put(output)
        if not threads:
            threads.append(threading.current_thread())
            stuck.wait(60)

    engine.start(deliver)
    engine.submit(request("r", range(5), greedy(400, ignore_eos=True)))
    while outputs.get(timeout=60).token_ids == ():
        pass
    engine.fail("rank 1 has ended")
    last = outputs.get(timeout=60)
    assert str(last.error) == "Cut short: rank 1 has ended." and last.finish_reason == "error"
    assert engine.unhealthy_reason == "rank 1 has ended"
    with pytest.raises(EngineStoppedError, match="rank 1 has ended"):
        engine.submit(request("s", range(5), greedy(4)))
    stuck.set()
    assert engine.stop(60)


def test_a_step_that_never_ends_ends_the_process(monkeypatch):
    """All ranks send heartbeats, but one of them is stuck."""
    reasons = queue.SimpleQueue()
    for name in ("_LOOK_SECONDS", "_HANG_SECONDS", "_FLUSH_SECONDS"):
        monkeypatch.setattr(launch, name, 0.01)
    monkeypatch.setattr(launch, "give_up", reasons.put)
    engine = SimpleNamespace(hang_reason=None, fail=reasons.put)
    together, other = links.Links(pytest.fail), Queue()
    together.all, other.peer, other.peer_num_done = [other], 1, 7
    other.send("ready")
    launch.watch(engine, together)
    assert reasons.empty()
    engine.hang_reason = "the engine hangs"
    why = "the engine hangs; steps that others have computed: rank 1 7"
    assert [reasons.get(timeout=60) for _ in range(2)] == [why, why]


@pytest.mark.parametrize(
    "where",
    [
        ("builtins", "eval"),
        *(
            ("mlx_mtp.ranks.messages", name)
            for name in ("Step.count", "Request", "__getattribute__")
        ),
    ],
    ids=str,
)
def test_a_pickle_brings_nothing_but_messages(where):
    """Attributes of messages that lead to other code are refused, too."""
    names = b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in where)
    with pytest.raises(pickle.UnpicklingError, match="is no message"):
        links._Loader(io.BytesIO(b"\x80\x04" + names + b"\x93.")).load()
    assert links._Loader(io.BytesIO(pickle.dumps(Compare()))).load() == Compare()
