"""`mlx-mtp models`, its table of sizes, and what short names mean."""

import re
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.cli import main as cli
from mlx_mtp.errors import UsageError
from mlx_mtp.inspect.choose import choose_model
from mlx_mtp.inspect.models import published
from mlx_mtp.models.hub import download_model
from mlx_mtp.models.loader import family_of
from mlx_mtp.models.model import module_nbytes
from mlx_mtp.models.published import (
    BITS,
    GROUP_SIZE,
    RELEASES,
    SHAPES,
    SIZES,
    PublishedQuant,
    PublishedSizes,
    releases_named,
    source_of,
)
from tests.support.fake_hub import FakeHub

# Sizes in GB from public pages and programs: the weights, in 8 or 4 bits, and heads in BF16.
KNOWN = {("Qwen3-Next-80B-A3B-Thinking", 4): 44.8, ("Qwen3-Next-80B-A3B-Instruct", 8): 84.7}
KNOWN |= {("Qwen3.5-122B-A10B", 8): 130, ("Qwen3.5-397B-A17B", 8): 422}
KNOWN_HEADS = {"Qwen3.8-27B": 810 * 2**20 / 1e9, "Qwen3-Next-80B-A3B-Instruct": 3.3}


def test_sizes_are_those_of_what_is_published():
    sizes = {each: published(each) for each in RELEASES}
    for release, size in KNOWN.items():
        assert sizes[release].footprint.weights / 1e9 == pytest.approx(size, rel=0.005)
    for name, size in KNOWN_HEADS.items():
        assert sizes[name, 4].head_download / 1e9 == pytest.approx(size, rel=0.02)
    for (name, bits), each in sizes.items():
        billions = float(re.search(r"-([0-9.]+)B", name)[1])
        # Scales add about half a bit to `bits`.
        assert each.footprint.weights / 1e9 == pytest.approx(billions * (bits + 0.5) / 8, rel=0.15)
        assert source_of(each.release.repo_id) == f"Qwen/{name}"


def computed_sizes(name: str) -> tuple[PublishedSizes, list]:
    """Returns the sizes of a model and its head, computed without weights, and its layer specs."""
    config, parts = SHAPES[name], {}
    for bits in BITS:
        family = family_of(config, name)
        model_class, args_class = family.classes(config)
        model = model_class(args_class.from_dict(config))
        args = family.causal_lm(model).args
        head = family.make_head(args, moe=getattr(args, "num_experts", 0) > 0)

        def quantization(path: str, child: nn.Module, bits: int = bits) -> bool | dict[str, int]:
            if not hasattr(child, "to_quantized"):
                return False
            router = path.endswith(("mlp.gate", "shared_expert_gate"))  # as mlx-lm converts routers
            return {"group_size": GROUP_SIZE, "bits": 8 if router else bits}

        # mlx allocates arrays only when they are evaluated, and these never are.
        head.set_dtype(mx.bfloat16)
        in_bf16 = module_nbytes(head)
        model.set_dtype(mx.bfloat16)
        for module in (model, head):
            nn.quantize(module, class_predicate=quantization)
        parts[bits] = module_nbytes(model), module_nbytes(head)
    weights, heads = ({bits: part[i] for bits, part in parts.items()} for i in (0, 1))
    return PublishedSizes(in_bf16, weights, heads), family.layer_specs(args)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("Qwen3.5-0.8B", "Qwen3.6-35B-A3B") else pytest.mark.full)
        for n in SHAPES
    ],
)
def test_the_table_of_sizes_is_computed_from_the_shapes(name):
    sizes, layers = computed_sizes(name)
    assert sizes == SIZES[name]
    assert layers == list(published(PublishedQuant(name, 4)).footprint.caches.layers)


@pytest.mark.parametrize(
    ("memory", "largest", "smallest_missing"),
    [("16GB", "Qwen3.5-9B-8bit", "27B"), ("64", "Qwen3-Next-80B-A3B-Thinking-4bit", "122B")],
)
def test_what_fits_by_the_names_that_can_be_typed(memory, largest, smallest_missing, capsys):
    assert cli.main(["models", "--memory", memory], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 80
    found = [match[1] for line in lines if (match := re.match(r"(Qwen\S+-[48]bit) ", line))]
    assert found[-1] == largest and all(len(releases_named(each)) == 1 for each in found)
    too_large = " ".join(lines).partition("Too large: ")[2]
    assert too_large.partition("-")[2].startswith(smallest_missing)


def test_the_listing_imports_nothing_heavy():
    """`models` takes 0.2 s beyond Python's start; importing mlx-lm would take much longer."""
    code = (
        "import sys; from mlx_mtp.cli.main import main; main(['models']); "
        "print({'mlx_lm', 'transformers', 'huggingface_hub', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


NAMES = {
    "qwen3.6-35b": ["Qwen3.6-35B-A3B-8bit", "Qwen3.6-35B-A3B-4bit"],
    "Qwen3.6:35B": ["Qwen3.6-35B-A3B-8bit", "Qwen3.6-35B-A3B-4bit"],
    "Qwen3.6-35B-A3B": ["Qwen3.6-35B-A3B-8bit", "Qwen3.6-35B-A3B-4bit"],
    "qwen3.6:35b-a3b-4BIT": ["Qwen3.6-35B-A3B-4bit"],
    "Qwen3.5-9B-MLX-8bit": ["Qwen3.5-9B-8bit"],
    "qwen3-next-4bit": ["Qwen3-Next-80B-A3B-Instruct-4bit"],
    "qwen3-next:80b-8bit": ["Qwen3-Next-80B-A3B-Instruct-8bit"],
    "qwen3-next-thinking-4bit": ["Qwen3-Next-80B-A3B-Thinking-4bit"],
    "qwen3.6-4bit": ["Qwen3.6-35B-A3B-4bit", "Qwen3.6-27B-4bit"],
    "qwen3.6-35b-6bit": [],
    "qwen3.6-": [],
    "qwen3": [],
    "": [],
}


def test_short_names():
    assert {name: [*map(str, releases_named(name))] for name in NAMES} == NAMES
    assert releases_named("auto") == list(RELEASES)
    for each in RELEASES:  # as `models` prints them
        assert releases_named(str(each)) == [each]


GIB = 1 << 30
A35, A27 = "mlx-community/Qwen3.6-35B-A3B", "mlx-community/Qwen3.8-27B"


@pytest.fixture
def hub(tmp_path):
    """A hub without models."""
    with FakeHub("x/y", {}).serve_here(tmp_path / "hub") as hub:
        yield hub


@pytest.mark.parametrize(
    ("name", "gib", "sizes", "chosen"),
    [
        # Sizes of repositories on the hub in GB; it has no repositories but these.
        ("qwen3.6-35b", 48, {f"{A35}-8bit": 37.9, f"{A35}-4bit": 20.4}, f"{A35}-8bit"),
        ("qwen3.6-35b", 48, {f"{A35}-8bit": 48.9, f"{A35}-4bit": 20.4}, f"{A35}-4bit"),
        ("qwen3.6-35b", 48, {f"{A35}-4bit": 20.4}, f"{A35}-4bit"),
        ("qwen3.6-35b", 24, {f"{A35}-8bit": 37.9, f"{A35}-4bit": 20.4}, f"{A35}-4bit"),
        ("auto", 24, {f"{A35}-4bit": 25.0, f"{A27}-4bit": 16.0}, f"{A27}-4bit"),
        ("qwen3.6-35b-8bit", 24, {}, "8bit takes 36.8 GB"),
        ("qwen3.6-35b", 48, {}, f"none of these .*: {A35}-8bit, {A35}-4bit"),
        ("qwn3.6-35b", 48, {}, r"Names like it: qwen3\.6-35b, .*models"),
    ],
)
def test_the_release_that_fits_is_chosen(hub, monkeypatch, capsys, name, gib, sizes, chosen):
    monkeypatch.setattr("mlx_mtp.models.hub._listed", lambda repo, _: _files(hub, sizes, repo))
    if not chosen.startswith("mlx-community"):
        with pytest.raises(UsageError, match=chosen):
            choose_model(name, gib * GIB)
        return
    assert choose_model(name, gib * GIB) == chosen
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        chosen in line
        and f"{sizes[chosen]} GB" in line
        and f"the best of {name!r} that fits" in line
    )


def _files(hub, sizes, repo):
    from huggingface_hub import HfApi

    if repo not in sizes:
        return list(HfApi().list_repo_tree(repo))  # raises an error: not found
    return [
        SimpleNamespace(path="model-00001-of-00001.safetensors", size=int(sizes[repo] * 1e9)),
        SimpleNamespace(path="tokenizer.json", size=10**12),
    ]


def test_what_is_here_is_chosen_without_the_hub(tmp_path, monkeypatch, capsys):
    assert choose_model(None) is None
    assert [choose_model(name) for name in ("org/model", "./qwen", "~/x")] == [
        *("org/model", "./qwen", "~/x")
    ]
    monkeypatch.chdir(tmp_path)
    files = {"config.json": b"{}", "model.safetensors": b"x" * 1000, "README.md": b""}
    with FakeHub(f"{A35}-4bit", files).serve_here(tmp_path / "hub") as hub:
        download_model(hub.repo_id)
        hub.num_requests = 0
        # The cached 4-bit model is chosen, although 8 bits would fit.
        assert choose_model("qwen3.6-35b", 100 * GIB) == hub.repo_id
        assert hub.num_requests == 0 and "in the cache" in capsys.readouterr().err
    (tmp_path / "qwen3.6-35b").mkdir()
    assert choose_model("qwen3.6-35b", 100 * GIB) == "qwen3.6-35b"
    monkeypatch.setenv("MLX_RANK", "0")
    with pytest.raises(UsageError, match="each rank"):
        choose_model("auto")


def test_without_the_hub_the_table_decides(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert choose_model("qwen3.6-35b", 48 * GIB) == f"{A35}-8bit"
    assert "36.8 GB" in capsys.readouterr().err
