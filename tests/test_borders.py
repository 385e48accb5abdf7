"""The core can be read alone: unique names, the reading list, and the way of a request."""

import ast
import json
import re
import signal
import time
from collections import defaultdict
from pathlib import Path

from tests.support.process import running
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mlx_mtp"
FEATURES = ("prefix", "ranks", "calibration", "kernels/cuda", "kernels/metal", "inspect", "chat")

# Records the functions that run from the request after the signal to the first forward pass.
RECORD = """
import json, os, signal, sys, threading
armed, seen = [], set()
def record(frame, event, _):
    if event != "call" or not armed:
        return
    code = frame.f_code
    if "/mlx_mtp/" in code.co_filename and not code.co_name.startswith("<"):
        caller = frame
        while caller is not None:
            if caller.f_code.co_name == "on_tick":  # once a second, so no part of the request
                return
            caller = caller.f_back
        name = code.co_filename.rpartition("/mlx_mtp/")[2], code.co_qualname
        if name == ("models/model.py", "LoadedModel.hidden"):
            armed.clear()
            with open({path!r}, "w") as file:
                json.dump(sorted(seen), file)
        seen.add(name)
threading.setprofile(record)
sys.setprofile(record)
signal.signal(signal.SIGVTALRM, lambda *_: (seen.clear(), armed.append(True)))
"""


def test_a_class_name_means_one_thing():
    """Type aliases too; classes of one name are the same thing in several families or APIs."""
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if re.fullmatch(r"_?[A-Z]+[a-z]\w*", name):
                    places[name].append(path)
    alike = {"_Layer", "_GatedDeltaNet"}  # one per family
    assert {k: v for k, v in places.items() if len(v) > 1 and k not in alike} == {}


def test_a_function_name_means_one_thing():
    """Public functions of modules with the same name are forms of one operation."""
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                places[node.name].append(path)
    kernels = {"applies", "attend", "bands", "fits", "fold", "run_kernel", "run_window"}
    alike = {
        *kernels,
        "fingerprint",  # a hash of all that stored or exchanged data depends on
        "generate",  # a command, and a route of Ollama's API
        "main",  # as the program, and in any process
    }
    assert {k: v for k, v in places.items() if len(v) > 1 and k not in alike} == {}
    assert not [name for name in alike if len(places[name]) == 1]


def test_the_reading_list_is_an_afternoon():
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Reading list")[2].partition("\n## ")[0]
    files = re.findall(r"`(\w+(?:/\w+)*\.py)`", section)
    assert 20 <= len(files) <= 35
    assert sum(len((PACKAGE / name).read_text().splitlines()) for name in files) <= 6200
    assert not [name for name in files if name.startswith(FEATURES)]


def test_few_functions_run_before_the_first_forward_pass(tmp_path):
    """A streamed chat on a warm server, which reuses no prefix, runs few functions and modules."""
    path = tmp_path / "seen.json"
    flags = "--enable-mtp", "--dtype", "float32", "--calibration-seconds", "0"
    with running(*flags, code=RECORD.format(path=str(path))) as server:
        for text in ("Tell a story.", "What is 2 + 2?"):
            time.sleep(0.5)  # the end of the previous request still runs
            server.process.send_signal(signal.SIGVTALRM)
            path.unlink(missing_ok=True)
            messages = [{"role": "user", "content": text}]
            chat = {"messages": messages, "max_tokens": 24, "stream": True}
            answer = server.http.post("/v1/chat/completions", json=chat)
            assert answer.text.endswith("data: [DONE]\n\n")
        wait_until(path.exists)
    seen = json.loads(path.read_text())
    modules = {name for name, _ in seen}
    optional = [name for name, _ in seen if name.startswith(FEATURES)]
    assert 100 < len(seen) <= 200
    assert len(modules) <= 54
    assert len(optional) <= 20
