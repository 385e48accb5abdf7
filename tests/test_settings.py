"""The settings file: each flag of each command, precedence, and errors in a file."""

import argparse
import re
from pathlib import Path

import flags_doc
import pytest

from mlx_mtp.cli.banner import off_text
from mlx_mtp.cli.main import main
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag
from mlx_mtp.options import COMMAND_FLAGS, check_serve
from mlx_mtp.settings import read_settings, resolve, settings_path

TEXTS = {"--cors-origin": "https://chat.example:7", "--kv-cache-quantization": "8"}
TEXTS |= {"--mtp-optimistic": "0.7", "--top-p": "0.7", "--min-p": "0.7"}
TEXTS["--chat-template-kwargs"] = '{"preserve_thinking": true}'


def toml_of(flag: Flag) -> tuple[str, str]:
    """Returns a value of the flag, as a variable has it and as TOML."""
    if flag.parse is None:
        return ("false", "false") if flag.default else ("true", "true")
    text = flag.parse[-1] if isinstance(flag.parse, tuple) else TEXTS.get(flag.name, "7")
    quoted = f"'{text}'" if isinstance(flag.convert(text), str | Path | dict) else text
    return text, f"[{quoted}]" if flag.repeated else quoted


@pytest.fixture
def written(tmp_path: Path):
    """Returns a function that writes a settings file, and returns the variable that names it."""

    def write(text: str, mode: int = 0o600) -> dict[str, str]:
        path = tmp_path / "config.toml"
        path.write_text(text)
        path.chmod(mode)
        return {"MLX_MTP_CONFIG": str(path)}

    return write


def resolved(command: str, environ: dict[str, str], **typed: object) -> argparse.Namespace:
    return resolve(argparse.Namespace(command=command, **typed), COMMAND_FLAGS[command], environ)


@pytest.mark.parametrize("command", COMMAND_FLAGS)
def test_each_flag_comes_from_a_variable_and_from_each_table(command, written):
    for flag in COMMAND_FLAGS[command]:
        text, value = toml_of(flag)
        expected = getattr(resolved(command, {flag.variable: text}), flag.key)
        assert expected != flag.default
        # At the top level `models` is the table of the models.
        tables = ["", f"[{command}]"][flag.key == "models" :]
        if flag.key not in ("model", "models", "all") and command in ("serve", "generate", "chat"):
            tables += ["[models.mlx-mtp-demo]", f"[models.mlx-mtp-demo.{command}]"]
        for heading in tables:
            environ = written(f"{heading}\n{flag.toml_key} = {value}\n")
            options = resolved(command, environ)
            assert getattr(options, flag.key) == expected
            where = heading.replace("mlx-mtp-demo", '"mlx-mtp-demo"')
            assert options.given == {flag.key: f"{environ['MLX_MTP_CONFIG']} {where}".rstrip()}


def test_config_help_and_the_page_show_the_same_flags(written, capsys, monkeypatch):
    """The page has the commands with many flags; --api-key of the others can be a setting."""
    monkeypatch.setenv("COLUMNS", "200")
    page = flags_doc.page()
    for command, flags in COMMAND_FLAGS.items():
        names = [flag.toml_key for flag in flags]
        assert main(["config", command], {"MLX_MTP_CONFIG": ""}) == 0
        rows = capsys.readouterr().out.partition("\n\n")[2]
        assert re.findall(r"^([a-z-]+) ", rows, re.MULTILINE) == names
        assert rows.count("(default)") == len(names)
        words = ["bench", "latency"] if command == "bench" else [command]
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"], {})
        shown = capsys.readouterr().out
        in_help = set(re.findall(r"^  (?:--)?([a-z-]+)", shown.lower(), re.MULTILINE))
        assert {*names} <= in_help
        if command in ("serve", "generate", "chat"):
            assert in_help - {*names} <= {"-h", "prompt"}
            section = page.partition(f"## `mlx-mtp {command} ")[2].partition("\n## ")[0]
            listed = re.findall(r"^\| `(?:--)?([a-z-]+)", section.lower(), re.MULTILINE)
            assert listed == names


def test_the_most_special_table_wins_and_config_says_which(written, capsys):
    environ = written(
        "port = 1\nmax-num-seqs = 1\nmemory-limit = '1GB'\nseed = 1\ndtype = 'float16'\n"
        "api-key = 'top-secret'\n[serve]\nport = 2\nmodel = 'Org/Name/'\nmax-num-seqs = 2\n"
        "seed = 2\n[models.'org/name']\nport = 3\nseed = 3\n[models.'org/name'.serve]\nport = 4\n"
        "[models.other]\nport = 5\n"
    )
    environ["MLX_MTP_DTYPE"] = "bfloat16"
    assert main(["config"], environ) == 0
    shown = capsys.readouterr().out
    file = environ["MLX_MTP_CONFIG"]
    assert "top-secret" not in shown and f"The settings file is {file} (" in shown
    for key, text in {
        "model": f"Org/Name/ ({file} [serve])",
        "port": f'4 ({file} [models."org/name".serve])',
        "seed": f'3 ({file} [models."org/name"])',
        "max-num-seqs": f"2 ({file} [serve])",
        "memory-limit": f"1000000000 ({file})",
        "dtype": "bfloat16 (MLX_MTP_DTYPE)",
        "api-key": f"not shown ({file})",
        "host": "127.0.0.1 (default)",
    }.items():
        assert re.search(rf"^{key} +{re.escape(text)}$", shown, re.MULTILINE), key
    assert main(["config", "serve", "other"], environ) == 0
    assert re.search(r"^port +5 \(", capsys.readouterr().out, re.MULTILINE)
    assert (resolved("serve", environ, port=9).port, resolved("chat", environ).seed) == (9, 1)


def test_a_flag_without_effect_beside_a_setting_says_where_that_is(written):
    environ = written("[models.mlx-mtp-demo]\nmtp-draft-vocab = 100\n")
    with pytest.raises(UsageError) as failure:
        check_serve(resolved("serve", environ, enable_mtp=False))
    where = f'{environ["MLX_MTP_CONFIG"]} [models."mlx-mtp-demo"]'
    off = resolved("serve", written("enable-mtp = false"))
    assert off_text(off, "mtp") == f"off: --no-enable-mtp (from {environ['MLX_MTP_CONFIG']})"
    assert str(failure.value).endswith(f"(--mtp-draft-vocab is from {where}).")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("prot = 1", "config.toml: can't have a setting 'prot'; did you mean port?"),
        ("[serv]\nport = 1", "can't have a setting 'serv'; did you mean serve?"),
        ("[serve]\nmax_model_len = 5", "[serve] can't have a setting 'max_model_len'; did you"),
        (
            "[serve]\nstop = 'x'",
            "[serve] can't have a setting 'stop'; generate and chat can have it",
        ),
        ("[connect]\nport = 1", "[connect] can't have a setting 'port'; serve can have it."),
        ("[models.x]\nmodel = 'y'", "[models.x] can't have a setting 'model'"),
        ("[models.'a/b'.chat]\nprot = 1", "[models.\"a/b\".chat] can't have a setting 'prot'."),
        ("models = 5", 'models must be tables, such as [models."org/name"].'),
        ("models.x = 5", "[models.x] must be a table of settings."),
        ("serve = 5", "[serve] must be a table of settings."),
        ("port = true", "port is wrong: it must be a text in quotes or a number."),
        ("port = [1]", "port is wrong: it must be a text in quotes or a number."),
        ("port = 70000", "port is wrong: 70000 is not between 0 and 65535."),
        ("port = 1.5", "port is wrong: '1.5' is not an integer."),
        ("seed = 1979-05-27", "seed is wrong: it must be a text in quotes or a number."),
        ("host = 127", "host is wrong: it must be a text, in quotes."),
        ("page = 'yes'", "page is wrong: it must be true or false, without quotes."),
        ("enable-mtp = 1", "enable-mtp is wrong: it must be true or false, without quotes."),
        ("allowed-host = 'a'", 'allowed-host is wrong: it must be a list of texts, such as ["on'),
        ("allowed-host = [1]", "allowed-host is wrong: it must be a text, in quotes."),
        ("allowed-host = ['http://a']", "allowed-host is wrong: 'http://a' is not a host name"),
        ("dtype = 'int8'", "dtype is wrong: 'int8' is not one of auto, float32"),
        ("memory-limit = '48 apples'", "'48 apples' is not a size such as 8GB"),
        ("api-key = 5", "api-key is wrong: it must be a text, in quotes."),
        ("api-key = ' '", "api-key is wrong: the key must not begin or end with white space"),
        ("port 1", "is not valid TOML: Expected '=' after a key"),
        ("port = 1\nport = 2", "is not valid TOML: Cannot overwrite a value"),
        ("port = " + "[" * 9000, "is not valid TOML"),
        ("port = 1" + "0" * 5000, "is not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(text, error, written, capsys):
    assert main(["top"], written(text)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("mlx-mtp: ") and error in shown and shown.count("\n") == 1


def test_which_file_is_read(written, tmp_path, monkeypatch, capsys):
    key = "[models.x.chat]\napi-key = 'k'\n"
    for mode, refused in ((0o600, False), (0o640, True), (0o604, True)):
        assert (main(["config"], written(key, mode)) == 2) == refused
        assert ("other users may read it: chmod 600" in capsys.readouterr().err) == refused
        read_settings(written("port = 1", mode))
    monkeypatch.setattr("mlx_mtp.settings.USER_FILE", tmp_path / "none.toml")
    assert read_settings({}).tables == read_settings({"MLX_MTP_CONFIG": ""}).tables == {}
    (tmp_path / "none.toml").write_bytes(b"port = 1")
    assert resolved("serve", {}).port == 1
    assert resolved("serve", {"MLX_MTP_CONFIG": ""}).port == 8000
    assert settings_path({"MLX_MTP_CONFIG": "~/x"}) == Path.home() / "x"
    (tmp_path / "none.toml").write_bytes(b"\xff")
    for path, error in (("none.toml", "is not valid TOML"), ("", "can't be read: Is a directory")):
        assert main(["config"], {"MLX_MTP_CONFIG": f"{tmp_path}/{path}"}) == 2
        assert error in capsys.readouterr().err
    assert main(["config"], {"MLX_MTP_CONFIG": str(tmp_path / "gone")}) == 2
    assert "can't be read: No such file" in capsys.readouterr().err


def test_the_example_of_the_page_is_a_right_one(written):
    page = (Path(__file__).parents[1] / "docs/settings.md").read_text("utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    options = resolved("serve", written(example))
    assert (options.port, options.max_num_seqs, options.max_model_len) == (8001, 8, 65536)
