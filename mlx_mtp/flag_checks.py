"""Refuse flags that would change nothing beside the others, before anything is loaded.

A variable of the environment counts as given, a default does not; nor does a value that asks for
what happens anyway, such as 0 drafts without MTP. `--cache-dir` may always be given: it says where
step costs are kept if there are any, and many set it once for all runs.
"""

from __future__ import annotations

import argparse

from mlx_mtp.errors import UsageError

_OFF = (None, 0, "none")
_OF_DRAFTS = ("--mtp-num-draft-tokens", "--mtp-draft-vocab")


def check_serve(options: argparse.Namespace) -> None:
    """Those of `serve`, as `flags.resolve` gives them.

    Raises:
        UsageError: a flag has no effect; says which to add or to leave out.
    """
    _check_mtp(options, *_OF_DRAFTS, "--calibration-seconds")
    depth = options.mtp_num_draft_tokens
    if _asks(options, "--calibration-seconds") and depth != "auto":
        raise UsageError(
            "--calibration-seconds is for --mtp-num-draft-tokens auto, and that is "
            f"{depth}: leave one of them out."
        )
    _check_prefix_cache(options)


def check_generate(options: argparse.Namespace) -> None:
    """Those of `generate`.

    Raises:
        UsageError: a flag has no effect; says which to add.
    """
    _check_mtp(options, *_OF_DRAFTS)


def needs_head(options: argparse.Namespace) -> bool:
    """Something is asked of the MTP head, so that a model without one won't do."""
    return bool(options.enable_mtp) or any(_asks(options, flag) for flag in _OF_DRAFTS)


def _asks(options: argparse.Namespace, flag: str) -> bool:
    """The flag was given, with a value that asks for something."""
    key = flag.lstrip("-").replace("-", "_")
    return key in options.given and getattr(options, key) not in _OFF


def _check_mtp(options: argparse.Namespace, *flags: str) -> None:
    # None: if the model has a head.
    if options.enable_mtp is not False:
        return
    for flag in flags:
        if _asks(options, flag):
            raise UsageError(
                f"{flag} is for the MTP head's drafts, but MTP is off: add --enable-mtp."
            )


def _check_prefix_cache(options: argparse.Namespace) -> None:
    flag, of_size = "--prefix-cache-dir", "--prefix-cache-dir-size"
    bits = options.kv_cache_quantization
    if options.prefix_cache_dir is None and options.prefix_cache_dir_size is not None:
        raise UsageError(f"{of_size} needs {flag}, which is not given.")
    if options.prefix_cache_size == 0:
        for name, does in (
            (flag, "keeps on the disk"),
            ("--kv-cache-quantization", f"stores in {bits} bits"),
        ):
            if _asks(options, name):
                raise UsageError(
                    f"{name} {does} what the prefix cache has, and --prefix-cache-size 0 turns "
                    "that off: leave one of them out."
                )
    if options.prefix_cache_dir is not None and options.prefix_cache_dir_size == 0:
        raise UsageError(f"{of_size} 0 leaves no room: leave {flag} out, or give it a size.")
