"""The models on the command line of `serve`, and the command of each model's process."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from mlx_mtp.config import RouterConfig, flags_of
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import arguments_of
from mlx_mtp.inspect.needs import cached_models, chosen_models
from mlx_mtp.options import BUNDLED_NAME, SERVE_FLAGS, check_serve, is_short_name, model_name
from mlx_mtp.router.fleet import ServedModel
from mlx_mtp.safe_path import command_of
from mlx_mtp.settings import resolve

# Flags that are not copied to models' processes: the parent applies them, or sets them per model.
_OWN = {"model", "served_model_name", "memory_limit", "prefix_cache_dir", "prefix_cache_dir_size"}
_OWN |= {"host", "port", "api_key", "api_key_file", "allowed_host", "cors_origin", "page"}
_OWN |= {"log_format", "log_file", *(flag.key for flag in flags_of(RouterConfig))}


def wants_router(options: argparse.Namespace) -> bool:
    """Returns True if the flags of `serve` ask for processes of models; raises UsageError."""
    given = [f.name for f in flags_of(RouterConfig) if f.key in options.given]
    wanted = bool(options.models or options.all or "keep_alive" in options.given)
    if not wanted and (given := [name for name in given if name not in ("--all", "models")]):
        raise UsageError(f"{given[0]} is for several models, or for one with --keep-alive.")
    if wanted and "MLX_RANK" in os.environ:
        raise UsageError("mlx.launch is for one model: leave out the others, and --keep-alive.")
    return wanted


def shared_options(given: argparse.Namespace) -> argparse.Namespace:
    """Returns the options of the parent process, which has the address; raises UsageError.

    With several models, the settings file's tables of models apply only to the models' processes.
    """
    options = resolve(given, SERVE_FLAGS, given.environ)
    if options.models or options.all:
        model = options.model
        without = argparse.Namespace(**{k: v for k, v in vars(given).items() if k != "model"})
        flags = [flag for flag in SERVE_FLAGS if flag.key != "model"]
        options = resolve(without, flags, given.environ)
        options.model = model
    check_serve(options)
    return options


def model_options(given: argparse.Namespace, model: ServedModel) -> argparse.Namespace:
    """Returns the options of a model's process, from the model's own settings too.

    Raises UsageError.
    """
    values = {**vars(given), "model": model.given}
    options = resolve(argparse.Namespace(**values), SERVE_FLAGS, given.environ)
    check_serve(options)
    return options


def models_of_flags(options: argparse.Namespace, config: RouterConfig) -> list[ServedModel]:
    """Returns the models of a command line with their names; raises UsageError."""
    given = [*([options.model] if options.model else []), *options.models]
    if not given and not options.all:
        given = [BUNDLED_NAME]
    models = []
    for text in given:
        name, equals, source = text.partition("=")
        if not equals or "/" in name or os.path.isdir(text):
            name, source = "", text
        models.append(ServedModel(name, config.keep_alive, source=source, given=source))
    _find_sources(models, options.memory_limit)
    known = {model.source for model in models}
    for source in cached_models() if options.all else ():
        if source not in known:
            models.append(ServedModel(source, config.keep_alive, source=source, given=source))
            models[-1].is_found = True
    if not models:
        raise UsageError("--all: the Hugging Face cache has no model with weights.")
    if options.served_model_name:
        if len(models) > 1:
            raise UsageError("--served-model-name is for one model; several: NAME=MODEL.")
        models[0].name, models[0].names = options.served_model_name[0], options.served_model_name
    counts = Counter(model.name for model in models)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UsageError(f"Two models have the name {twice[0]!r}: write NAME=MODEL for one.")
    counts.update(model.name.rpartition("/")[2] for model in models if "/" in model.name)
    for model in models:
        short = model.name.rpartition("/")[2]
        more = (short,) if counts[short] == 1 and short != model.name else ()
        model.names = model.names or (model.name, *more)
    for name in config.pinned:
        if not (found := [model for model in models if name in model.names]):
            raise UsageError(f"--pinned {name}: there is no such model among those served.")
        found[0].pinned = True
    return models


def _find_sources(models: list[ServedModel], memory: int | None) -> None:
    """Set each model's source (a directory, a hub id or None) and name from the user's text."""
    short = [m for m in models if m.source != BUNDLED_NAME and is_short_name(m.source)]
    if short:
        chosen = chosen_models([model.given for model in short], memory)
        for model, source in zip(short, chosen):
            model.source = source
    for model in models:
        path = os.path.expanduser(model.source or "")
        if os.path.isdir(path):
            model.name, model.source = model.name or model_name(path), os.path.abspath(path)
        else:
            model.name = model.name or model.source or ""
            model.source = None if model.source == BUNDLED_NAME else model.source


def directory_of(model: ServedModel) -> str:
    """Returns the directory that has the model's files, or will have them after the download."""
    from mlx_mtp.models.download import cache_directory
    from mlx_mtp.models.hub import BUNDLED_MODEL, HUB_ID

    if model.source is None:
        return str(BUNDLED_MODEL)
    is_on_hub = not os.path.isdir(model.source) and HUB_ID.fullmatch(model.source)
    return str(cache_directory(model.source)) if is_on_hub else model.source


def child_command(options: argparse.Namespace, model: ServedModel, num_models: int) -> list[str]:
    """Returns the command of a model's process, with its shares of memory and disk space.

    `options` are the model's (`model_options`).
    """
    given = argparse.Namespace(**vars(options))
    for key in ("cache_dir", "chat_template"):  # The process runs in another directory.
        if (path := getattr(given, key)) is not None:
            setattr(given, key, Path(path).expanduser().absolute())
    if isinstance(given.mtp_draft_vocab, Path):
        given.mtp_draft_vocab = given.mtp_draft_vocab.absolute()
    words = [] if model.source is None else [f"--model={model.source}"]
    words += [f"--served-model-name={name}" for name in model.names]
    words += [f"--memory-limit={model.share}", "--log-format=json"]
    if options.prefix_cache_dir is not None:
        folder = Path(options.prefix_cache_dir).expanduser().absolute()
        words.append(f"--prefix-cache-dir={folder / model.name.replace('/', '--')}")
        words.append(f"--prefix-cache-dir-size={options.prefix_cache_dir_size // num_models}")
    words += arguments_of(given, [flag for flag in SERVE_FLAGS if flag.key not in _OWN])
    return [*command_of("mlx_mtp"), "serve", *words]
