"""`mlx-mtp models`: what the table of published models says, and what it says to type."""

import re

import pytest

from mlx_mtp.cli import main as cli
from mlx_mtp.inspect.models import published
from mlx_mtp.models.published import SHAPES, source_of

# In GB, as public pages and programs give them: the weights, in 8 and in 4 bits, and BF16 heads.
KNOWN = {("Qwen3-Next-80B-A3B-Thinking", 4): 44.8, ("Qwen3-Next-80B-A3B-Instruct", 8): 84.7}
KNOWN |= {("Qwen3.5-122B-A10B", 8): 130, ("Qwen3.5-397B-A17B", 8): 422}
KNOWN_HEADS = {"Qwen3.8-27B": 810 * 2**20 / 1e9, "Qwen3-Next-80B-A3B-Instruct": 3.3}


def test_sizes_are_those_of_what_is_published():
    sizes = {(each.release.name, each.release.bits): each for each in published()}
    for release, size in KNOWN.items():
        assert sizes[release].demand.footprint.weights / 1e9 == pytest.approx(size, rel=0.005)
    for name, size in KNOWN_HEADS.items():
        assert sizes[name, 4].head_download / 1e9 == pytest.approx(size, rel=0.02)
    for (name, bits), each in sizes.items():
        billions = float(re.search(r"-([0-9.]+)B", name)[1])
        # Half a bit more than `bits` for the scales.
        assert each.demand.footprint.weights / 1e9 == pytest.approx(
            billions * (bits + 0.5) / 8, rel=0.15
        )
        assert source_of(each.release.repo_id) == f"Qwen/{name}"


@pytest.mark.parametrize(
    ("memory", "largest", "smallest_missing"),
    [("16GB", "Qwen3.5-9B-MLX-8bit", "27B"), ("64", "Qwen3-Next-80B-A3B-Thinking-4bit", "122B")],
)
def test_what_fits_and_its_commands(memory, largest, smallest_missing, capsys):
    assert cli.main(["models", "--memory", memory], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 80
    commands = [line.split() for line in lines if line.startswith("  mlx-mtp ")]
    found = [words[2].partition("/")[2] for words in commands[::2]]
    assert [words[1:] for words in commands[1::2]] == [["serve", w[2]] for w in commands[::2]]
    assert found[0] == "Qwen3.5-0.8B-MLX-4bit" and found[-1] == largest
    too_large = " ".join(lines).partition("Too large: ")[2]
    assert too_large.partition("-")[2].startswith(smallest_missing)
    shown = {line.split()[0] for line in lines if line.startswith("Qwen3") and "  " in line}
    assert shown <= SHAPES.keys()
    for words in commands:  # They are command lines of this program.
        cli._parser().parse_args(words[1:])
