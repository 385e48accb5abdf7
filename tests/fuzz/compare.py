"""Compare two trees: servers of both get the same requests and must give the same answers.

    python -m tests.fuzz.compare --base DIR --seed 40001 --requests 2000 [-- FLAGS of serve]

DIR is another checkout of this repository, and `--tree` is this one. The requests are those of
`tests.fuzz.requests`, sent one at a time; `--only 40001-7` sends one alone. Ids, times and rates
are masked (`masked`). All else must be equal: status, headers, bodies, counts of tokens and drafts;
and at the end the trees' routes, metrics, environment variables and log records.

The number of drafts is fixed, as `auto` depends on measured times and decides how many tokens an
event of a stream has. Load can split a stream's events too, so a request whose answers differ is
repeated: it is reported if the answers differ three times.
"""

import argparse
import contextlib
import difflib
import http.client
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.fuzz import requests
from tests.support.process import running, with_log
from tests.support.raw_http import Answer, incoming, request_bytes

FLAGS = ("--seed=1", "--max-model-len=512", "--mtp-num-draft-tokens=2", "--log-format=json")
EXCHANGES = (requests.chain, requests.plain, requests.spy, requests.large)
NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
TIMED = r"(?:created|completed|expires|modified)(?:_at)?|\w+_(?:ms|duration|per_second|seconds)"
ID = r"(?<![0-9a-z])[0-9a-f]{24}(?![0-9a-z])"
MASKS = [  # text that differs between runs of one tree, and its replacement
    (rf'"({TIMED})": ?(?:{NUMBER}|"[^"]*")', r'"\1": <time>'),
    (r"127\.0\.0\.1:\d+", "<address>"),
    # In /metrics. The number of tokens computed before a stop string is found varies too.
    (rf"^((?:\S*_seconds|process_|python_).*) {NUMBER}$", r"\1 <time>"),
    (rf"^(mlx_mtp:(?:generation_|spec_decode_|prefix_cache_(?:by|en)).*) {NUMBER}$", r"\1 <count>"),
    (r"\d+\.\d+( s\b| tokens/s)", r"<time>\1"),  # in the log
]
UNEQUAL_HEADERS = {"date", "content-length"}  # the latter was used to read the body
Surface = dict[str, list[str]]


def masked(text: str, ids: dict[str, int]) -> str:
    """Returns the text with masks; ids become the numbers of their first occurrence.

    Log probabilities are rounded: their last digits in float32 depend on the batch.
    """
    text = re.sub(r"-?\d+\.\d{8,}(?![\de])", lambda found: f"{float(found[0]):.3f}", text)
    text = re.sub(ID, lambda found: f"<id {ids.setdefault(found[0], len(ids))}>", text)
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text, flags=re.MULTILINE)
    return text


def with_traces_last(body: str) -> str:
    """Returns the body with its steps after its events: timing decides which event has a step."""
    lines, steps = body.split("\n"), dict[int, list[Any]]()
    for number, line in enumerate(lines):
        if line.startswith("data: ") and '"mtp":{"trace":' in line:
            event = json.loads(line[6:])
            for choice in event["choices"]:
                steps.setdefault(choice["index"], []).extend(choice.pop("mtp", {}).get("trace", ()))
            lines[number] = f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}"
    return "\n".join([*lines, *([json.dumps(steps)] if steps else [])])


@dataclass
class Side:
    """A tree's server, and its answers to the latest request."""

    address: requests.Address
    answers: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)

    def note(self, answer: Answer) -> Answer:
        headers = {k: v for k, v in answer.headers.items() if k not in UNEQUAL_HEADERS}
        body = with_traces_last(answer.body.decode("utf-8", "backslashreplace"))
        self.answers.append(masked(f"{answer.status} {json.dumps(headers)}\n{body}", self.ids))
        return answer

    def send(self, content: bytes) -> None:
        """Send bytes on a new connection, and note all answers until it ends."""
        with socket.create_connection(self.address, timeout=requests.SECONDS) as raw:
            with contextlib.suppress(OSError):  # refused before all was sent
                raw.sendall(content)
                raw.shutdown(socket.SHUT_WR)
            source = incoming(raw)
            while source.peek(1):
                self.note(Answer(source, content.split(b" ", 1)[0].decode("latin-1")))

    def ask(self, name: str) -> list[str]:
        """Make the request of this name, or a group of related ones; returns the answers."""
        chance, self.answers, self.ids = random.Random(name), [], {}
        try:
            if chance.random() < 0.02:
                chance.choice(EXCHANGES)(self.address, chance)
            else:
                content = requests.sent(chance)[2]
                if chance.random() < 0.1:
                    content = requests.spoilt(content, requests.HTTP_TOKENS, chance)
                self.send(content)
        except (AssertionError, OSError, http.client.HTTPException) as error:
            self.answers.append(masked(f"{type(error).__name__}: {error}", self.ids))
        return self.answers

    def routes(self, paths: set[str]) -> Surface:
        """Returns each path's answers to GET and to an unknown method, which list its methods."""
        found = {}
        for path in sorted(paths):
            self.answers, self.ids = [], {}
            for method in ("BREW",) if path == "/live" else ("BREW", "GET"):
                self.send(request_bytes(method, path))  # GET /live is an endless stream
            found[f"route {path}"] = self.answers
        names = re.findall(r"^# .*", found["route /metrics"][1], re.MULTILINE)
        return found | {"metrics": names}


def sources(tree: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((tree / "mlx_mtp").rglob("*.py")))


def paths_in(text: str) -> set[str]:
    """Returns the strings in the sources that can be paths of routes."""
    paths = {re.sub(r"\{.*?\}", "x", path) for path in re.findall(r'"(/[\w/.{}:-]*)"', text)}
    paths |= {path.removeprefix("/v1") for path in paths} - {""}
    return paths | {one + more for one in paths for more in paths if more.startswith("/x")}


def logged(log: Path, last: str) -> Surface:
    """Returns the messages of requests, lines that are not JSON, and the names of all fields."""
    until = time.monotonic() + 60
    while f" GET {last} " not in (text := log.read_text()) and time.monotonic() < until:
        time.sleep(0.1)  # a thread of the server writes the log
    lines = text.splitlines()
    records = [json.loads(x) if x[:1] == "{" else {"message": x, "path": ""} for x in lines]
    messages = {masked(r["message"], {}) for r in records if "path" in r}
    return {"log": sorted(messages), "log fields": sorted({name for r in records for name in r})}


def differences(name: str, base: list[str], other: list[str]) -> list[str]:
    lines = ("\n".join(answers).splitlines() for answers in (base, other))
    shown = [line[:2000] for line in difflib.unified_diff(*lines, "base", "tree", n=0, lineterm="")]
    return ["\n".join([f"{name}:", *shown])] if base != other else []


def main() -> int:
    """Compare the trees; the exit status is 0 if they are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--seed", type=int, default=40001)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--only", help="one request, by its name")
    parser.add_argument("flags", nargs="*", help="more flags of serve, after --")
    given = parser.parse_args()
    names = [given.only] if given.only else [f"{given.seed}-{n}" for n in range(given.requests)]
    trees = given.base.resolve(), given.tree.resolve()
    statuses, repeated, faults = Counter[str](), Counter[str](), list[str]()
    os.environ["PYTHONHASHSEED"] = "0"  # fixes the order of methods in the header Allow
    with contextlib.ExitStack() as stack:
        logs, sides = [], list[Side]()
        for tree in trees:
            logs.append(Path(stack.enter_context(tempfile.TemporaryDirectory()), "log"))
            os.environ["MLX_MTP_CACHE_DIR"] = str(logs[-1].parent)
            code = f"import sys\nsys.path.insert(0, {str(tree)!r})\nimport mlx_mtp\n"
            code += f"assert mlx_mtp.__file__.startswith({str(tree)!r})\n{with_log(logs[-1])}"
            server = stack.enter_context(running(*FLAGS, *given.flags, code=code))
            sides.append(Side((httpx.URL(server.url).host, httpx.URL(server.url).port or 0)))
        pool, exchanged = stack.enter_context(ThreadPoolExecutor(2)), requests.exchanged
        by_address = {side.address: side for side in sides}
        requests.exchanged = lambda address, *more: by_address[address].note(
            exchanged(address, *more)
        )
        requests.SIZES = [1_000, 50_000]  # megabytes would take minutes
        for name in names:
            for _ in range(3):
                answers = list(pool.map(partial(Side.ask, name=name), sides))
                if answers[0] == answers[1]:
                    break
                repeated[name] += 1
            statuses.update(answer[:3] for answer in answers[0])
            faults += differences(name, *answers)
        texts = [sources(tree) for tree in trees]
        paths = set[str]().union(*map(paths_in, texts))
        surfaces = list(pool.map(partial(Side.routes, paths=paths), sides))
        for surface, text, log in zip(surfaces, texts, logs):
            surface |= logged(log, max(paths))
            surface["variables"] = sorted(set(re.findall(r"\bMLX_[A-Z_]*[A-Z]", text)))
        for key in surfaces[0]:
            faults += differences(key, *(surface[key] for surface in surfaces))
    print(*faults[:100], sep="\n\n")
    print(f"repeated: {dict(repeated)}")
    print(f"{len(names)} requests, answers by status: {dict(statuses)}; {len(faults)} differences")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
