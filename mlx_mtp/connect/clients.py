"""Each client's configuration: its file, and what goes into it.

A key is never written down: the files name the environment variable that has it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mtp.connect.served import Served

NAME = "mlx-mtp"
KEY_VARIABLE = "MLX_MTP_API_KEY"
_MOST_ANSWER_TOKENS = 32_000
_TIMEOUT_MS = 600_000
"""As long as the SDKs wait by themselves: local models may think for minutes."""

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Client:
    """A client whose configuration is a file.

    Args:
        path: of the file, below the user's home; with XDG_CONFIG_HOME if that is set.
        config: the part of the file that is this server's.
        needed: what has to be there too when the file is new.
        run: how to start it then.
        changes: what else of the client's the file changes, for its user to know before.
        once: a command that uses the server for one session and changes no file, if there is one.
    """

    path: Callable[[Path, Mapping[str, str]], Path]
    config: Callable[[Served], Config]
    run: str
    needed: Config
    changes: str
    once: Callable[[Served], str] | None = None


def _answer_tokens(served: Served) -> int:
    return min(_MOST_ANSWER_TOKENS, max(1, served.context // 2))


def _opencode(served: Served) -> Config:
    options = {"baseURL": served.openai_url}
    if served.wants_key:
        options["apiKey"] = f"{{env:{KEY_VARIABLE}}}"
    limit = {"context": served.context, "output": _answer_tokens(served)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": options,
        "models": {served.model: {"name": served.model, "tool_call": True, "limit": limit}},
    }
    model = f"{NAME}/{served.model}"
    return {"provider": {NAME: provider}, "model": model, "small_model": model}


def _claude(served: Served) -> Config:
    model = served.model
    env = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_MODEL": model,
        # Every name that it may choose by itself, for helpers and titles too.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        # It believes in a million tokens of a model that it doesn't know.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_answer_tokens(served)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(_TIMEOUT_MS),
    }
    if served.wants_key:
        return {"env": env, "apiKeyHelper": f"printenv {KEY_VARIABLE}"}
    # It wants some token, or else a login.
    return {"env": env | {"ANTHROPIC_AUTH_TOKEN": "none"}}


def _claude_once(served: Served) -> str:
    env: dict[str, str] = dict(_claude(served)["env"])
    if served.wants_key:
        env["ANTHROPIC_AUTH_TOKEN"] = f"${KEY_VARIABLE}"
    words = [
        f'{name}="{value}"' if value.startswith("$") else f"{name}={shlex.quote(value)}"
        for name, value in env.items()
    ]
    return " \\\n  ".join([*words, "claude"])


def _codex(served: Served) -> Config:
    provider: Config = {"name": NAME, "base_url": served.openai_url, "wire_api": "responses"}
    if served.wants_key:
        provider["env_key"] = KEY_VARIABLE
    return {
        "model": served.model,
        "model_provider": NAME,
        "model_context_window": served.context,
        "model_providers": {NAME: provider},
    }


def _continue(served: Served) -> Config:
    key = f"${{{{ secrets.{KEY_VARIABLE} }}}}" if served.wants_key else "none"
    model = {
        "name": f"{NAME}: {served.model}",
        "provider": "openai",
        "model": served.model,
        "apiBase": served.openai_url,
        "apiKey": key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {
            "contextLength": served.context,
            "maxTokens": _answer_tokens(served),
        },
    }
    return {"models": [model]}


def _below_config(home: Path, environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "opencode" / "opencode.json"


def _below(variable: str, folder: str, file: str) -> Callable[[Path, Mapping[str, str]], Path]:
    def path(home: Path, environ: Mapping[str, str]) -> Path:
        return Path(environ.get(variable) or home / folder) / file

    return path


CLIENTS: Mapping[str, Client] = {
    "opencode": Client(
        _below_config,
        _opencode,
        "opencode",
        {"$schema": "https://opencode.ai/config.json"},
        "The default model of every opencode session is then this server's.",
    ),
    "claude": Client(
        _below("CLAUDE_CONFIG_DIR", ".claude", "settings.json"),
        _claude,
        "claude",
        {},
        "Every Claude Code session then uses this server, also if you pay for Anthropic's.",
        _claude_once,
    ),
    "codex": Client(
        _below("CODEX_HOME", ".codex", "config.toml"),
        _codex,
        "codex",
        {},
        "The default model of every Codex session is then this server's.",
    ),
    "continue": Client(
        _below("CONTINUE_GLOBAL_DIR", ".continue", "config.yaml"),
        _continue,
        "cn",
        {"name": "Local", "version": "1.0.0", "schema": "v1"},
        "The server's model is added to those that are there.",
    ),
}


def open_webui(served: Served) -> str:
    """How to start Open WebUI: it keeps its connections in a database of its own."""
    key = f'"${KEY_VARIABLE}"' if served.wants_key else "none"
    return (
        f"OPENAI_API_BASE_URL={served.openai_url} OPENAI_API_KEY={key} \\\n"
        "  ENABLE_OLLAMA_API=False open-webui serve\n\n"
        "# Or in a running one: Admin Panel > Settings > Connections > OpenAI API > +,\n"
        f"# with the URL {served.openai_url} (from a container: host.docker.internal for the\n"
        "# host's name, and start the server with --allowed-host host.docker.internal).\n"
    )
