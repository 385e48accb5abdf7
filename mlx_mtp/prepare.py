"""Prepares a command, before it loads a model and before anything imports mlx."""

import argparse
from pathlib import Path

from mlx_mtp import backend, logs
from mlx_mtp.errors import UsageError


def prepare_command(options: argparse.Namespace, log_level: str = "warning") -> backend.BackendInfo:
    """Set up logging and mlx's backend, read the files that flags name, and choose the model.

    `options.model` becomes a directory, a hub id, or None for the bundled model. Returns the
    backend. Raises UsageError or BackendError.
    """
    from mlx_mtp.text.draft_vocab import read_draft_vocab

    given = vars(options)
    logs.set_up(log_level, given.get("log_format", "text"), given.get("log_file"))
    if "mtp_draft_vocab" in given:
        options.mtp_draft_vocab = read_draft_vocab(options.mtp_draft_vocab)
    if getattr(options, "chat_template", None) is not None:
        options.chat_template = _read_template(Path(options.chat_template).expanduser())
    info = backend.prepare()
    from mlx_mtp.inspect.choose import choose_model

    if "model" in options:
        options.model = choose_model(options.model, getattr(options, "memory_limit", None))
    return info


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {path} can't be read: {error}.") from None
