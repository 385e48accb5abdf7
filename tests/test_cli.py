"""The command line: flags, their environment variables, errors, and commands for real."""

import argparse
import contextlib
import io
import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from mlx_mtp import __version__, build
from mlx_mtp.cli import main as cli
from mlx_mtp.cli.banner import answers_text, banner, off_text, prefixes_text
from mlx_mtp.config import EngineConfig, ServerConfig
from mlx_mtp.distributed import own_address
from mlx_mtp.errors import MissingHeadError, UsageError
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.options import SERVE_FLAGS, model_name, wants_exact
from mlx_mtp.server.serving import bind
from mlx_mtp.settings import add_settings, resolve
from mlx_mtp.text.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.support.fake_engine import FakeInfo

COMMAND = [sys.executable, "-m", "mlx_mtp"]


def parse(*argv: str, **environ: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_settings(parser, *SERVE_FLAGS)
    options = resolve(parser.parse_args(argv), SERVE_FLAGS, environ)
    options.given = dict.fromkeys(options.given, "")  # wherever the values come from
    return options


def test_every_flag_also_comes_from_the_environment():
    values = {"--cors-origin": "https://chat.example:7", "--kv-cache-quantization": "8"}
    values |= dict.fromkeys(("--mtp-optimistic", "--top-p", "--min-p", "--temperature"), "0.7")
    values["--chat-template-kwargs"] = '{"preserve_thinking": true}'
    for flag in SERVE_FLAGS:
        value = flag.parse[-1] if isinstance(flag.parse, tuple) else values.get(flag.name, "7")
        argv = [f"--{flag.name.lstrip('-')}", value]
        if flag.parse is None:
            argv, value = [flag.name], "TRUE"
        if flag.name == "model":
            assert parse("--model", value) == parse(value)
        from_environment = parse(**{flag.variable: value})
        assert from_environment == parse(*argv)
        assert from_environment != parse()
        # The flag overrides the variable, even a wrong value.
        assert parse(*argv, **{flag.variable: ""}) == from_environment
    assert parse("--no-enable-mtp", MLX_MTP_ENABLE_MTP="1").enable_mtp is False
    assert parse(MLX_MTP_ALLOWED_HOST="a, b.").allowed_host == ("a", "b")
    for text, value in (("0", 0), ("48GB", 48 * 10**9), ("1.5 gib", 3 << 29)):
        assert parse("--memory-limit", text).memory_limit == value


@pytest.mark.parametrize(
    ("words", "environ", "error"),
    [
        ((), {"MLX_MTP_API_KEY": "\udcff"}, "variable MLX_MTP_API_KEY is wrong: the key is not"),
        (("--api-key", "\n"), {}, "must not begin or end with white space"),
        (("a", "--b\nc"), {}, "unrecognized arguments: --b c"),
        (("\udcff\udcfe",), {}, "is not valid UTF-8"),
    ],
)
def test_an_error_is_one_line_whatever_was_typed(words, environ, error, capsys):
    """Errors that a text file can express are in `command_lines.txt`."""
    with contextlib.suppress(SystemExit):
        assert cli.main(["serve", *words], environ) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("mlx-mtp") and error in shown and shown.count("\n") == 1


def test_a_port_is_in_use_as_soon_as_it_is_bound(capsys, monkeypatch):
    """A second server gets the error before it loads anything."""
    monkeypatch.setattr(build, "load", lambda *_, **__: pytest.fail("loaded"))
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)], {}) == 2
        assert f"Port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
        # Early clients wait until the server is ready.
        socket.create_connection(("127.0.0.1", port), timeout=30).close()


def test_help_and_mistakes_load_nothing_heavy():
    code = """
import sys
from mlx_mtp.cli import main as cli
for words in ("--version", "serve --help", "serve --port x", "bench offline --help"):
    try:
        cli.main(words.split(), {})
    except SystemExit:
        pass
heavy = {"mlx", "mlx_lm", "transformers", "fastapi", "uvicorn", "httpx", "pydantic", "numpy"}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in (f"mlx-mtp {__version__}", "--mtp-num-draft-tokens", "--depths"):
        assert words in done.stdout


COMMANDS = (
    "serve launch generate chat connect config service top bench selftest inspect models pull ls "
    "rm ps add-mtp-weights convert"
)


@pytest.mark.parametrize("command", ["", *COMMANDS.split(), "bench latency", "bench offline"])
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"], {})
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    if not command:
        assert set(COMMANDS.split()) == set(
            re.findall(r"^    ([a-z-]+)(?: |$)", shown, re.MULTILINE)
        )


def test_the_models_name(tmp_path, monkeypatch):
    path = str(Path(__file__).parent)
    for model, name in ((None, "mlx-mtp-demo"), ("org/model", "org/model"), (path, "tests")):
        assert model_name(model) == name
    odd = tmp_path / os.fsdecode(b"mod\xff")
    with contextlib.suppress(OSError):  # macOS refuses this name
        odd.mkdir()
        monkeypatch.chdir(odd)
        assert model_name(".") == "mod?"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("/no/such/model", r"mlx-mtp: '/no/such/model' is neither .*\n"),
        ("--memory-limit 40MB", "40.0 MB .--memory-limit. the weights take 50.5 MB.*mtp models"),
        ("--memory-limit 70MB", "weights take 50.5 MB and the prefix cache 4.3 MB"),
        ("--memory-limit 200MB --max-model-len 65536", "65,536 tokens needs .*--max-model-len "),
    ],
)
def test_serve_refuses_what_cannot_fit_with_numbers(flags, words, capsys):
    assert cli.main(["serve", "--port", "0", *flags.split()], {}) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "engine", "shown"),
    [
        ({}, {}, "http://127.0.0.1:81"),
        ({"host": "0.0.0.0"}, {}, "curl http://127.0.0.1:81/"),
        ({"host": "0.0.0.0"}, {}, f"  network  http://{own_address('0.0.0.0')}:81\n"),
        ({"host": "::"}, {}, "curl http://[::1]:81/"),
        ({}, {}, "MTP      on, 2 drafts per step; head from /m/mtp.safetensors\n"),
        ({}, {"mtp_enabled": False}, "MTP      off: why\n"),
        ({}, {"draft_sources": ("mtp",)}, "copies   off: why not\n"),
        ({}, {}, "prefixes kept\n  answers  the same\n"),
        ({"optimistic": 0.5}, {}, "optimistic drafts with 0.5 times the probability"),
        ({}, {}, "\n  memory   8.0 GB: 1.0 GB weights\n           rows: 3\n"),
        ({"api_keys": ("a'b",)}, {}, '"Authorization: Bearer $MLX_MTP_API_KEY"'),
    ],
)
def test_the_banner(config, engine, shown):
    config = ServerConfig(**{"model_name": "it's", "port": 81} | config)
    about = {"head_source": "/m/mtp.safetensors", "num_ranks": 2, "unused_kernels": ["few rows"]}
    loaded = SimpleNamespace(model_type="qwen3_next", path="/m", **about)
    memory = ["8.0 GB: 1.0 GB weights", "rows: 3"]
    info = "CPU, OpenBLAS 1"
    off = {"mtp": "off: why", "copy": "off: why not"}
    text = banner(config, loaded, FakeInfo(**engine), info, memory, "kept", "the same", off)
    assert shown in text and "a'b" not in text and "2, each with a part" in text
    assert re.search(r"kernels +slower code in place of few rows; see", text)
    assert "\n\nReady. A browser " in text and text.endswith(" Ctrl-C stops the server.\n")
    narrow = banner(
        config, loaded, FakeInfo(**engine), info, memory, "kept", "the same", off, width=60
    )
    assert all(len(line) <= 60 for line in narrow.partition("curl")[0].split("\n"))
    assert narrow.split() == text.split()
    assert ("Authorization" in text) == bool(config.api_keys)
    command = text[text.index("curl ") : text.index("\n\nReady")]
    words = shlex.split(command.replace("\\\n", " "))
    assert json.loads(words[-1])["model"] == "it's"


def test_the_banners_line_on_prefixes():
    size = {"prefix_cache_size": 8 * 10**9}
    kept = "up to 8.00 GB of earlier prompts and answers are kept"
    rounded = ", in 4 bits: answers that reuse them may differ slightly"
    for settings, shown in (
        (size, kept),
        (size | {"kv_cache_quantization": 4}, kept + rounded),
        ({}, "not kept (--prefix-cache-size is 0)"),
    ):
        assert prefixes_text(EngineConfig(**settings)) == shown


@pytest.mark.parametrize(
    ("flags", "mtp", "copies"),
    [
        ("--drafts copy", "--drafts copy", None),
        ("--drafts none", "--drafts none", "--drafts none"),
        ("--drafts mtp", None, "--drafts mtp"),
        ("--mtp-num-draft-tokens 2", None, "--mtp-num-draft-tokens 2"),
        ("--no-enable-mtp", "--no-enable-mtp", None),
        ("", "the model has no head", None),
    ],
)
def test_the_banner_says_why_a_source_of_drafts_is_off(flags, mtp, copies):
    for source, reason in (("mtp", mtp), ("copy", copies)):
        assert reason in (None, off_text(parse(*flags.split()), source).removeprefix("off: "))


@pytest.mark.parametrize(
    ("exact", "can", "size", "told"),
    [
        (True, True, 2, "to the bit"),
        (True, False, 2, "can differ"),
        (False, True, 2, "can differ"),
        (True, False, 4, "but for ties"),
    ],
)
def test_the_banners_line_on_answers(exact, can, size, told):
    given = {"dtype": SimpleNamespace(size=size), "model": SimpleNamespace()}
    loaded = SimpleNamespace(can_be_exact=can, **given)
    assert told in answers_text(EngineConfig(exact=exact), loaded)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], None),
        (["--exact"], True),
        (["--no-exact"], False),
        (["--max-decode-pause", "50"], False),
        (["--max-decode-pause", "0"], None),
        (["--kv-cache-quantization", "8"], False),
        (["--kv-cache-quantization", "none"], None),
    ],
)
def test_exactness_is_the_models_choice_unless_a_flag_asks_or_excludes_it(given, wanted):
    assert wants_exact(parse(*given)) == wanted


@pytest.mark.parametrize(
    ("flags", "serves", "exact"),
    [("", True, True), ("", False, False), ("--no-exact", True, False), ("--exact", False, True)],
)
def test_all_commands_build_an_engine_that_is_exact_where_serves_is(
    flags, serves, exact, demo_model, monkeypatch, capsys
):
    """All commands have the same default, so `generate` gives the tokens that `serve` gives."""
    loaded = demo_model, Tokenizer.load(DEMO)

    def build(model, config, *_, **__):
        raise UsageError(f"exact: {config.exact}")

    monkeypatch.setattr(LoadedModel, "can_be_exact", serves)
    monkeypatch.setattr("mlx_mtp.build.load", lambda *_, **__: loaded)
    monkeypatch.setattr("mlx_mtp.build.build_engine", build)
    monkeypatch.setattr("mlx_mtp.bench.offline.build_engine", build)
    commands = ["serve --port 0", "generate hi", "bench offline", *([] if flags else ["selftest"])]
    commands += ["chat"]
    for command in commands:
        assert cli.main([*command.split(), *flags.split()], {}) == 2
        assert f"exact: {exact}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "variables"),
    [
        ("serve --prefix-cache-size 0 --draft-answers-size 0", ""),
        ("serve --exact --max-decode-pause 0 --kv-cache-quantization none", ""),
        ("serve --no-enable-mtp --calibration-seconds 2", ""),
        ("serve --no-enable-mtp --drafts copy --mtp-optimistic 1", ""),
        ("serve --mtp-num-draft-tokens 0 --calibration-seconds 0 --cache-dir DIR", ""),
        ("serve --enable-mtp --calibration-seconds 0 --mtp-num-draft-tokens 1", ""),
        ("serve --prefix-cache-size 0 --kv-cache-quantization none", ""),
        ("serve", "ENABLE_MTP=1 MTP_NUM_DRAFT_TOKENS=2"),
        ("generate hi --no-enable-mtp --mtp-num-draft-tokens 0", ""),
        ("generate hi --mtp-num-draft-tokens 1", ""),
        ("bench offline --depths 1 --calibration-seconds 0", ""),
    ],
)
def test_flags_that_agree_are_not_refused(argv, variables, capsys, monkeypatch):
    """Flags that are refused are in `command_lines.txt`."""

    def load(*_, **__):
        raise UsageError("it is loaded")

    monkeypatch.setattr(build, "load", load)
    environ = dict(f"MLX_MTP_{each}".split("=") for each in variables.split())
    words = argv.split() + (["--port", "0"] if argv.startswith("serve") else [])
    assert cli.main(words, environ) == 2
    assert capsys.readouterr().err == "mlx-mtp: it is loaded\n"


@pytest.mark.parametrize("command", ["generate hi", "serve --port 0"])
def test_a_model_goes_without_a_head_unless_one_was_asked_for(command, monkeypatch, capsys):
    asked = []

    def load(*_, enable_mtp, **__):
        asked.append(enable_mtp)
        if enable_mtp:
            raise MissingHeadError("there is no head")
        raise UsageError("loaded without it")

    monkeypatch.setattr(build, "load_model", load)
    assert cli.main(command.split(), {}) == 2
    assert asked == [True, False]
    assert "loaded without it" in capsys.readouterr().err
    assert cli.main([*command.split(), "--no-enable-mtp"], {}) == 2
    assert asked == [True, False, False]
    for more in ("--enable-mtp", "--mtp-num-draft-tokens=2", "--mtp-draft-vocab=9"):
        capsys.readouterr()
        assert cli.main([*command.split(), more], {}) == 2
        assert "there is no head" in capsys.readouterr().err


def test_closed_streams_and_few_open_files():
    """mlx-lm asks for 2,048 open files; a lower limit works too, and no limit is lowered."""
    code = """
import os, sys
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
import mlx_mtp.cli.main, mlx_mtp.backend
mlx_mtp.backend.prepare()
import transformers  # which takes the time that mlx-lm takes to import
for soft, hard, found in ((256, 512, 512), (256, 4000, 2048), (3000, 4000, 3000)):
    if not os.fork():
        setrlimit(RLIMIT_NOFILE, (soft, hard))
        import mlx_lm
        assert getrlimit(RLIMIT_NOFILE) == (found, hard)
        setrlimit(RLIMIT_NOFILE, (100, 100))
        os._exit(0)
    assert os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    shell = 'exec "$0" -m mlx_mtp generate hi --max-tokens 2 <&- >&-'
    done = subprocess.run(["bash", "-c", shell, sys.executable], capture_output=True, text=True)
    assert done.returncode == 0 and "2 tokens" in done.stderr


def test_a_server_without_files_for_its_clients_is_refused(monkeypatch, capsys):
    """With `ulimit -n 64`, the error names the limit that the server needs."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert cli.main(["serve", "--port", "0"], {}) == 2
    message = "mlx-mtp: The limit of open files is 64, and the server needs 80: raise it, as by "
    assert capsys.readouterr() == ("", f"{message}`ulimit -n 80`.\n")


def test_generate(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Tell me a story.")))
    argv = ["generate", "-", "--max-tokens", "12", "--temperature", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
        assert cli.main(argv, {}) == 2 and "The prompt is empty" in capsys.readouterr().err
    assert cli.main([*argv, "--mtp-num-draft-tokens", "2"], {}) == 0
    out, errors = capsys.readouterr()
    assert len(out.split()) > 5
    assert re.search(r"12 tokens, [\d.]+/s.*drafts accepted", errors)


def _closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


FULL_DISK = pytest.param(
    lambda: os.open("/dev/full", os.O_WRONLY),
    (2, "mlx-mtp: standard output: No space left on device"),
    marks=[
        pytest.mark.full,
        pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux"),
    ],
)


@pytest.mark.parametrize(("opened", "ends"), [(_closed_pipe, (141, "")), FULL_DISK])
def test_when_nobody_reads_generate_ends_and_serve_goes_on(opened, ends):
    writer = opened()
    more = {"stdout": writer, "stderr": subprocess.PIPE, "text": True}
    argv = [*COMMAND, "generate", "Tell me a story.", "--max-tokens", "12"]
    done = subprocess.run(argv, **more)
    assert done.returncode == ends[0] and ends[1] in done.stderr
    assert "Error" not in done.stderr and "Exception" not in done.stderr
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", str(port), "--calibration-seconds", "0"], **more
    )
    os.close(writer)
    try:
        transport = httpx.HTTPTransport(retries=10)  # growing waits, until the server listens
        with httpx.Client(transport=transport, timeout=60) as client:
            for _ in range(3):
                answer = client.get(f"http://127.0.0.1:{port}/health")
                assert answer.json() == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "BrokenPipe" not in errors
