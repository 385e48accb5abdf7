"""The command line: flags, their environment variables, errors, and both commands for real."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from mlx_mtp import __version__, cli, parts
from mlx_mtp.backend import BackendInfo
from mlx_mtp.banner import banner as told
from mlx_mtp.config import ServerConfig
from mlx_mtp.engine import arrivals
from mlx_mtp.errors import EngineStoppedError, MissingHeadError, UsageError
from mlx_mtp.flags import Flag, add_flags, resolve, size
from mlx_mtp.models import loader
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.output_stream import OutputStream
from mlx_mtp.server.parsing.answer import PlainParser
from mlx_mtp.server.serve import bind
from mlx_mtp.server.tokenizer import Tokenizer
from mlx_mtp.terminal import stream_answer, summary
from tests.server.fake_engine import FakeEngine, FakeInfo, answer, out

COMMAND = [sys.executable, "-m", "mlx_mtp"]


def parse(flags: tuple[Flag, ...], *argv: str, **environ: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, flags)
    return resolve(parser.parse_args(argv), flags, environ)


def test_defaults() -> None:
    options = parse(cli.SERVE_FLAGS)
    assert options.model is None
    assert options.enable_mtp is False
    assert options.mtp_num_draft_tokens == "auto"
    assert options.calibration_seconds > 0
    assert options.cache_dir is None
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.max_num_seqs == 32
    assert options.dtype == "auto"
    assert options.seed is options.api_key is options.max_model_len is None


@pytest.mark.parametrize("flag", cli.SERVE_FLAGS, ids=lambda flag: flag.name)
def test_every_flag_also_comes_from_the_environment(flag: Flag) -> None:
    given = {
        "--enable-mtp": "true",
        "--dtype": "float32",
        "--log-level": "debug",
        "--reasoning-parser": "gpt_oss",
        "--tool-call-parser": "hermes",
        "--cors-origin": "https://chat.example:7",
        "--kv-cache-quantization": "8",
    }
    value = given.get(flag.name, "7")
    from_environment = parse(cli.SERVE_FLAGS, **{flag.variable: value})
    if flag.name == "--enable-mtp":
        argv = [flag.name]
    else:
        argv = [flag.name, value] if flag.name.startswith("-") else [value]
    assert from_environment == parse(cli.SERVE_FLAGS, *argv)
    assert from_environment != parse(cli.SERVE_FLAGS)
    # The flag wins, even over a value that would be wrong.
    assert parse(cli.SERVE_FLAGS, *argv, **{flag.variable: ""}) == from_environment


def test_the_variables_are_named_after_the_flags() -> None:
    names = {flag.variable for flag in cli.SERVE_FLAGS}
    assert {"MLX_MTP_ENABLE_MTP", "MLX_MTP_MTP_NUM_DRAFT_TOKENS", "MLX_MTP_MODEL"} <= names


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("0", False)])
def test_booleans_from_the_environment(text: str, value: bool) -> None:
    assert parse(cli.SERVE_FLAGS, MLX_MTP_ENABLE_MTP=text).enable_mtp is value
    assert parse(cli.SERVE_FLAGS, "--no-enable-mtp", MLX_MTP_ENABLE_MTP="1").enable_mtp is False


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MLX_MTP_PORT", "http"),
        ("MLX_MTP_PORT", "65536"),
        ("MLX_MTP_ENABLE_MTP", "yes"),
        ("MLX_MTP_MTP_NUM_DRAFT_TOKENS", "9"),
        ("MLX_MTP_MTP_NUM_DRAFT_TOKENS", "automatic"),
        ("MLX_MTP_CALIBRATION_SECONDS", "-1"),
        ("MLX_MTP_CACHE_DIR", ""),
        ("MLX_MTP_PREFIX_CACHE_SIZE", "8 apples"),
        ("MLX_MTP_PREFIX_CACHE_SIZE", "-1"),
        ("MLX_MTP_PREFIX_CACHE_SIZE", "9" * 400 + "GB"),
        ("MLX_MTP_KV_CACHE_QUANTIZATION", "6"),
        ("MLX_MTP_DTYPE", "int8"),
        ("MLX_MTP_SEED", str(1 << 63)),
        ("MLX_MTP_API_KEY", ""),
        ("MLX_MTP_API_KEY", "\udcff"),
        ("MLX_MTP_LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=variable):
        parse(cli.SERVE_FLAGS, **{variable: value})
    assert cli.main(["serve"], {variable: value}) == 2
    error = capsys.readouterr().err
    assert error.startswith("mlx-mtp: ")
    assert variable in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["serve", "--port", "x"], "argument --port: 'x' is not an integer"),
        (["serve", "--port", "70000"], "argument --port: 70000 is not between 0 and 65535"),
        (["serve", "--mtp-num-draft-tokens", "9"], "9 is not between 0 and 8"),
        (["serve", "--mtp-num-draft-tokens", "some"], "'some' is not an integer"),
        (["serve", "--calibration-seconds", "-1"], "-1 is below 0"),
        (["serve", "--dtype", "int8"], "'int8' is not one of auto"),
        (["serve", "--api-key", ""], "the key must not be empty"),
        (["serve", "a", "b"], "unrecognized arguments: b"),
        (["serve", "a", "b\nc"], "unrecognized arguments: b c"),
        (["generate"], "required: prompt"),
        (["generate", "hi", "--temperature", "nan"], "'nan' is not finite"),
        (["generate", "\udcff\udcfe"], "is not valid UTF-8"),
        (["generate", "hi", "--system", "a\udcff"], "is not valid UTF-8"),
        (["inspect", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["convert", "a", "--bits", "x"], "argument --bits: invalid int value: 'x'"),
        (["add-mtp-weights"], "required: --mlx-model-path"),
        (["connect", "dance"], "dance"),
        (["selftest", "--seconds", "0"], "0 is below 1"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_help(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv, {})
    assert caught.value.code == 2
    error = capsys.readouterr().err
    command = " ".join(["mlx-mtp", *argv[:1]] if argv[:1] not in ([], ["dance"]) else ["mlx-mtp"])
    assert error.startswith(f"{command}: ")
    assert reason in error
    assert error.endswith(f" (see {command} --help)\n")
    assert error.count("\n") == 1


def test_errors_are_one_line_and_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/no/such/model", "--port", "0"], {}) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"mlx-mtp: '/no/such/model' is neither .*\n", error)


def test_a_port_in_use_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "load", lambda *_, **__: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--port", port], {}) == 2
    error = capsys.readouterr().err
    assert f"Port {port} on 127.0.0.1 is in use" in error
    assert "--port" in error


def test_a_port_is_in_use_as_soon_as_it_is_bound() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=f"Port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
        # Early clients wait.
        socket.create_connection(("127.0.0.1", port), timeout=30).close()


def test_an_address_that_is_not_ours_is_told() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_streams_are_not_held_back_by_nagles_algorithm() -> None:
    # asyncio sets TCP_NODELAY only where the listening socket says that it is TCP's.
    with bind("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP


def test_help_and_mistakes_load_nothing_heavy() -> None:
    code = """
import sys
from mlx_mtp import cli
for argv in (["--version"], ["serve", "--help"], ["serve", "--port", "x"]):
    try:
        cli.main(argv, {})
    except SystemExit:
        pass
heavy = {"mlx", "mlx_lm", "transformers", "fastapi", "uvicorn", "numpy", "huggingface_hub"}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"mlx-mtp {__version__}" in result.stdout
    assert "--mtp-num-draft-tokens" in result.stdout


@pytest.mark.parametrize(
    ("model", "name"),
    [(None, "mlx-mtp-demo"), ("org/model", "org/model"), ("/", ""), ("mlx_mtp/", "mlx_mtp")],
)
def test_the_models_name(model: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert parts.model_name(model) == name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory-limit", "40MB"], ("weights take 45.4 MB", "of 40.0 MB (--memory-limit)")),
        (["--memory-limit", "70MB"], ("leave 24.6 MB", "--prefill-step-size")),
        (
            ["--memory-limit", "200MB", "--max-model-len", "65536"],
            ("65,536 tokens needs ", "weights leave 154.6 MB", "--max-model-len "),
        ),
    ],
)
def test_serve_refuses_what_cannot_fit_with_numbers(
    flags: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--port", "0", *flags], {}) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("48GB", 48 * 10**9), ("1.5 gib", 3 << 29), ("512MB", 512 * 10**6), ("7", 7)],
)
def test_a_size(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "8 GBit", "nan", "9" * 40 + "GB"])
def test_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def banner(
    host: str = "127.0.0.1",
    api_key: str | None = None,
    depth: int | str = 2,
    mtp_enabled: bool = True,
    **more: object,
) -> str:
    config = ServerConfig(
        model_name="it's", host=host, port=81, api_keys=() if api_key is None else (api_key,)
    )
    loaded = SimpleNamespace(model_type="qwen3_next", path="/m", head_source="/m/mtp.safetensors")
    info = FakeInfo(num_draft_tokens=depth, mtp_enabled=mtp_enabled, **more)
    backend = BackendInfo("CPU", "OpenBLAS 1", "0.32")
    return told(config, loaded, info, backend, ["8.0 GB: 1.0 GB weights", "rows: 3"])


def shell_words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def test_the_banner_tells_all() -> None:
    text = banner(api_key="a'b")
    assert "http://127.0.0.1:81" in text
    assert "mlx 0.32 on CPU, OpenBLAS 1" in text
    assert "2 tokens per step, head from /m/mtp.safetensors" in text
    assert "\n  memory   8.0 GB: 1.0 GB weights\n           rows: 3\n" in text
    # The shell sees what was meant, whatever quotes the name has.
    words = shell_words(text[text.index("curl ") :])
    assert "a'b" not in text
    assert '"Authorization: Bearer $MLX_MTP_API_KEY"' in text
    assert "Authorization" not in banner()
    assert json.loads(words[-1])["model"] == "it's"


def test_the_banners_address_can_be_reached() -> None:
    assert "curl http://127.0.0.1:81/" in banner(host="0.0.0.0")
    assert "curl http://[::1]:81/" in banner(host="::")


def test_the_banner_tells_the_depth() -> None:
    auto = banner(depth="auto")
    assert "drafts   auto (follows measured cost and acceptance), head from /m/" in auto
    assert "drafts   0 tokens per step, head from /m/" in banner(depth=0)
    assert "drafts   none (--enable-mtp turns MTP on)" in banner(depth=0, mtp_enabled=False)


def test_the_banner_tells_what_is_kept() -> None:
    assert "prefixes up to 8.00 GB of earlier prompts and answers are kept\n" in banner()
    assert "in 4 bits: answers that reuse them may differ slightly" in banner(
        kv_cache_quantization=4
    )
    assert "prefixes not kept (--prefix-cache-size is 0)" in banner(prefix_cache_size=0)
    kept = banner(prefix_cache_dir=Path("/p"), prefix_cache_dir_size=16 * 10**9)
    assert "are kept; up to 16.00 GB in /p\n" in kept


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--prefix-cache-dir", "DIR", "--prefix-cache-size", "0"), "leave one of them out"),
        (("--prefix-cache-dir", "DIR", "--prefix-cache-dir-size", "0"), "leaves no room"),
        (("--prefix-cache-dir-size", "1GB"), "--prefix-cache-dir, which is not given"),
        (("--prefix-cache-dir", "FILE"), "--prefix-cache-dir .* can't be used"),
        (("--prefix-cache-dir", "LINK"), "is a symbolic link"),
        (("--prefix-cache-dir", "OPEN"), "can be written by others"),
    ],
)
def test_a_prefix_cache_dir_that_makes_no_sense_is_refused_before_the_weights_are_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    told: str,
) -> None:
    (tmp_path / "DIR").mkdir(mode=0o700)
    (tmp_path / "FILE").touch()
    (tmp_path / "LINK").symlink_to(tmp_path / "DIR")
    (tmp_path / "OPEN").mkdir()
    (tmp_path / "OPEN").chmod(0o777)
    monkeypatch.setattr(loader.mx, "eval", lambda *_: pytest.fail("the weights are read"))
    named = [str(tmp_path / f) if (tmp_path / f).exists() else f for f in flags]
    assert cli.main(["serve", "--port", "0", *named], {}) == 2
    assert re.search(told, capsys.readouterr().err)
    assert list((tmp_path / "DIR").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("8GB", 8 * 10**9), ("1.5 GiB", 3 << 29), ("512mb", 512 * 10**6), ("7", 7)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse(cli.SERVE_FLAGS, "--prefix-cache-size", text).prefix_cache_size == size


_OFF = "but MTP is off: add --enable-mtp"


@pytest.mark.parametrize(
    ("argv", "variables", "told"),
    [
        ("serve --mtp-num-draft-tokens 3", {}, f"--mtp-num-draft-tokens is for .*{_OFF}"),
        ("serve --mtp-num-draft-tokens auto", {}, _OFF),
        ("serve", {"MTP_NUM_DRAFT_TOKENS": "2"}, f"--mtp-num-draft-tokens is for .*{_OFF}"),
        ("serve --calibration-seconds 2", {}, f"--calibration-seconds is for .*{_OFF}"),
        ("serve --no-enable-mtp --mtp-draft-vocab 9", {"ENABLE_MTP": "1"}, _OFF),
        (
            "serve --enable-mtp --calibration-seconds 3 --mtp-num-draft-tokens 1",
            {},
            "for --mtp-num-draft-tokens auto, and that is 1: leave one of them out",
        ),
        (
            "serve --prefix-cache-size 0 --kv-cache-quantization 4",
            {},
            "--kv-cache-quantization stores in 4 bits .*: leave one of them out",
        ),
        ("serve --kv-cache-quantization 8", {"PREFIX_CACHE_SIZE": "0"}, "in 8 bits .* turns that"),
        ("generate hi --no-enable-mtp --mtp-num-draft-tokens 1", {}, _OFF),
        ("generate hi", {"ENABLE_MTP": "0", "MTP_NUM_DRAFT_TOKENS": "1"}, _OFF),
        ("bench offline --depths 1,2 --calibration-seconds 1", {}, "auto: add it to --depths"),
    ],
)
def test_a_flag_without_effect_is_refused_before_anything_is_loaded(
    argv: str,
    variables: dict[str, str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "load", lambda *_, **__: pytest.fail("loaded"))
    environ = {f"MLX_MTP_{name}": value for name, value in variables.items()}
    assert cli.main(argv.split(), environ) == 2
    error = capsys.readouterr().err
    assert re.search(told, error), error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "variables"),
    [
        ("serve --mtp-num-draft-tokens 0 --calibration-seconds 0 --cache-dir DIR", {}),
        ("serve --enable-mtp --calibration-seconds 0 --mtp-num-draft-tokens 1", {}),
        ("serve --enable-mtp --calibration-seconds 1 --mtp-draft-vocab 9", {}),
        ("serve --prefix-cache-size 0 --kv-cache-quantization none", {}),
        ("serve", {"ENABLE_MTP": "1", "MTP_NUM_DRAFT_TOKENS": "2"}),
        ("generate hi --no-enable-mtp --mtp-num-draft-tokens 0", {}),
        ("generate hi --mtp-num-draft-tokens 1", {}),
        ("bench offline --depths 1 --calibration-seconds 0", {}),
        ("bench offline --depths 1", {}),
    ],
)
def test_flags_that_agree_are_not_refused(
    argv: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class LoadedError(Exception):
        pass

    def load(*_: object, **__: object) -> None:
        raise LoadedError

    monkeypatch.setattr(parts, "load", load)
    words = argv.split() + (["--port", "0"] if argv.startswith("serve") else [])
    with pytest.raises(LoadedError):
        cli.main(words, {f"MLX_MTP_{name}": value for name, value in variables.items()})


def options(**more: object) -> argparse.Namespace:
    return argparse.Namespace(**(vars(parse(cli.GENERATE_FLAGS)) | {"prompt": "hi"} | more))


def test_generate_prints_the_answer_and_then_its_speed(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(answer(tokenizer.encode("Hello, 🎉! And more.")))
    asked = options(system="Be kind.", stop=" And", temperature=0.5, seed=3, max_tokens=99)
    assert stream_answer(engine, tokenizer, {"top_k": 20}, asked) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello, 🎉!\n"
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s", captured.err)
    assert re.search(r"\d+ of \d+ drafts accepted \(\d+%\), depth 2\]", captured.err)
    (request,) = engine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 20, 3)
    text = b"".join(map(tokenizer.token_bytes, request.prompt_token_ids)).decode()
    assert "Be kind." in text


@pytest.mark.parametrize(
    ("context", "asked", "given"), [(64, None, None), (4096, None, 512), (4096, 700, 700)]
)
def test_generate_takes_the_room_that_there_is(
    tokenizer: Tokenizer, context: int, asked: int | None, given: int | None
) -> None:
    engine = FakeEngine(answer([300]), FakeInfo(max_model_len=context))
    more = {} if asked is None else {"max_tokens": asked}
    assert stream_answer(engine, tokenizer, {}, options(**more)) == 0
    (request,) = engine.submitted
    room = context - len(request.prompt_token_ids)
    assert request.sampling.max_tokens == (given or room)


def test_generate_ends_when_the_engine_dies_silently(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "PATIENCE", 0.01)
    engine = FakeEngine(answer([300]))

    def dying() -> None:
        engine.unhealthy_reason = "the engine's thread died: it was ill"

    engine.script = lambda _: (dying() for _ in itertools.count())
    with pytest.raises(EngineStoppedError, match="it was ill"):
        stream_answer(engine, tokenizer, {}, options())


def test_generate_refuses_what_the_server_would_refuse(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(answer([300]))
    with pytest.raises(Exception, match="top_p"):
        stream_answer(engine, tokenizer, {}, options(top_p=2.0))
    with pytest.raises(Exception, match=r"stop\[0\]"):
        stream_answer(engine, tokenizer, {}, options(stop="x" * 300))


def test_the_speed_leaves_out_the_first_step() -> None:
    stream = OutputStream(0, Detokenizer(lambda _: b"x"), PlainParser())
    stream.push(out(5, 5, 5, 5, 5, finish="length"))
    times = [(11.0, 1), (12.0, 3), (13.0, 5)]
    off, auto = FakeInfo(mtp_enabled=False), FakeInfo(num_draft_tokens="auto")
    start = "[5 tokens, 2.0 tokens/s; prompt of 3 tokens in 1.00 s; "
    assert summary(stream, 3, 10.0, times, off) == start + "no drafts]"
    assert summary(stream, 3, 10.0, times, auto) == start + "no drafts, depth auto]"


def test_generate_goes_without_a_head_unless_one_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def load(_: argparse.Namespace, *, enable_mtp: bool) -> tuple[object, object]:
        asked.append(enable_mtp)
        if enable_mtp:
            raise MissingHeadError("there is no head")
        return SimpleNamespace(generation_config={}), object()

    monkeypatch.setattr(parts, "load", load)
    monkeypatch.setattr(parts, "engine", lambda *_, **__: None)
    monkeypatch.setattr("mlx_mtp.terminal.stream_answer", lambda *_: 0)
    assert cli.main(["generate", "hi"], {}) == 0
    assert asked == [True, False]
    assert cli.main(["generate", "hi", "--no-enable-mtp"], {}) == 0
    assert asked == [True, False, False]
    for more in (["--enable-mtp"], ["--mtp-num-draft-tokens", "2"], ["--mtp-draft-vocab", "9"]):
        assert cli.main(["generate", "hi", *more], {}) == 2
        assert "there is no head" in capsys.readouterr().err


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`mlx-mtp serve` for real: the process, its address, what it printed."""
    depth = ["--mtp-num-draft-tokens", "2"]
    argv = [*COMMAND, "serve", "--enable-mtp", *depth, "--port", "0", "--api-key", "k"]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
    )
    assert process.stdout is not None
    # A server that never gets ready is ended, which ends the reading below.
    timer = threading.Timer(120, process.kill)
    timer.start()
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("  -d "):
            break
    timer.cancel()
    try:
        yield process, re.search(r"address +(\S+)", printed)[1], printed
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_serve_for_real(server: tuple[subprocess.Popen[str], str, str]) -> None:
    process, address, printed = server
    assert "mlx-mtp-demo" in printed
    assert "2 tokens per step" in printed
    assert httpx.get(f"{address}/health", timeout=60).json() == {"status": "ok"}
    _, url, *flags = shell_words(printed[printed.index("curl ") :])
    *headers, body = flags[1::2]
    sent = dict(header.replace("$MLX_MTP_API_KEY", "k").split(": ") for header in headers)
    answer = httpx.post(url, content=body, headers=sent, timeout=60).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["timings"]["draft_n_accepted"] > 0
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_generate_for_real() -> None:
    argv = [*COMMAND, "generate", "Tell me a story.", "--max-tokens", "12", "--temperature", "0"]
    argv += ["--mtp-num-draft-tokens", "2"]
    result = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert len(result.stdout.split()) > 5
    assert re.search(r"12 tokens, [\d.]+ tokens/s.*drafts accepted", result.stderr)


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """Something to write to that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def test_generate_ends_quietly_when_nobody_reads(closed_pipe: int) -> None:
    argv = [*COMMAND, "generate", "Tell me a story.", "--max-tokens", "12"]
    result = subprocess.run(
        argv, stdout=closed_pipe, stderr=subprocess.PIPE, text=True, check=False
    )
    assert result.returncode == 141
    assert "Error" not in result.stderr
    assert "Exception" not in result.stderr


def test_serve_goes_on_when_nobody_reads_its_banner(closed_pipe: int) -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    argv = [*COMMAND, "serve", "--port", str(port)]
    process = subprocess.Popen(argv, stdout=closed_pipe, stderr=subprocess.PIPE, text=True)
    try:
        transport = httpx.HTTPTransport(retries=10)  # With growing waits, until it listens.
        with httpx.Client(transport=transport, timeout=60) as client:
            for _ in range(3):
                answer = client.get(f"http://127.0.0.1:{port}/health")
                assert answer.json() == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "BrokenPipe" not in errors
