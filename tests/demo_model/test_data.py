"""Packed rows, shards, held-out questions, and the count of windows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_model.acceptance import Windows, walk
from demo_model.dice import Dice
from demo_model.evaluation import ALL, OPEN
from demo_model.held_out import answer_text, questions
from demo_model.mixture import SMALL_TASKS, Settings, is_held_out
from demo_model.packing import GAP, OWN, Document, pack
from demo_model.report import BEGIN, END, disagreements, put_into, shortcomings, table
from demo_model.shards import ShardSettings, make_shard
from demo_model.tokenizer import END_ID, PAD_ID, load


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(0, 9))
def test_rows_hold_every_document_once_and_whole(lengths, seed):
    documents = [Document([i] * n, [1 + i % 2] * n) for i, n in enumerate(lengths)]
    rows = pack(documents, 64, Dice(seed))
    found = []
    for ids, numbers, kinds in zip(rows.ids, rows.segments, rows.kinds):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], numbers, [0]])))
        assert all(b - a >= GAP for a, b in zip(edges[1::2], edges[2::2]))
        assert (ids[numbers == 0] == PAD_ID).all()
        assert (kinds[numbers == 0] == 0).all()
        for number in range(1, numbers.max() + 1):
            (name,) = set(ids[numbers == number].tolist())
            found.append((name, int((numbers == number).sum())))
    assert sorted(found) == sorted(enumerate(lengths))


@pytest.fixture(scope="module")
def shard():
    wanted = ShardSettings(3, Settings(max_tokens=1024), "hermes", 250, (256, 1024))
    return wanted, make_shard(0, wanted)


def test_a_shard_is_a_function_of_its_seed_and_number(shard):
    wanted, rows = shard
    again, other = make_shard(0, wanted), make_shard(1, wanted)
    for length, each in rows.items():
        assert (each.ids == again[length].ids).all()
        assert each.ids.shape != other[length].ids.shape or (each.ids != other[length].ids).any()


def test_rows_are_full_and_train_whole_answers(shard):
    _, rows = shard
    assert set(rows) == {256, 1024}
    for each in rows.values():
        assert (each.segments > 0).mean() > 0.85
        own = each.kinds == OWN
        assert 0.1 < own.mean() < 0.8
        # Every answer that is trained ends with the end token.
        last = own[:, :-1] & ~own[:, 1:]
        assert (each.ids[:, :-1][last] == END_ID).all()


@pytest.fixture(scope="module")
def asked():
    return questions(load(), "hermes", 1, Settings(max_tokens=700))


def test_held_out_questions_are_held_out(asked):
    assert len(asked) > 40
    for question in asked:
        assert question.task in SMALL_TASKS or is_held_out(question.chat)
        assert len(question.prompt) <= 700


def test_right_answers_are_judged_right_from_their_tokens(asked):
    tokenizer = load()
    from demo_model.chat import segments

    for question in asked:
        said = segments(question.chat, "hermes")[-1][0]
        tokens = tokenizer.encode(said, add_special_tokens=False).ids
        assert question.right(answer_text(tokenizer, [*tokens, PAD_ID, 5]))
        assert not question.right(answer_text(tokenizer, tokens[:-1])), "it has not ended"
        assert not question.right("nonsense<|im_end|>")


def test_windows_are_walked_as_an_engine_walks_them():
    # Prompt of 3 tokens, answer of 6: rows 2 to 7; row q is about token q + 2.
    hit = [False] * 9
    first, second, third = hit.copy(), hit.copy(), hit.copy()
    first[2] = second[3] = third[4] = True  # the first window is accepted whole: tokens 4, 5, 6
    first[6] = True  # the second has one draft right, which is the last token
    windows = walk([first, second, third], 2, 9)
    # The second window's other drafts stand behind the end, and say nothing.
    assert windows == Windows(2, [2, 1, 1], [2, 1, 1])
    assert windows.tokens_per_step == 3.0
    assert windows.rates == [1.0, 1.0, 1.0]
    assert walk([hit, hit, hit], 2, 9) == Windows(5, [5, 0, 0], [0, 0, 0])
    by_output = Windows()
    by_output.observe(3, 4)
    by_output.observe(1, 1)
    assert by_output == windows
    assert walk([hit, hit, hit], 2, 4) == Windows(), "the prefill alone gave the answer"


def figures(exact: float, rate: float, per_step: float) -> dict:
    one = {"depth_1": rate, "depth_2": rate - 0.05, "depth_3": rate - 0.1}
    one |= {"windows": 10, "tokens_per_step": per_step}
    row = {"count": 4, "exact": exact, "greedy": one, "sampled": one}
    return {"per_task": 4, "tasks": {"story": row, OPEN: row, ALL: row}, "recall": {"64": 1.0}}


def test_reports():
    good, worse = figures(0.99, 0.85, 3.0), figures(0.99, 0.81, 3.0)
    assert disagreements(good, good) == []
    assert len(disagreements(good, figures(0.99, 0.85, 3.2))) == 4
    assert [line.partition(":")[0] for line in disagreements(good, worse)] == [
        f"{group}, greedy, depth {depth}" for group in (OPEN, ALL) for depth in (1, 2, 3)
    ]
    assert shortcomings(good) == []
    assert "accepted at 0.960" in " ".join(shortcomings(figures(0.99, 0.96, 3.0)))
    assert len(shortcomings(figures(0.5, 0.85, 3.0))) == 2
    written = table({"engine": good, "torch": good})
    assert written.startswith("| task | exact (PyTorch) |")
    assert "(engine): 1.000 at 64." in written
    assert "0.850 0.800 0.750" in written
    assert put_into(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb"
