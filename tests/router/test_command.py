"""The command line for several models: names, the processes' settings, and refused flags."""

import argparse
import asyncio
import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from mlx_mtp.cli.model_flags import (
    child_command,
    directory_of,
    model_options,
    models_of_flags,
    shared_options,
    wants_router,
)
from mlx_mtp.config import RouterConfig, from_options
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import CommandParser, arguments_of, duration
from mlx_mtp.inspect import needs
from mlx_mtp.logs import log_again
from mlx_mtp.options import SERVE_FLAGS
from mlx_mtp.server.merged import merged_live, merged_metrics, merged_stream
from mlx_mtp.settings import add_settings, resolve


def given_by(*words: str, **environ: str) -> argparse.Namespace:
    parser = CommandParser()
    add_settings(parser, *SERVE_FLAGS)
    parser.set_defaults(command="serve", environ={"MLX_MTP_CONFIG": "", **environ})
    return parser.parse_args(words)


def parsed(*words: str, **environ: str) -> argparse.Namespace:
    given = given_by(*words, **environ)
    return resolve(given, SERVE_FLAGS, given.environ)


def models_of(*words: str, **environ: str) -> Any:
    options = parsed(*words, **environ)
    return models_of_flags(options, from_options(RouterConfig, options))


def test_models_have_the_names_that_tell_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(*words: str, **environ: str) -> list[tuple[str, ...]]:
        return [model.names for model in models_of(*words, **environ)]

    assert names("org/a", "fast=org/b") == [("org/a", "a"), ("fast",)]
    assert names("org/a", "other/a") == [("org/a",), ("other/a",)]
    assert names("--keep-alive", "5m") == [("mlx-mtp-demo",)]
    more = names("org/x", MLX_MTP_MODELS="org/y,z=org/z")
    assert more == [("org/x", "x"), ("org/y", "y"), ("z",)]
    assert names("org/a", "--keep-alive", "0", "--served-model-name", "n") == [("n",)]
    (tmp_path / "c=d").mkdir()
    monkeypatch.chdir(tmp_path)
    (model,) = models_of("c=d", "--keep-alive", "0")
    assert (model.names, model.source) == (("c=d",), str(tmp_path / "c=d"))
    monkeypatch.setattr("mlx_mtp.cli.model_flags.cached_models", lambda: ["org/a", "org/b"])
    every = models_of("org/b", "--all", "--pinned", "a")
    assert [(m.name, m.is_found, m.pinned) for m in every] == [
        ("org/b", False, False),
        ("org/a", True, True),
    ]
    for words, fault in (
        (("org/a", "org/a"), "Two models have the name"),
        (("org/a", "org/b", "--served-model-name", "n"), "for one model"),
        (("org/a", "org/b", "--pinned", "c"), "no such model"),
        (("org/a", "qwen3.6-53b"), "Names like it: qwen3.6-35b"),
    ):
        with pytest.raises(UsageError, match=fault):
            models_of(*words)


def test_one_model_stays_in_one_process_unless_flags_say_otherwise() -> None:
    assert not wants_router(parsed("a"))
    assert not wants_router(parsed("a", "--no-all"))
    for words in (("a", "b"), ("--all",), ("a", "--keep-alive", "forever")):
        assert wants_router(parsed(*words))
    for flag, value in (("--pinned", "a"), ("--switch-after", "3"), ("--model-timeout", "3")):
        with pytest.raises(UsageError, match=f"{flag} is for several models"):
            wants_router(parsed("a", flag, value))


def test_a_process_gets_what_was_given_but_not_what_is_the_parents(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    given = (
        *("org/a", "org/b", "--port", "9", "--api-key", "secret", "--memory-limit", "9GB"),
        *("--max-num-seqs", "3", "--no-enable-mtp", "--prefix-cache-dir", str(folder)),
        *("--kv-cache-quantization", "none", "--drain-timeout", "2.5", "--pinned", "org/a"),
        *("--temperature", "0.5", "--chat-template-kwargs", '{"a": true}', "--log-file", "log"),
        *("--chat-template", str(tmp_path / "template")),
    )
    options = parsed(*given, MLX_MTP_DTYPE="float32", MLX_MTP_SEED="5")
    model, _ = models_of_flags(options, from_options(RouterConfig, options))
    model.share = 1234
    command = child_command(options, model, 2)
    words = command[command.index("serve") + 1 :]
    child = parsed(*words)
    child.environ, child.chat_template = options.environ, str(child.chat_template)
    different = {key for key in vars(child) if getattr(child, key) != getattr(options, key)}
    assert different == {
        *("models", "port", "api_key", "memory_limit", "pinned", "served_model_name", "given"),
        *("prefix_cache_dir", "prefix_cache_dir_size", "log_format", "log_file"),
    }
    assert (child.model, child.served_model_name) == ("org/a", ("org/a", "a"))
    assert (child.memory_limit, child.prefix_cache_dir_size) == (1234, 8 * 10**9)
    assert Path(child.prefix_cache_dir).parent == folder
    assert not any("secret" in word for word in command)
    assert arguments_of(parsed("a"), SERVE_FLAGS) == ["--model=a"]


def test_a_models_own_settings_are_for_its_process_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        'dtype = "float32"\n[serve]\nport = 5\nmodels = ["org/b"]\n'
        '[models."org/a"]\nport = 6\nmax-model-len = 512\n'
        '[models."org/b".serve]\ntemperature = 0.5\n'
    )
    given = given_by("fast=org/a", MLX_MTP_CONFIG=str(file))
    options = shared_options(given)
    assert (options.port, options.max_model_len, options.temperature) == (5, None, None)
    models = models_of_flags(options, from_options(RouterConfig, options))
    assert [model.name for model in models] == ["fast", "org/b"]
    for model, words in zip(models, ("--max-model-len=512", "--temperature=0.5")):
        command = child_command(model_options(given, model), model, 2)
        assert {words, "--dtype=float32"} <= {*command}
        assert not any("--port" in word for word in command)
    assert directory_of(models[0]).endswith("models--org--a")
    file.write_text('[models."org/a"]\nmodels = ["org/b"]\n')
    with pytest.raises(UsageError, match="can't have a setting 'models'"):
        shared_options(given)


def test_durations() -> None:
    values = {"10m": 600, "0": 0, "90": 90, "1.5h": 5400, "1h30m": 5400, "2s": 2}
    for text, seconds in {**values, "forever": math.inf, "-1": math.inf, "-5m": math.inf}.items():
        assert duration(text) == seconds
    for text in ("", "m", "10 m", "soon", "1m1", "1d", "-x"):
        with pytest.raises(argparse.ArgumentTypeError):
            duration(text)


def test_needs_are_told_for_each_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {"dtype": "float32", "max_model_len": 512, "prefill_step_size": None}
    options |= {"prefix_cache_size": 0, "enable_mtp": None}
    models = [{"source": source, **options} for source in (None, str(tmp_path))]
    needs.tell_needs(json.dumps({"memory_limit": 10**10, "models": models}))
    limit, good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert limit == {"limit": 10**10, "source": "--memory-limit"}
    assert good["weights"] < good["nbytes"] < 10**9
    assert (good["model"], good["context"], good["kind"]) == (0, 512, "qwen3_next")
    assert "config.json" in bad["refusal"]


def test_lines_of_a_process_are_logged_again_with_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("mlx_mtp.test")
    line = {"time": "x", "level": "warning", "message": "50% of it", "exception": "E", "n": 3}
    assert log_again(logger, json.dumps(line), "m") == "50% of it\nE"
    assert log_again(logger, "a %s traceback", "m") == "a %s traceback"
    assert log_again(logger, "  ", "m") == ""
    first, second = caplog.records
    assert first.getMessage() == r"m: 50% of it\nE"
    assert (first.levelname, first.args) == ("WARNING", {"model": "m", "exception": "E", "n": 3})
    assert (second.levelname, second.getMessage()) == ("INFO", "m: a %s traceback")


def test_metrics_and_messages_of_several_are_merged() -> None:
    one = '# HELP a x\n# TYPE a gauge\na 1.0\n# HELP b y\n# TYPE b counter\nb{le="1"} 2.0\n'
    assert merged_metrics("", {"m": one, 'n"': one}) == (
        '# HELP a x\n# TYPE a gauge\na{model="m"} 1.0\na{model="n\\""} 1.0\n'
        '# HELP b y\n# TYPE b counter\nb{model="m",le="1"} 2.0\nb{model="n\\"",le="1"} 2.0\n'
    )
    server = {"context": 5, "most_rows": 2, "drafts": 1, "restarts": 1}
    message = merged_live({}) | {"server": server, "rows": [{"id": "r"}], "running": 1}
    message["drafts"] = {"sources": {"mtp": {"tried": [3, 1]}}, "choice": {"num_rows": 2}}
    merged = merged_live({"m": message, "n": message})
    assert merged["rows"] == [{"id": "r", "model": "m"}, {"id": "r", "model": "n"}]
    assert merged["drafts"] == {
        "sources": {"mtp": {"tried": [6, 2]}},
        "choice": {"num_rows": 2},
    }
    assert merged["running"] == merged["server"]["restarts"] == 2
    assert merged["server"]["context"] == 5


def test_live_of_a_process_that_broke_off_is_asked_again(tmp_path: Path) -> None:
    path, num_asked = tmp_path / "socket", 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        with contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            if num_asked == 1:
                return
            message = b"data: %b\n\n" % json.dumps(merged_live({}) | {"running": 1}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(message) + 1))
            writer.write(message)
            await reader.read()  # The body's last byte never comes.

    async def first_running() -> None:
        stream = contextlib.aclosing(merged_stream(lambda: {"m": path}))
        async with (
            asyncio.timeout(60),
            await asyncio.start_unix_server(serve, path),
            stream as messages,
        ):
            async for message in messages:
                if message["running"]:
                    return

    asyncio.run(first_running())
    assert num_asked == 2
