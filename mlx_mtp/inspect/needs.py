"""What models need, for the parent process, which has no mlx and runs this module in a child.

The argument is JSON with `memory_limit`, the value of --memory-limit, and `names` or `models`.

`names` are short names of models (`chosen_models`); the output is a line of JSON with the hub ids
that they stand for. `models` (`planned`) are objects with `source`, a directory, a hub id or None,
and the values of --dtype, --enable-mtp, --max-model-len, --prefill-step-size and
--prefix-cache-size. The first line of the output then has `limit` and `source`, the memory of this
machine; each later line has one model's needs, and its index in `models` as `model`.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from fnmatch import fnmatch
from typing import Any

from mlx_mtp import backend
from mlx_mtp.console import say
from mlx_mtp.errors import MlxMtpError, UsageError
from mlx_mtp.safe_path import command_of

_MODULE = "mlx_mtp.inspect.needs"
USEFUL_TOKENS = 16_384
"""A model is loaded only into memory that suffices for a request of this number of tokens."""


def cached_models() -> list[str]:
    """Returns the hub ids of the models in the Hugging Face cache that have weights."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with contextlib.suppress(CacheNotFound):
        repos = [each for each in scan_cache_dir().repos if each.repo_type == "model"]
        return sorted(each.repo_id for each in repos if any(map(_has_weights, each.revisions)))
    return []


def _has_weights(revision: Any) -> bool:
    names = {file.file_name for file in revision.files}
    return "config.json" in names and any(fnmatch(n, "model*.safetensors") for n in names)


def chosen_models(names: Sequence[str], memory: int | None) -> list[str]:
    """Returns the hub ids that short names stand for (`choose_model`); raises UsageError.

    `memory` is the value of --memory-limit, in bytes.
    """
    done = subprocess.run(
        [*command_of(_MODULE), json.dumps({"names": names, "memory_limit": memory})],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd="/",
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise UsageError(f"{', '.join(names)}: what it stands for can't be found out.") from None
    if "refusal" in found:
        raise UsageError(found["refusal"])
    return [*found["chosen"]]


async def planned(models: Sequence[dict[str, Any]], memory: int | None) -> AsyncIterator[Any]:
    """Yields the lines for `models`. Raises OSError if the process can't be started.

    `memory` is the value of --memory-limit, in bytes.
    """
    process = await asyncio.create_subprocess_exec(
        *command_of(_MODULE),
        json.dumps({"models": models, "memory_limit": memory}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            yield json.loads(line)
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def tell_needs(arguments: str) -> None:
    """Print what names stand for, or the limit and then a line for each model as it is known."""
    options = json.loads(arguments)
    backend.prepare()
    if "names" in options:
        _show(_choice(options["names"], options["memory_limit"]))
        return
    from mlx_mtp.machine import memory_limit

    limit = memory_limit(options["memory_limit"])
    _show({"limit": limit.nbytes, "source": limit.source})
    for number, model in enumerate(options["models"]):
        try:
            found = _need(model["source"], model)
        except MlxMtpError as error:
            found = {"refusal": str(error)}
        _show({"model": number} | found)


def _choice(names: list[str], memory: int | None) -> dict[str, Any]:
    from mlx_mtp.inspect.choose import choose_model

    try:
        return {"chosen": [choose_model(name, memory) for name in names]}
    except MlxMtpError as error:
        return {"refusal": str(error)}


def _need(name: str | None, options: dict[str, Any]) -> dict[str, Any]:
    from mlx_mtp.engine.memory import least_memory
    from mlx_mtp.inspect.embeddings import embedding_need
    from mlx_mtp.inspect.found import find_model
    from mlx_mtp.inspect.memory import memory_demand
    from mlx_mtp.text.parsing.formats import OutputFormat
    from mlx_mtp.text.tokenizer import Tokenizer

    if (need := embedding_need(name, options["dtype"], options["max_model_len"])) is not None:
        return need
    model = find_model(name)
    enable_mtp = options["enable_mtp"] is not False
    demand = memory_demand(model, options["dtype"], enable_mtp=enable_mtp)
    if demand.refusal is not None:
        return {"refusal": demand.refusal}
    tokens = min(demand.allowed, options["max_model_len"] or USEFUL_TOKENS)
    able = ["completion"]
    if model.directory is not None:
        form = OutputFormat.of_template(Tokenizer.load(model.directory).template, "auto", "auto")
        offered = {"tools": form.tools, "thinking": form.reasoning}
        able += [name for name, kind in offered.items() if kind != "none"]
    return {
        "refusal": None,
        "nbytes": least_memory(
            demand.footprint, tokens, options["prefill_step_size"], options["prefix_cache_size"]
        ),
        "weights": model.trunk[0] + enable_mtp * model.head_bytes,
        "context": min(demand.allowed, options["max_model_len"] or demand.allowed),
        "kind": model.target.config["model_type"],
        "able": able,
    }


def _show(fields: dict[str, Any]) -> None:
    say(json.dumps(fields))


if __name__ == "__main__":
    tell_needs(sys.argv[1])
