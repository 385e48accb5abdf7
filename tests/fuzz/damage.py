"""Good model directories and their damage: a table of cases, and random changes."""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from mlx_mtp import backend
from tests.support.tiny_models import FAMILIES, Layout, write_checkpoint

DEMO = Path(backend.__file__).parent / "demo"
VOCAB = 4096  # tokens in the bundled tokenizer's vocabulary
SECRET = "the content of a file that is not the model's"
Change = Callable[[Path], None]

NUMBERS: list[Any] = [0, -1, 1, 2, 3, 17, 10**5, 10**9, 2**31, 2**63, 10**30, 1.5, 1e308, 1e-30]
OTHERS: list[Any] = ["x", "", None, True, False, [], {}, [1], {"a": 1}, ["x"] * 3, "\ud800"]
OTHERS += [float("nan"), float("inf"), "a" * 10**5, [[]], {"type": "x"}, [None]]


def good_directory(path: Path, family: str) -> None:
    """Write a tiny model that can be served, with every kind of file that a model can have."""
    write_checkpoint(path, Layout(family, vocab=VOCAB))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEMO / name, path / name)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "chat_template.jinja").write_text(config.pop("chat_template"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))


# Modules that libraries try to import and that are not installed here.
ABSENT = ("sitecustomize", "usercustomize", "torch", "tensorflow", "jax", "orjson", "ujson")
ABSENT += ("sentencepiece", "tiktoken", "PIL", "dotenv", "colorama")


def add_python_files(path: Path, marker: Path) -> None:
    """Write a file named after each module, which appends its path to `marker` when it is run."""
    code = f"open({str(marker)!r}, 'a').write(__file__ + chr(10))\n"
    for name in {*sys.stdlib_module_names, *packages_distributions(), *ABSENT}:
        if name.isidentifier() and name != "mlx_mtp":
            (path / f"{name}.py").write_text(code)
    (path / "mlx_mtp").mkdir()
    (path / "mlx_mtp" / "__init__.py").write_text(code)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))


def config(**values: Any) -> Change:
    def change(path: Path) -> None:
        edit(path / "config.json", lambda c: c.get("text_config", c).update(values))

    return change


def linked(name: str, target: str) -> Change:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return change


def fifo(name: str) -> Change:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return change


def tokenizer_config(**values: Any) -> Change:
    return lambda path: edit(path / "tokenizer_config.json", lambda c: c.update(values))


def template_in_config(template: Any) -> Change:
    def change(path: Path) -> None:
        (path / "chat_template.jinja").unlink()
        tokenizer_config(chat_template=template)(path)

    return change


def header(change: Callable[[dict[str, Any]], Any], name: str = "model.safetensors") -> Change:
    """Returns a change of a safetensors file's header; a string is written unchanged."""

    def run(path: Path) -> None:
        content = (path / name).read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        changed = change(entries)
        text = (changed if isinstance(changed, str) else json.dumps(entries)).encode()
        (path / name).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return run


def _tensors(entries: dict[str, Any]) -> list[str]:
    return [name for name in entries if name != "__metadata__"]


def _overlap(entries: dict[str, Any]) -> None:
    one, other, *_ = (n for n in _tensors(entries) if n.endswith("layernorm.weight"))
    entries[other]["data_offsets"] = entries[one]["data_offsets"]


def _duplicate(entries: dict[str, Any]) -> str:
    name = _tensors(entries)[0]
    return json.dumps(entries)[:-1] + f", {json.dumps(name)}: {json.dumps(entries[name])}}}"


def _many_tokens(path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        like = content["added_tokens"][-1]
        content["added_tokens"] += [
            {**like, "id": VOCAB + n, "content": f"<extra_{n}>"} for n in range(300_000)
        ]

    edit(path / "tokenizer.json", change)


def _twice(path: Path) -> None:
    shutil.copyfile(path / "model.safetensors", path / "model-2.safetensors")


def _one_of_two_files(path: Path) -> None:
    # Only the header changes, so that the index's second file alone would have these tensors.
    def rename(entries: dict[str, Any]) -> str:
        return json.dumps(entries).replace("layers.3.", "layers.9.")

    header(rename)(path)
    index = {"weight_map": {"model.layers.3.mlp.gate.weight": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _nan(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    begin, end = next(
        entries[name]["data_offsets"]
        for name in entries
        if name.endswith("layers.1.mlp.gate.weight")
    )
    content[8 + length + begin : 8 + length + end] = b"\xff\xff\xff\x7f" * ((end - begin) // 4)
    file.write_bytes(content)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 128
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 128}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SERVED = "served"
# The change of a good directory, and a word of the error.
CASES: dict[str, tuple[Change, str]] = {
    "nothing": (lambda path: None, SERVED),
    "yarn": (config(rope_scaling=YARN), SERVED),
    "llama3": (config(rope_scaling=LLAMA3), SERVED),
    "longrope": (config(rope_scaling=LONG), SERVED),
    "proportional": (config(rope_scaling={"rope_type": "proportional"}), SERVED),
    "dynamic": (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope"),
    "rope is text": (config(rope_scaling="x"), "has no attribute"),
    "theta is text": (config(rope_theta="x"), "rope"),
    "theta is 0": (config(rope_theta=0), "rope"),
    "more experts than there are": (config(num_experts_per_tok=17), "num_experts_per_tok"),
    "NaN weights": (_nan, "not finite"),
    "10^5 layers": (config(num_hidden_layers=10**5), "num_hidden_layers"),
    "10^9 layers": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "6 layers": (config(num_hidden_layers=6), "num_hidden_layers"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers"),
    "zero heads": (config(num_attention_heads=0), "num_attention_heads"),
    "huge heads": (config(head_dim=10**9), "head_dim"),
    "huge vocabulary": (config(vocab_size=10**12), "vocab_size"),
    "10^9 experts": (config(num_experts=10**9), "num_experts"),
    "no interval": (config(full_attention_interval=0), "full_attention_interval"),
    "FIFO as config": (fifo("config.json"), "not a regular file"),
    "FIFO as shard": (fifo("model-00009.safetensors"), "not a regular file"),
    "FIFO as sidecar": (fifo("mtp.safetensors"), "not a regular file"),
    "FIFO as tokenizer": (fifo("tokenizer.json"), "not a regular file"),
    "FIFO as index": (fifo("model.safetensors.index.json"), "not a regular file"),
    "zeros as config": (linked("config.json", "/dev/zero"), "not a regular file"),
    "zeros as tokenizer": (linked("tokenizer.json", "/dev/zero"), "not a regular file"),
    "zeros as weights": (linked("model.safetensors", "/dev/zero"), "not a regular file"),
    "zeros as template": (linked("chat_template.jinja", "/dev/zero"), "not a regular file"),
    "dangling": (linked("generation_config.json", "nowhere"), "leads nowhere"),
    "loop": (linked("model-2.safetensors", "model-2.safetensors"), "leads nowhere"),
    "directory": (lambda path: (path / "vocab.json").mkdir(), "not a regular file"),
    "other file as template": (linked("chat_template.jinja", "../secret"), "another name"),
    "huge config": (lambda path: _grow(path / "config.json", 1 << 26), "bytes"),
    "huge template": (lambda path: _grow(path / "chat_template.jinja", 1 << 26), "bytes"),
    "template is a number": (template_in_config(5), "chat_template"),
    "templates are numbers": (
        template_in_config([{"name": "default", "template": 5}]),
        "chat_temp",
    ),
    "template ends too early": (template_in_config("{% if tools %}"), "chat template is wrong"),
    "null as size": (config(moe_intermediate_size=None), "moe_intermediate_size is None"),
    "300,000 added tokens": (_many_tokens, "added tokens"),
    "overlap": (header(_overlap), "damaged"),
    "duplicate": (header(_duplicate), "twice"),
    "duplicate in another file": (_twice, "twice"),
    "one of two files": (_one_of_two_files, "lacks model-2.safetensors"),
}


def _grow(path: Path, size: int) -> None:
    with path.open("a") as file:
        file.write(" " * size)


def random_change(chance: random.Random) -> tuple[str, Change]:
    """Returns the name of a random change, and the change."""
    kind = chance.choice(("value", "value", "size", "size", "file", "bytes", "header", "header"))
    seed = chance.getrandbits(32)

    def run(path: Path) -> None:
        own = random.Random(seed)
        {
            "value": _change_value,
            "size": _change_size,
            "file": _change_file,
            "bytes": _change_bytes,
            "header": _change_header,
        }[kind](path, own)

    return f"{kind} {seed}", run


def _own_files(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_file() and not each.is_symlink())


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(inner)


def _change_value(path: Path, chance: random.Random) -> None:
    def change(content: Any) -> None:
        holder, key = chance.choice(list(_places(content)))
        if chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = chance.choice(NUMBERS + OTHERS)

    edit(chance.choice([p for p in _own_files(path) if p.suffix == ".json"]), change)


def _change_size(path: Path, chance: random.Random) -> None:
    def change(content: dict[str, Any]) -> None:
        inner = content.get("text_config", content)
        inner[chance.choice(sorted(inner))] = chance.choice(NUMBERS + OTHERS)

    edit(path / "config.json", change)


def _change_file(path: Path, chance: random.Random) -> None:
    names = [p.name for p in path.iterdir()]
    names += ["mtp.safetensors", "model-2.safetensors", "special_tokens_map.json", "merges.txt"]
    names += ["model.safetensors.index.json", "mtp.safetensors.index.json", "added_tokens.json"]
    file = path / chance.choice(names)
    old = file.read_bytes() if file.exists() else b""
    file.unlink(missing_ok=True)
    kind = chance.randrange(8)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to(chance.choice(["nowhere", file.name, "/dev/zero", "/dev/null", ".", "/"]))
    elif kind == 3:
        file.symlink_to(path.parent / "secret")
    elif kind == 4:
        file.write_bytes(chance.choice([b"", b"{}", b"[]", b"null", b"\xff", b"[" * 10**5, b"7"]))
    elif kind == 5:
        shutil.copyfile(chance.choice(_own_files(path)), file)
    elif kind == 6:
        file.write_bytes(old[: chance.randrange(len(old) + 1)])


def _change_bytes(path: Path, chance: random.Random) -> None:
    file = chance.choice(_own_files(path))
    content = bytearray(file.read_bytes())
    for _ in range(chance.randint(1, 4)):
        start = min(int(chance.expovariate(1 / 2000)), len(content))
        end = start + chance.choice([0, 1, 1, 2, 10, 100])
        new = [b"", b"[", b"}", b'"', b"\xff", b"\0", b"0" * 400, b"9", b"[" * 300, b"NaN"]
        content[start:end] = chance.choice(new)
    file.write_bytes(content)


def _change_header(path: Path, chance: random.Random) -> None:
    def change(entries: dict[str, Any]) -> str | None:
        name, other = chance.sample(_tensors(entries), 2)
        kind = chance.randrange(8)
        if kind == 0:
            entries[name]["shape"] = chance.choice([[], [0], [-1, 2], [2**40, 2**40], ["x"], None])
        elif kind == 1:
            entries[name]["shape"] = entries[name]["shape"][::-1] + chance.choice([[], [1]])
        elif kind == 2:
            entries[name]["dtype"] = chance.choice(["F64", "F16", "BOOL", "I32", "x", 5, None])
        elif kind == 3:
            entries[name]["data_offsets"] = chance.choice([[0, 0], [8, 4], [-4, 4], [0, 2**63], []])
        elif kind == 4:
            entries[name]["data_offsets"] = entries[other]["data_offsets"]
        elif kind == 5:
            entries[name] = chance.choice([entries[other], None, [], 5])
        elif kind == 6:
            entries[other + chance.choice(["", "x", ".weight"])] = entries.pop(name)
        else:
            return _duplicate(entries)
        return None

    header(change, chance.choice([p for p in _own_files(path) if p.suffix == ".safetensors"]).name)(
        path
    )


def random_cases(seed: int) -> Iterator[tuple[str, str, Change, None]]:
    """Yields cases without end: good directories of every family with one to three changes."""
    chance = random.Random(seed)
    while True:
        changes = [random_change(chance) for _ in range(chance.choice([1, 1, 2, 3]))]

        def all_of(path: Path, changes: list[tuple[str, Change]] = changes) -> None:
            for _, change in changes:
                change(path)

        yield chance.choice(FAMILIES), ", ".join(name for name, _ in changes), all_of, None
