"""Reads a model's small files and the headers of its weights: regular files of bounded size."""

import json
import stat
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mlx_mtp.bounded_json import DuplicateNameError, unique_names
from mlx_mtp.errors import CheckpointError, ModelError

# Maximum bytes of the files that this module, mlx-lm or transformers open, by the first pattern
# that matches.
LARGEST = {
    "*config.json": 16 << 20,
    "*token*.json": 64 << 20,  # A vocabulary of 250,000 tokens takes about 20 MB,
    "*.index.json": 64 << 20,  # as does an index of 60 layers with 512 experts each.
    "vocab.json": 64 << 20,
    "merges.txt": 64 << 20,
    "*.jinja": 1 << 20,
    "*.safetensors": 1 << 50,
}
WEIGHTS = "[!.]*.safetensors"
"""Pattern of a model's weights. It skips the files `._NAME` that macOS adds on some disks."""
_MOST_NAMES = 5  # names of tensors or files in a message
MAX_ADDED_TOKENS = 8192  # transformers adds them one by one
_SPECIAL = "additional_special_tokens"
_TEMPLATES = "additional_chat_templates"
_BLOBS = "blobs"  # the folder of the hub's cache
_ADDED: dict[str, tuple[str | None, ...]] = {  # keys of added tokens by file; None: the whole file
    "tokenizer.json": ("added_tokens",),
    "tokenizer_config.json": ("added_tokens_decoder", "extra_special_tokens", _SPECIAL),
    "special_tokens_map.json": (_SPECIAL,),
    "added_tokens.json": (None,),
}


def check_directory(path: Path) -> Path:
    """Check each file in a model's directory that will be opened, with `check_file`.

    Returns `path`; raises ModelError.
    """
    try:
        for file in sorted([*path.iterdir(), *(path / _TEMPLATES).glob("*.jinja")]):
            if _size_limit(file):
                check_file(file)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}.") from error
    return path


def check_file(path: Path) -> None:
    """Raise CheckpointError if a file is not regular, is too large, or links out of the model.

    Parts of templates and tokenizers end up in prompts and messages, so their links must lead to a
    file of the same name, or into the hub's cache. Weights are never shown; they can link anywhere.
    """
    try:
        status = path.stat()
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link that leads nowhere.") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file.")
    if status.st_size > (most := _size_limit(path)):
        raise CheckpointError(
            f"{path} has {status.st_size:,} bytes, but {most:,} at most are read."
        )
    if path.is_symlink() and path.suffix != ".safetensors":
        target = path.resolve()
        # In Nix's store a file's name begins with a hash.
        if not target.name.endswith(path.name) and target.parent.name != _BLOBS:
            raise CheckpointError(f"{path} is a link to a file of another name: {target}.")


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the JSON object in a file of a model's directory; `default` if there is no file.

    Raises ModelError if the file can't be read, or is missing without a default.
    """
    try:
        check_file(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if default is not None:
            return default
        message = f"{path.parent} has no {path.name}; it is not a model directory."
        raise ModelError(message) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return content


def read_index(path: Path) -> dict[str, str]:
    """Returns the file of each tensor in an index, without folders: it must not lead elsewhere.

    Raises ModelError if the index can't be read.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} can't be read: its weight_map is not a JSON object.")
    files = {key: Path(str(file)).name for key, file in weight_map.items()}
    for key, file in files.items():
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} names {file[:80]!r} for {key[:80]}; only safetensors files are read."
            )
    return files


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns the offset in bytes of a safetensors file's data, and its header.

    Raises CheckpointError if the file can't be read or is damaged.
    """
    size = 0
    try:
        check_file(path)
        size = path.stat().st_size
        # The library checks types, shapes and lengths, and that the tensors fill the file.
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return 8 + length, json.loads(file.read(length), object_pairs_hook=unique_names)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        fault: object = error
        if isinstance(error, DuplicateNameError):
            fault = f"its header has {error.name[:80]!r} twice"
        raise CheckpointError(
            f"{path} ({size:,} bytes) is truncated, damaged or not a safetensors file: "
            f"{fault}. Download it again."
        ) from error


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor in model*.safetensors, by name.

    Raises CheckpointError if a file is damaged, or if two tensors have the same name.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("model*.safetensors")):
        _, header = read_header(file)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in shapes:
                raise CheckpointError(
                    f"{file} has {name}, which another file has: it is there twice."
                )
            shapes[name] = tuple(entry["shape"])
    return shapes


def few_names(names: Sequence[str]) -> str:
    """Returns at most five of `names` on one line, and the number of the remaining ones."""
    shown = " ".join(", ".join(names[:_MOST_NAMES]).split())
    others = len(names) - _MOST_NAMES
    return f"{shown} and {others:,} others" if others > 0 else shown


def check_tokenizer(path: Path) -> None:
    """Raise ModelError for too many added tokens, or a chat template that is not a string."""
    for file, keys in _ADDED.items():
        content = read_json(path / file, default={})
        for added in (content if key is None else content.get(key) for key in keys):
            if isinstance(added, (list, dict)) and len(added) > MAX_ADDED_TOKENS:
                raise ModelError(
                    f"{path / file} has {len(added):,} added tokens; {MAX_ADDED_TOKENS:,} at most "
                    "are read."
                )
    template = read_json(path / "tokenizer_config.json", default={}).get("chat_template")
    several = template if isinstance(template, list) else [{"template": template or ""}]
    texts = [each.get("template") if isinstance(each, dict) else None for each in several]
    if not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{path / 'tokenizer_config.json'}: chat_template is not a text.")


def _size_limit(path: Path) -> int:
    # In lower case, as some file systems ignore case.
    name = path.name.lower()
    return next((size for pattern, size in LARGEST.items() if fnmatch(name, pattern)), 0)
