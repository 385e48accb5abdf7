"""Each client's environment and flags for one session with a server; no file of its is changed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mlx_mtp.connect.clients import CLIENTS, KEY_VARIABLE, NAME, Served

_NO_KEY = "none"  # for clients that demand some key


class Session(NamedTuple):
    """What a client is started with."""

    variables: Mapping[str, str]
    arguments: tuple[str, ...]


class Launcher(NamedTuple):
    """A client that can be set up for one session."""

    program: str
    install: str  # the command that installs it
    # From the server, its key, and an empty directory that lasts as long as the session.
    session: Callable[[Served, str, Path], Session]


def _opencode(served: Served, key: str, folder: Path) -> Session:
    config = json.dumps(CLIENTS["opencode"].config(served))
    return Session({"OPENCODE_CONFIG_CONTENT": config, KEY_VARIABLE: key}, ())


def _claude(served: Served, key: str, folder: Path) -> Session:
    variables = dict(CLIENTS["claude"].config(served)["env"])
    # The user's own settings would take precedence over the environment, but not over this flag.
    settings = json.dumps({"env": {k: v for k, v in variables.items() if "TOKEN" not in k}})
    variables["ANTHROPIC_AUTH_TOKEN"] = key
    return Session(variables, ("--settings", settings))


def _codex(served: Served, key: str, folder: Path) -> Session:
    config = CLIENTS["codex"].config(served)
    provider = config.pop("model_providers")[NAME]
    # A string of JSON is one of TOML, too.
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = {name: json.dumps(value) for name, value in config.items()}
    settings[f"model_providers.{NAME}"] = f"{{{table}}}"
    words = [word for each in settings.items() for word in ("-c", "=".join(each))]
    return Session({KEY_VARIABLE: key}, tuple(words))


def _aider(served: Served, key: str, folder: Path) -> Session:
    model = f"openai/{served.model}"
    limits = {"max_input_tokens": served.context, "max_output_tokens": served.answer_tokens}
    known = folder / "models.json"
    facts = {"litellm_provider": "openai", "mode": "chat"}
    known.write_text(json.dumps({model: {**limits, **facts}}))
    variables = {"OPENAI_API_BASE": served.openai_url, "OPENAI_API_KEY": key}
    return Session(variables, ("--model", model, "--model-metadata-file", str(known)))


def _qwen(served: Served, key: str, folder: Path) -> Session:
    variables = {"OPENAI_BASE_URL": served.openai_url, "OPENAI_API_KEY": key}
    return Session(variables, ("--auth-type", "openai", "--model", served.model))


def _llm(served: Served, key: str, folder: Path) -> Session:
    model = {"model_id": NAME, "model_name": served.model, "api_base": served.openai_url}
    # A list of JSON is one of YAML, too.
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
    return Session({"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": key}, ("chat", "-m", NAME))


def _npm(package: str) -> str:
    return f"npm install --global {package}"


LAUNCHERS = {
    "opencode": Launcher("opencode", _npm("opencode-ai"), _opencode),
    "claude": Launcher("claude", _npm("@anthropic-ai/claude-code"), _claude),
    "codex": Launcher("codex", _npm("@openai/codex"), _codex),
    "aider": Launcher("aider", "pipx install aider-chat", _aider),
    "qwen": Launcher("qwen", _npm("@qwen-code/qwen-code"), _qwen),
    "llm": Launcher("llm", "pipx install llm", _llm),
}


def session(name: str, served: Served, key: str | None, folder: Path) -> Session:
    """What a client of `LAUNCHERS` is started with; `folder` holds files that it reads."""
    return LAUNCHERS[name].session(served, key or _NO_KEY, folder)
