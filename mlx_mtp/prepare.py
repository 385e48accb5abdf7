"""What a command does before it loads a model, and before anything imports mlx."""

import argparse

from mlx_mtp import backend, logs


def prepare_command(options: argparse.Namespace, log_level: str = "warning") -> backend.BackendInfo:
    """Set up logging and mlx's backend, read the file of --mtp-draft-vocab, find the model's name.

    `options.model` becomes a directory, a hub id or None, the bundled model.
    """
    from mlx_mtp.text.draft_vocab import read_draft_vocab

    logs.set_up(log_level, getattr(options, "log_format", "text"))
    if "mtp_draft_vocab" in options:
        options.mtp_draft_vocab = read_draft_vocab(options.mtp_draft_vocab)
    info = backend.prepare()
    from mlx_mtp.inspect.choose import choose_model

    if "model" in options:
        options.model = choose_model(options.model, getattr(options, "memory_limit", None))
    return info
