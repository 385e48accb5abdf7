"""Prints the results of the command lines in `command_lines.txt`; none of them serves anything.

    python -m tests.command_lines > FILE                        results, to be copied if right
    python -m tests.command_lines --tree DIR --whole > FILE     of another checkout, in processes

In the file, `$` begins a command line, which can start with environment variables and runs in a
directory with the files of `prepare`, `FOLDER`. Below it are the exit status and the lines of
standard output (`>`) and standard error (`!`); `...` in their place accepts any result, as it
depends on the machine. A help text or long output is replaced by a digest without its white space,
as versions of Python and terminals wrap it differently.
"""

import argparse
import contextlib
import hashlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TREE = Path(__file__).parents[1]
RECORDED = Path(__file__).with_suffix(".txt")
LONG = 12  # lines of output; longer output is replaced by a digest
MASKS = [(r"\[Errno -?\d+\]", "[Errno N]"), (r"\d+\.\d+(/s| s\b)", r"N\1")]
Result = tuple[int, str, str]  # exit status, standard output, standard error


def recorded() -> Iterator[tuple[str, str]]:
    """Yields each command line of the file, and the lines below it."""
    text = re.sub(r"^#.*\n", "", RECORDED.read_text(), flags=re.MULTILINE)
    for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, result = block.partition("\n")
        yield line, result.strip("\n")


def prepare(folder: Path) -> None:
    """Make the files that the command lines name."""
    for name, mode in (("DIR", 0o700), ("OPEN", 0o777)):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    (folder / "LINK").symlink_to(folder / "DIR")
    files = {"FILE": "", "KEYS": "one\nt\two\n", "WRONG": "[serve]\nprot = 1\n"}
    files["SETTINGS"] = "[models.EMPTY]\nmtp-draft-vocab = 9\n"
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    for name, text in (("EMPTY", "{}"), ("FOREIGN", '{"model_type": "llama"}'), ("BROKEN", "{")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)


def run_here(words: list[str], variables: dict[str, str]) -> Result:
    """Run a command in this process."""
    from mlx_mtp.cli.main import main

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status = main(words, variables)
        except SystemExit as error:
            status = int(error.code or 0)
    return status, out.getvalue(), errors.getvalue()


def run_apart(words: list[str], variables: dict[str, str], tree: Path) -> Result:
    """Run a command of a checkout in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name[:4] != "MLX_"}
    environment = inherited | {"PYTHONPATH": str(tree)} | variables
    argv = [sys.executable, "-m", "mlx_mtp", *words]
    done = subprocess.run(
        argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def result_of(line: str, tree: Path | None = None, whole: bool = False) -> str:
    """Returns a command line's result in the current directory, in the file's format."""
    words, variables = shlex.split(line), {"MLX_MTP_CACHE_DIR": "cache", "MLX_MTP_CONFIG": ""}
    while (word := words.pop(0)) != "mlx-mtp":
        name, _, variables[name] = word.replace("FOLDER", os.getcwd()).partition("=")
    # Libraries read HF_ and XDG_ variables, partly at import, so these lines run in a process.
    here, tree = tree is None and not line.startswith(("HF_", "XDG_")), tree or TREE
    result = run_here(words, variables) if here else run_apart(words, variables, tree)
    masks = [(re.escape(str(tree)), "TREE"), (re.escape(os.getcwd()), "FOLDER"), *MASKS]
    for pattern, mask in masks:
        result = [re.sub(pattern, mask, str(each)) for each in result]
    status, out, errors = result
    if not whole and ("--help" in words or out.count("\n") > LONG):
        text = "".join(out.split())
        out = f"{len(text)} characters, {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    lines = [f"> {each}" for each in out.splitlines()] + [f"! {e}" for e in errors.splitlines()]
    return "\n".join([status, *map(str.rstrip, lines)])


def main() -> None:
    """Print the file with the current results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, help="a checkout; its commands run in processes")
    parser.add_argument("--whole", action="store_true", help="no digests, and no `...`")
    given, expected = parser.parse_args(), dict(recorded())
    tree = given.tree and given.tree.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare(Path(folder))
        # Without --tree they run in turn in the main thread, which alone can set signal handlers.
        with ThreadPoolExecutor(2) as pool:
            run_all = map if tree is None else pool.map
            results = run_all(lambda line: result_of(line, tree, given.whole), expected)
            found = dict(zip(expected, results))
    for number, text in enumerate(RECORDED.read_text().splitlines()):
        if text.startswith(("#", "$ ")):
            print("\n" * (number > 0 and text[0] == "#") + text)
        if (line := text.removeprefix("$ ")) in expected:
            print("..." if expected[line] == "..." and not given.whole else found[line])


if __name__ == "__main__":
    main()
