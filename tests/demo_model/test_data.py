"""Packed rows, shards, held-out questions, windows, and the bundled models' figures."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_model.acceptance import Windows, walk
from demo_model.chat import segments
from demo_model.dice import Dice
from demo_model.held_out import answer_text, questions
from demo_model.mixture import SMALL_TASKS, Settings, is_held_out
from demo_model.packing import GAP, OWN, Document, pack
from demo_model.report import disagreements, shortcomings, table
from demo_model.shards import ShardSettings, make_shard
from demo_model.tokenizer import END_ID, PAD_ID, load
from tests.conftest import DEMO, DENSE_DEMO


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


def test_a_shard_is_a_function_of_its_seed_and_number_and_trains_whole_answers():
    wanted = ShardSettings(3, Settings(max_tokens=1024), "hermes", 250, (256, 1024))
    rows, again, other = (make_shard(number, wanted) for number in (0, 0, 1))
    assert set(rows) == {256, 1024}
    for length, each in rows.items():
        assert (each.ids == again[length].ids).all()
        assert each.ids.shape != other[length].ids.shape or (each.ids != other[length].ids).any()
        assert (each.segments > 0).mean() > 0.85
        own = each.kinds == OWN
        assert 0.1 < own.mean() < 0.8
        # Every answer that is trained ends with the end token.
        last = own[:, :-1] & ~own[:, 1:]
        assert (each.ids[:, :-1][last] == END_ID).all()


def test_held_out_questions_are_held_out_and_judged_from_tokens():
    tokenizer = load()
    asked = questions(tokenizer, "hermes", 1, Settings(max_tokens=700))
    assert len(asked) > 40
    for question in asked:
        assert question.task in SMALL_TASKS or is_held_out(question.chat)
        assert len(question.prompt) <= 700
        said = segments(question.chat, "hermes")[-1][0]
        tokens = tokenizer.encode(said, add_special_tokens=False).ids
        assert question.right(answer_text(tokenizer, [*tokens, PAD_ID, 5]))
        assert not question.right(answer_text(tokenizer, tokens[:-1])), "it has not ended"


def test_windows_are_walked_as_an_engine_walks_them():
    # Prompt of 3 tokens, answer of 6: rows 2 to 7; row q is about token q + 2.
    hit = [False] * 9
    first, second, third = hit.copy(), hit.copy(), hit.copy()
    first[2] = second[3] = third[4] = True  # the first window is accepted whole: tokens 4, 5, 6
    first[6] = True  # the second has one draft right, which is the last token
    windows = walk([first, second, third], 2, 9)
    # The second window's other drafts stand behind the end, and say nothing.
    assert windows == Windows(2, [2, 1, 1], [2, 1, 1])
    assert (windows.tokens_per_step, windows.rates) == (3.0, [1.0, 1.0, 1.0])
    assert walk([hit, hit, hit], 2, 9) == Windows(5, [5, 0, 0], [0, 0, 0])


@pytest.mark.parametrize("directory", [DEMO, DENSE_DEMO], ids=["moe", "dense"])
def test_the_bundled_models_figures_agree_and_are_in_the_readme(directory):
    """The bundled model's also meet every goal."""
    found = json.loads((directory / "metrics.json").read_text())["evaluation"]
    assert disagreements(found["torch"], found["engine"]) == []
    assert table(found) in (directory / "README.md").read_text(encoding="utf-8")
    if directory == DEMO:
        assert shortcomings(found["torch"]) == shortcomings(found["engine"]) == []
        recall = found["engine"]["recall"]
        assert {"256", "3900"} <= recall.keys()
        assert all(share >= 0.95 for length, share in recall.items() if int(length) <= 3900)
