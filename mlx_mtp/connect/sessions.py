"""Each client's environment and flags for one session with a server; its files don't change."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mlx_mtp.connect.clients import CLIENTS, KEY_VARIABLE, NAME, Served

NO_KEY = "none"  # for clients that demand a key


class SessionStart(NamedTuple):
    """The server and the folder of a client's session."""

    served: Served
    key: str  # the server's, or `NO_KEY`
    folder: Path  # initially empty; removed after the session


class SessionSetup(NamedTuple):
    """The environment variables and arguments that a client is started with."""

    variables: Mapping[str, str]
    arguments: tuple[str, ...]


class Launcher(NamedTuple):
    """A client that can be set up for one session."""

    program: str
    install: str  # the command that installs it
    session: Callable[[SessionStart], SessionSetup]


def _opencode(start: SessionStart) -> SessionSetup:
    config = json.dumps(CLIENTS["opencode"].config(start.served))
    return SessionSetup({"OPENCODE_CONFIG_CONTENT": config, KEY_VARIABLE: start.key}, ())


def _claude(start: SessionStart) -> SessionSetup:
    variables = dict(CLIENTS["claude"].config(start.served)["env"])
    # The user's own settings would take precedence over the environment, but not over this flag.
    variables.pop("ANTHROPIC_AUTH_TOKEN", None)
    settings = json.dumps({"env": variables})
    return SessionSetup({**variables, "ANTHROPIC_AUTH_TOKEN": start.key}, ("--settings", settings))


def _codex(start: SessionStart) -> SessionSetup:
    config = CLIENTS["codex"].config(start.served)
    provider = config.pop("model_providers")[NAME]
    # A JSON string is also a TOML string.
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = {name: json.dumps(value) for name, value in config.items()}
    settings[f"model_providers.{NAME}"] = f"{{{table}}}"
    words = [word for each in settings.items() for word in ("-c", "=".join(each))]
    return SessionSetup({KEY_VARIABLE: start.key}, tuple(words))


def _aider(start: SessionStart) -> SessionSetup:
    served, known = start.served, start.folder / "models.json"
    model = f"openai/{served.model}"
    limits = {"max_input_tokens": served.context, "max_output_tokens": served.answer_tokens}
    facts = {"litellm_provider": "openai", "mode": "chat"}
    known.write_text(json.dumps({model: {**limits, **facts}}))
    variables = {"OPENAI_API_BASE": served.openai_url, "OPENAI_API_KEY": start.key}
    return SessionSetup(variables, ("--model", model, "--model-metadata-file", str(known)))


def _qwen(start: SessionStart) -> SessionSetup:
    variables = {"OPENAI_BASE_URL": start.served.openai_url, "OPENAI_API_KEY": start.key}
    return SessionSetup(variables, ("--auth-type", "openai", "--model", start.served.model))


def _llm(start: SessionStart) -> SessionSetup:
    served = start.served
    model = {"model_id": NAME, "model_name": served.model, "api_base": served.openai_url}
    # A JSON list is also a YAML list.
    (start.folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
    variables = {"LLM_USER_PATH": str(start.folder), "OPENAI_API_KEY": start.key}
    return SessionSetup(variables, ("chat", "-m", NAME))


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
