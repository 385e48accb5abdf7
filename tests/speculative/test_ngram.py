"""N-gram drafts: the index compared with a slow search, offered runs, the memory of answers."""

import random

import pytest

from mlx_mtp.config import MAX_RUN
from mlx_mtp.speculative.ngram import GRAM, MOST_MATCH, OBJECTS, NgramIndex, NgramSource

FILE = random.Random(1).sample(range(10, 5000), 200)


def slow(text: list[int]) -> int:
    """Returns the length of the longest end of a text that occurred in it before."""
    lengths = [0]
    for place in range(1, len(text)):
        length = 0
        while length < min(place, MOST_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        lengths.append(length)
    return max(lengths) if max(lengths) >= GRAM else 0


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_match_is_found_however_the_text_came(seed):
    chance = random.Random(seed)
    text = [chance.randrange(chance.choice([20, 100])) for _ in range(chance.randint(1, 400))]
    text += text[5:25] if seed % 2 else []
    index, at = NgramIndex(text[: chance.randint(0, len(text))]), 0
    at = len(index.tokens)
    while at < len(text):
        index.extend(text[at : at + chance.randint(1, 7)])
        at = len(index.tokens)
    length, place = index.find(index.tokens)
    assert length == slow(text)
    assert text[place - length : place] == text[len(text) - length :]
    # An index built at once finds the same, within the memory that the formula gives.
    assert NgramIndex(text).find(index.tokens) == (length, place)
    assert index.nbytes <= OBJECTS + 4 * (2 * len(text) + max(2 * len(text), 256))


@pytest.mark.parametrize("seed", range(20))
def test_the_choices_of_a_prompt_share_its_index_while_one_of_them_is_left(seed, monkeypatch):
    """A choice's matches are those of its prompt and answer as one text."""
    chance, source, built, build = random.Random(seed), NgramSource(0), [], NgramIndex._build
    prompt = tuple(chance.randrange(30) for _ in range(chance.choice([1, 100, 127, 128, 700])))
    monkeypatch.setattr(
        NgramIndex, "_build", lambda self: (built.append(len(self.tokens)), build(self))
    )
    drafters = [(source.drafter(prompt, "salt"), [*prompt]) for _ in range(3)]
    assert built.count(len(prompt)) == (len(prompt) > 256)
    while drafters:
        for drafter, text in drafters:
            at = chance.randrange(len(text))
            tokens = [*text[at : at + chance.randrange(12)], chance.randrange(30)]
            text += tokens
            drafter.extend(tokens)
            drafter._look()
            assert drafter.match == slow(text) or slow(text) > drafter.match >= 16
            before = drafter._source.tokens[: drafter._at].tolist()
            assert before[len(before) - drafter.match :] == text[len(text) - drafter.match :]
        if chance.random() < 0.1:
            drafters.pop(chance.randrange(len(drafters)))
            drafter = None
    assert not source._prompts


def test_a_run_goes_on_while_it_is_right_and_is_looked_for_again_when_it_is_not():
    drafter = NgramSource(0).drafter(tuple(FILE), None)
    drafter.extend(FILE[20:24])
    assert (drafter.match, list(drafter.next_run)) == (4, FILE[24:57])
    drafter.extend(FILE[24:40])
    assert (drafter.match, list(drafter.next_run)) == (20, FILE[40:73])
    certain = drafter.cumulative_acceptance(0)
    assert len(certain) == 16 and certain[15] > 0.5
    drafter.extend([9999])
    assert (drafter.match, list(drafter.next_run), drafter.cumulative_acceptance(0)) == (0, [], [])
    drafter.extend(FILE[42:46])
    assert list(drafter.next_run) == FILE[46:79]
    for number in range(60):  # Short matches with wrong drafts are soon no longer offered.
        drafter.extend([6000 + number, *FILE[70:73]])
    assert drafter.match == 3
    assert drafter.cumulative_acceptance(0) == []


def test_wrong_copies_of_earlier_answers_do_not_count_against_copies_of_the_prompt():
    source = NgramSource(1 << 20)
    source.keep(None, FILE)
    for number in range(40):
        drafter = source.drafter((1, 2, 3), None)
        drafter.extend(FILE[number : number + 3])
        assert drafter.of_others
        drafter.extend([9999])
    first, acceptance = [], []
    for prompt in ((1, 2, 3), FILE):  # in new requests
        drafter = source.drafter(tuple(prompt), None)
        drafter.extend(FILE[50:53])
        first.append(drafter.next_run[0])
        acceptance.append(drafter.cumulative_acceptance(0))
    assert first == [FILE[53]] * 2
    assert acceptance[0] == [] and len(acceptance[1]) == 16


@pytest.mark.parametrize("cycle", [[7], [7, 8], [7, 8, 9], FILE[:15]])
def test_a_run_goes_on_behind_the_end_of_the_text(cycle):
    text = (cycle * 120)[:120]
    drafter = NgramSource(0).drafter(tuple(text[:9]), None)
    at = 9
    for count in (1, 3, 17, 5, 2, 16, 30):
        drafter.extend(text[at : at + count])
        at += count
    assert list(drafter.next_run) == text[at : at + MAX_RUN]


def test_a_long_answer_is_added_to_earlier_ones_without_indexing_them_again(monkeypatch):
    source, built, build = NgramSource(1 << 20), [], NgramIndex._build
    monkeypatch.setattr(
        NgramIndex, "_build", lambda self: (built.append(len(self.tokens)), build(self))
    )
    for number in range(40):
        source.keep(None, [1000 * number + n for n in range(300)])
    assert len(built) <= 10  # only when the table of entries grows
    drafter = source.drafter((1, 2, 3), None)
    drafter.extend([25_100, 25_101, 25_102])
    assert list(drafter.next_run) == [25_103 + n for n in range(MAX_RUN)]


def test_earlier_answers_under_the_same_salt_are_copied_within_their_memory():
    source = NgramSource(1 << 14)
    source.keep("a", FILE[:100])
    source.keep("b", FILE[100:])

    def run(salt: str, *tokens: int) -> list[int]:
        drafter = source.drafter((1, 2, 3), salt)
        drafter.extend(tokens)
        return list(drafter.next_run)

    assert run("a", *FILE[10:14]) == FILE[14 : 14 + MAX_RUN]
    assert run("a", *FILE[92:96]) == FILE[96:100]  # up to the answer's end
    assert run("b", *FILE[10:14]) == run("c", *FILE[10:14]) == []
    for number in range(60):
        source.keep("a", [1000 * number + n for n in range(120)])
        source.keep(number, FILE[:5])
        assert source.nbytes == sum(text.nbytes for text in source._texts.values()) <= 1 << 14
    assert run("a", 59_010, 59_011, 59_012)[0] == 59_013
    assert run("a", *FILE[10:14]) == []
    oldest, newer, *_ = source._texts
    source.drafter((1, 2, 3), oldest)  # The least recently used salt is dropped, not this one.
    while newer in source._texts:
        number += 1
        source.keep(number, FILE[:5])
    assert oldest in source._texts
    source.keep("a", range(59_000, 59_100))
    source.clear()
    assert source.nbytes == 0
    assert run("a", 59_010, 59_011, 59_012) == []
    nothing = NgramSource(0)
    nothing.keep("a", FILE)
    assert nothing.nbytes == 0
