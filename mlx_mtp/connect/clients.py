"""Each client's configuration for a running server; it names the key's variable, not the key."""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from mlx_mtp.connect import files
from mlx_mtp.connect.files import Config
from mlx_mtp.errors import UNEXPECTED, UsageError

NAME = "mlx-mtp"
KEY_VARIABLE = "MLX_MTP_API_KEY"
_MOST_ANSWER_TOKENS = 32_000
_PATIENCE_SECONDS = 5.0
_MOST_CONTEXT = 1 << 53  # largest integer that JavaScript represents exactly
_TIMEOUT_MS = 600_000  # the default of the SDKs


class Served(NamedTuple):
    """A running server and its model."""

    url: str  # without a path
    model: str
    context: int  # maximum tokens of prompt and answer together
    wants_key: bool
    sees: bool = False  # takes images

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def answer_tokens(self) -> int:
        return min(_MOST_ANSWER_TOKENS, max(1, self.context // 2))


class ClientSetup(NamedTuple):
    """A client that is configured by a file."""

    # The variable that has the directory, the directory in the user's home if the variable is
    # unset, and the file.
    where: tuple[str, str, str]
    config: Callable[[Served], Config]  # the server's part of the file
    changes: str  # a sentence on what else changes for the client
    needed: Mapping[str, Any] = {}  # what a new file must also have
    run: str | None = None  # the command that starts the client, if not its name
    key_variable: str = KEY_VARIABLE  # the variable from which the client reads the key
    demands_key: bool = False  # the variable must be set even if the server has no key
    once: Callable[[Served], str] | None = None  # a command for one session that changes no file


def look_up(url: str, api_key: str | None, model: str | None = None) -> Served:
    """Ask a running server for a model, by default its first.

    Raises UsageError if no mlx-mtp server answers, or if it lacks the model or requires a key.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
    except ValueError:  # as of http://[
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{url} is not an address; it should look like http://127.0.0.1:8000.")
    base = f"{parts.scheme}://{parts.netloc}"
    headers = {b"Authorization": f"Bearer {api_key}".encode()}
    try:
        response = httpx.get(f"{base}/v1/models", timeout=_PATIENCE_SECONDS)
        wants_key = response.status_code == 401
        if wants_key and api_key is not None:
            response = httpx.get(str(response.url), headers=headers, timeout=_PATIENCE_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(
            f"No server answers at {base} ({error}). Start one with `mlx-mtp serve`, or pass its "
            "address with --url."
        ) from None
    if response.status_code == 401:
        fault = "requires its API key: pass --api-key or set MLX_MTP_API_KEY."
        raise UsageError(
            f"The server at {base} {fault if api_key is None else 'refuses this API key.'}"
        )
    try:
        first, *others = response.json()["data"]
        cards = {each["id"]: each for each in (first, *others)}
        name = first["id"] if model is None else model
        if name not in cards:
            raise UsageError(f"The server at {base} has {', '.join(cards)}, and no {name}.")
        card, context = cards[name], cards[name]["max_model_len"]
        if not (isinstance(name, str) and type(context) is int and 0 < context <= _MOST_CONTEXT):
            raise TypeError
    except UNEXPECTED:
        raise UsageError(
            f"What answers at {base} is not an mlx-mtp server: its /v1/models differs."
        ) from None
    if not name or not name.isprintable():
        # In the printed configuration, a line break would end a comment or a command.
        raise UsageError(
            f"The server's model is named {name!r}: no client can be set up for a name with "
            "characters that can't be printed. `mlx-mtp serve --served-model-name` gives another."
        )
    return Served(base, name, context, wants_key, card.get("images") is True)


def _opencode(served: Served) -> Config:
    options = {"baseURL": served.openai_url}
    if served.wants_key:
        options["apiKey"] = f"{{env:{KEY_VARIABLE}}}"
    limit = {"context": served.context, "output": served.answer_tokens}
    provider: Config = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": options,
        "models": {served.model: {"name": served.model, "tool_call": True, "limit": limit}},
    }
    if served.sees:
        kinds = {"input": ["text", "image"], "output": ["text"]}
        provider["models"][served.model] |= {"attachment": True, "modalities": kinds}
    model = f"{NAME}/{served.model}"
    return {"provider": {NAME: provider}, "model": model, "small_model": model}


def _claude(served: Served) -> Config:
    names = [f"ANTHROPIC_DEFAULT_{each}_MODEL" for each in ("OPUS", "SONNET", "HAIKU")]
    env = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_MODEL": served.model,
        **dict.fromkeys((*names, "CLAUDE_CODE_SUBAGENT_MODEL"), served.model),
        # Claude Code assumes a million tokens for an unknown model.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.answer_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(_TIMEOUT_MS),
    }
    if served.wants_key:
        return {"env": env, "apiKeyHelper": f"printenv {KEY_VARIABLE}"}
    # Without a token, Claude Code demands a login.
    return {"env": env | {"ANTHROPIC_AUTH_TOKEN": "none"}}


def _claude_once(served: Served) -> str:
    words = [f"{name}={shlex.quote(value)}" for name, value in _claude(served)["env"].items()]
    if served.wants_key:
        words.append(f'ANTHROPIC_AUTH_TOKEN="${KEY_VARIABLE}"')
    return " \\\n  ".join([*words, "claude"])


def _codex(served: Served) -> Config:
    provider: Config = {"name": NAME, "base_url": served.openai_url, "wire_api": "responses"}
    if served.wants_key:
        provider["env_key"] = KEY_VARIABLE
    model = {"model": served.model, "model_provider": NAME}
    return {**model, "model_context_window": served.context, "model_providers": {NAME: provider}}


def _continue(served: Served) -> Config:
    limits = {"contextLength": served.context, "maxTokens": served.answer_tokens}
    model = {
        "name": f"{NAME}: {served.model}",
        "provider": "openai",
        "model": served.model,
        "apiBase": served.openai_url,
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}" if served.wants_key else "none",
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", *(["image_input"] if served.sees else [])],
        "defaultCompletionOptions": limits,
    }
    return {"models": [model]}


def _aider(served: Served) -> Config:
    config = {"model": f"openai/{served.model}", "openai-api-base": served.openai_url}
    return config if served.wants_key else config | {"openai-api-key": "none"}


def _qwen(served: Served) -> Config:
    model = {"id": served.model, "name": f"{NAME}: {served.model}"}
    model |= {"baseUrl": served.openai_url, "envKey": KEY_VARIABLE}
    config: Config = {
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": served.model},
    }
    # Qwen Code demands a key.
    return config if served.wants_key else config | {"env": {KEY_VARIABLE: "none"}}


def _zed(served: Served) -> Config:
    model = {
        "name": served.model,
        "max_tokens": served.context,
        "max_output_tokens": served.answer_tokens,
        "capabilities": {"tools": True, "images": served.sees, "parallel_tool_calls": True},
    }
    provider = {NAME: {"api_url": served.openai_url, "available_models": [model]}}
    default = {"provider": NAME, "model": served.model}
    return {
        "language_models": {"openai_compatible": provider},
        "agent": {"default_model": default},
    }


CLIENTS = {
    "opencode": ClientSetup(
        ("XDG_CONFIG_HOME", ".config", "opencode/opencode.json"),
        _opencode,
        "The default model of every opencode session is then this server's.",
        {"$schema": "https://opencode.ai/config.json"},
    ),
    "claude": ClientSetup(
        ("CLAUDE_CONFIG_DIR", ".claude", "settings.json"),
        _claude,
        "Every Claude Code session then uses this server, also if you pay Anthropic.",
        once=_claude_once,
    ),
    "codex": ClientSetup(
        ("CODEX_HOME", ".codex", "config.toml"),
        _codex,
        "The default model of every Codex session is then this server's.",
    ),
    "continue": ClientSetup(
        ("CONTINUE_GLOBAL_DIR", ".continue", "config.yaml"),
        _continue,
        "The server's model is added to those that are there.",
        {"name": "Local", "version": "1.0.0", "schema": "v1"},
        run="cn",
    ),
    "aider": ClientSetup(
        ("", "", ".aider.conf.yml"),
        _aider,
        "The model of every aider session is then this server's.",
        key_variable="OPENAI_API_KEY",
    ),
    "qwen": ClientSetup(
        ("", ".qwen", "settings.json"),
        _qwen,
        "The default model of every Qwen Code session is then this server's.",
    ),
    "zed": ClientSetup(
        ("XDG_CONFIG_HOME", ".config", "zed/settings.json"),
        _zed,
        "The agent's default model is then this server's.",
        demands_key=True,
    ),
}


def _api_key(served: Served) -> str:
    return f'"${KEY_VARIABLE}"' if served.wants_key else "none"


def _open_webui(served: Served) -> str:
    return (
        f"OPENAI_API_BASE_URL={served.openai_url} OPENAI_API_KEY={_api_key(served)} \\\n"
        "  ENABLE_OLLAMA_API=False open-webui serve\n\n"
        "# Or in a running one: Admin Panel > Settings > Connections > OpenAI API > +,\n"
        f"# with the URL {served.openai_url}. In a container the host is\n"
        "# host.docker.internal: start the server with --allowed-host of that name.\n"
    )


def _cline(served: Served) -> str:
    return (
        f"cline auth --provider openai --apikey {_api_key(served)} \\\n"
        f"  --baseurl {served.openai_url} --modelid {shlex.quote(served.model)}\n\n"
        "# Or in the editor: Cline's settings > API Provider > OpenAI Compatible, with\n"
        f"# the URL {served.openai_url}, the model {served.model}\n"
        f"# and a context window of {served.context}.\n"
    )


def _llm(served: Served) -> str:
    model = {"model_id": NAME, "model_name": served.model, "api_base": served.openai_url}
    if served.wants_key:
        model["api_key_name"] = NAME
    entry = "\n".join(f"  {name}: {json.dumps(value)}" for name, value in model.items())
    keys = f'llm keys set {NAME} --value "${KEY_VARIABLE}"\n' if served.wants_key else ""
    return (
        f'{keys}cat >> "$(dirname "$(llm logs path)")/extra-openai-models.yaml" <<\'EOF\'\n'
        f"-{entry[1:]}\nEOF\n\n# Then: llm -m {NAME} 'Tell me a story.'\n"
    )


TEXTS = {"open-webui": _open_webui, "cline": _cline, "llm": _llm}
"""Functions that return what to type, for clients without a settings file that can be changed."""


def key_hint(name: str, served: Served) -> str:
    """Returns where to put the server's key for a client; empty if no key is needed."""
    client = CLIENTS.get(name)
    variable = client.key_variable if client else KEY_VARIABLE
    if served.wants_key:
        return f"Set {variable} to the server's API key where the client runs.\n"
    if client and client.demands_key:
        return (
            f"Set {variable} where the client runs, to any text: the server has no key, and the "
            "client does nothing without one.\n"
        )
    return ""


def setup_text(name: str, served: Served, path: Path | None = None) -> str:
    """Returns what to type, or to write to the client's file; `path` defaults to the usual file."""
    hint = key_hint(name, served)
    if name in TEXTS:
        return TEXTS[name](served) + hint
    client = CLIENTS[name]
    path = path or Path("~", *client.where[1:])
    config = client.config(served)
    new = config if path.exists() else {**client.needed, **config}
    mark = "//" if path.suffix == ".json" else "#"
    text = f"{mark} {path}\n{files.config_text(path, new)}{hint}"
    if client.once is None:
        return text
    return (
        f"# For one session, without changing any file:\n{client.once(served)}\n\n"
        f"# For every session; --write does this.\n# {client.changes}\n{text}"
    )
