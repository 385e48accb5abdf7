"""What a command does before it loads a model, and before anything imports mlx."""

import argparse

from mlx_mtp import backend, logs


def prepare_command(options: argparse.Namespace, log_level: str = "warning") -> backend.BackendInfo:
    """Set up logging, read the file of --mtp-draft-vocab and prepare mlx's backend."""
    from mlx_mtp.text.draft_vocab import read_draft_vocab

    given = vars(options)
    logs.set_up(log_level, given.get("log_format", "text"), given.get("log_file"))
    if "mtp_draft_vocab" in given:
        options.mtp_draft_vocab = read_draft_vocab(options.mtp_draft_vocab)
    return backend.prepare()
