"""The command `mlx-mtp top`: shows what a running server does, from /live, as its page does."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlx_mtp.bench.answer import timed_events
from mlx_mtp.connect.command import URL
from mlx_mtp.console import one_line, say, size_text
from mlx_mtp.errors import UNEXPECTED, BenchError, UsageError
from mlx_mtp.flags import nonempty_text
from mlx_mtp.options import CLIENT_KEY
from mlx_mtp.settings import add_settings, resolve

if TYPE_CHECKING:
    import httpx
    from rich.console import Console, RenderableType

_PATIENCE_SECONDS = 10.0
_LINE_MESSAGES = 4  # messages per line without a terminal: a line every 2 seconds
_BAR = 24  # characters
# Title of each column, and its field in a row of /live.
_COLUMNS = (
    *(("Answer", "id"), ("State", "state"), ("Age", "age"), ("Prompt", "prompt_tokens")),
    *(("Cached", "cached_tokens"), ("Tokens", "tokens"), ("Tokens/s", "tokens_per_second")),
    *(("Drafts", "depth"), ("Accepted", "accepted")),
)
LiveState = dict[str, Any]  # a message of /live


def add_top(commands: Any) -> None:
    """Register `top`."""
    parser = commands.add_parser("top", help="show what a running server does")
    shown = "the server's address (default: %(default)s)"
    parser.add_argument(
        "url", metavar="URL", nargs="?", type=nonempty_text, default=URL, help=shown
    )
    add_settings(parser, CLIENT_KEY)
    parser.set_defaults(run=_top, environ=None)


def _top(given: argparse.Namespace) -> int:
    import httpx
    from rich.console import Console

    key = resolve(given, [CLIENT_KEY], given.environ).api_key
    headers = {b"Authorization": f"Bearer {key}".encode()} if key else {}
    url = given.url if "//" in given.url else f"http://{given.url}"
    url = url.rstrip("/").removesuffix("/v1")  # Clients are configured with /v1.
    console = Console()
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=_PATIENCE_SECONDS) as client:
            _watch(_states(client), console)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(f"No server answers at {url} ({error}).") from None
    except (BenchError, *UNEXPECTED):
        raise UsageError(
            f"What answers at {url} is not an mlx-mtp server of this version: its /live differs."
        ) from None
    return 0


def _watch(states: Iterator[LiveState], console: Console) -> None:
    from rich.live import Live

    last = None
    if not console.is_terminal:
        for state in itertools.islice(states, None, None, _LINE_MESSAGES):
            if last is not None:  # Rates need two messages.
                say(one_line(_state_line(state, last)))
            last = state
        return
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        for state in states:
            screen.update(_screen(state, last), refresh=True)
            last = state
    console.print("The server has stopped.")


def _states(client: httpx.Client) -> Iterator[LiveState]:
    import httpx

    try:
        with client.stream("GET", "/live") as response:
            if response.status_code == 401:
                raise UsageError("The server requires its API key: pass --api-key.")
            if response.status_code == 429:
                raise UsageError("The server has as many watchers as it takes; close one of them.")
            if response.headers.get("content-type", "").partition(";")[0] != "text/event-stream":
                raise UsageError(f"What answers at {client.base_url} is not an mlx-mtp server.")
            for _, data in timed_events((0.0, part) for part in response.iter_bytes()):
                yield json.loads(data)
    except httpx.RemoteProtocolError:
        return  # The server ended in the middle of a message.


def _per_second(state: LiveState, last: LiveState | None, name: str) -> float:
    if last is None:
        return 0.0
    now, before = state["totals"], last["totals"]
    seconds = now["time"] - before["time"]
    return max(now[name] - before[name], 0) / seconds if seconds > 0 else 0.0


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _state_line(state: LiveState, last: LiveState | None) -> str:
    server, totals = state["server"], state["totals"]
    if not server["context"]:
        return f"{server['state']}: no model is in memory; a request loads one"
    return (
        f"{server['state']}: {state['running']} running, {state['waiting']} waiting; "
        f"answers {_per_second(state, last, 'generation_tokens'):.1f} tokens/s, "
        f"prompts {_per_second(state, last, 'prompt_tokens'):.1f} tokens/s, "
        f"{_percent(totals['accepted'], totals['drafts'])} of drafts accepted"
    )


def _screen(state: LiveState, last: LiveState | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    server, drafts = state["server"], state["drafts"]
    accepted = [  # 16 n-gram drafts fit into 80 columns.
        f"{source:<8}{' '.join(map(_percent, counts['accepted'], counts['tried']))}"
        for source, counts in drafts["sources"].items()
    ]
    states = server.get("states", {})  # only with several models at one address
    models = ", ".join(f"{name} ({state})" for name, state in states.items())
    head = f"{models or server['models'][0]}, mlx-mtp {server['version']}"
    sections = {
        "Drafts accepted, by their position in a step": accepted or ["nothing drafted yet"],
        "Why so many drafts": [_why(drafts["choice"], server["drafts"])],
        "Memory": _memory(state),
        "Prefix cache": [_prefixes_text(state["prefixes"])],
        "Queue and errors": [_queue(state)],
    }
    shown: list[RenderableType] = [Text(one_line(head), style="bold")]
    shown += [Text(_state_line(state, last)), ""]
    if server["context"]:  # falsy while no model is in memory
        shown.append(_row_table(state["rows"]))
        for title, lines in sections.items():
            shown += [Text(title, style="bold"), *map(Text, map(one_line, lines)), ""]
    return Group(*shown, Text("Ctrl-C ends this.", style="dim"))


def _row_table(rows: list[LiveState]) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text("No answer is running.\n")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = ((("Model", "model"),) if "model" in rows[0] else ()) + _COLUMNS
    for number, (title, _) in enumerate(columns):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        values = row | {
            "id": row["id"][-8:],
            "age": f"{row['age']:.1f} s",
            "tokens_per_second": f"{row['tokens_per_second']:.1f}",
            "accepted": _percent(row["accepted"], row["drafts"]),
        }
        table.add_row(*(Text(one_line(str(values[name]))) for _, name in columns))
    return table


def _why(choice: LiveState | None, setting: str | int | None) -> str:
    if setting is None:
        return "nothing is drafted: --drafts says so, or the model has no MTP head"
    if setting != "auto":
        return f"--mtp-num-draft-tokens {setting} fixes the number"
    if choice is None:
        return "no step has been planned yet"
    rows, cost = choice["num_rows"], choice["cost"]
    gain = choice["num_tokens"] / rows
    drafts = " and ".join(f"{n} of {source}" for source, n in choice["drafts"].items() if n)
    return (
        f"{rows} answer{'s' * (rows != 1)} at a time, drafts: {drafts or 'none'}; a step takes "
        f"{cost:.2f} times as long as without drafts and brings {gain:.2f} times as many tokens: "
        f"{gain / cost:.2f} times the speed"
    )


def _memory(state: LiveState) -> list[str]:
    memory, plan = state["memory"], state["memory"]["plan"]
    used = {name: plan[name] for name in ("weights", "head") if name in plan}
    used["prefix cache"] = state["prefixes"]["nbytes"]
    used["requests"] = memory["rows"] * plan.get("requests", 0)
    lines = []
    for name, most in plan.items():
        if most and name in used:
            full = round(_BAR * min(used[name] / most, 1.0))
            share = f"{size_text(int(used[name]))} of {size_text(most)}"
            lines.append(f"{name:<16}{'█' * full}{'░' * (_BAR - full)} {share}")
    return [*lines, f"{size_text(memory['active'])} are in use now"]


def _prefixes_text(prefixes: LiveState) -> str:
    hits, count = _percent(prefixes["hits"], prefixes["queries"]), prefixes["num_entries"]
    return (
        f"{count} prefix{'es' * (count != 1)} in memory, {hits} of prompt tokens found; "
        f"evicted: {_counts_text(prefixes['evicted'])}"
    )


def _queue(state: LiveState) -> str:
    failed = ", ".join(f"{count} of {status} {path}" for path, status, count in state["failures"])
    return (
        f"{state['held']} of {state['capacity']} places taken; "
        f"refused: {_counts_text(state['rejected'])}; errors: {failed or 'none'}"
    )


def _counts_text(by_reason: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in by_reason.items()) or "none"
