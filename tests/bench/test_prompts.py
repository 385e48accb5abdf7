from __future__ import annotations

import pytest

from mlx_mtp.bench.prompts import KINDS, PromptSource


@pytest.mark.parametrize("kind", ["story", "short"])
def test_no_prompt_comes_twice_even_where_the_words_run_out(kind):
    source = PromptSource(1)
    texts = [p.text for _ in range(5) for p in source.next(kind, 4096)]
    assert len(set(texts)) == len(texts)
    assert not any("(Number" in text for text in texts[:500])
    assert any("(Number" in text for text in texts) == (kind == "story")


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_repeats_them(kind):
    one, other = PromptSource(5), PromptSource(5)
    assert one.next(kind, 4) == other.next(kind, 4)
    assert one.next(kind, 4) == other.next(kind, 4)
    assert one.next(kind, 4) != PromptSource(6).next(kind, 4)


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("story", 10, 25), ("short", 8, 45), ("medium", 400, 450), ("long", 3000, 3050)],
)
def test_lengths_in_words(kind, low, high):
    for prompt in PromptSource(2).next(kind, 20):
        assert low <= len(prompt.text.split()) <= high


def test_short_prompts_are_of_varied_tasks_that_take_turns():
    source = PromptSource(3)
    first_words = [[p.text.split()[0] for p in source.next("short", 1)] for _ in range(8)]
    assert len({words[0] for words in first_words}) > 4
    stories = PromptSource(3).next("story", 8)
    assert {p.text.split(" about ")[0] for p in stories} == {"Write a short story"}


@pytest.mark.parametrize("kind", ["medium", "long"])
def test_texts_part_within_their_first_sentence(kind):
    texts = [p.text for p in PromptSource(4).next(kind, 10)]
    assert len({text[: text.index(".")] for text in texts}) == len(texts)
