"""openai-node, Anthropic's SDK for TypeScript and the Vercel AI SDK."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.asking import CITIES, SENTENCE, WEATHER
from tests.clients.npm import HERE, environment, installed
from tests.support.process import MODEL, Server

pytestmark = pytest.mark.full

FOLDER = HERE / "node"


@pytest.mark.parametrize("script", ["openai", "anthropic", "ai"])
def test_script(script: str, server: Server, tmp_path: Path) -> None:
    place = installed(FOLDER)
    # Node.js looks for packages beside the script.
    for file in FOLDER.glob("*.mjs"):
        shutil.copy(file, place)
    asked = {"url": server.url, "model": MODEL, "cities": CITIES, "tool": WEATHER}
    asked |= {"question": SENTENCE.question, "answer": SENTENCE.answer}
    command = ["node", f"{script}.mjs", json.dumps(asked)]
    how = {"cwd": place, "env": environment(place, tmp_path), "timeout": 300}
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr[-4000:]
    passed = json.loads(done.stdout.splitlines()[-1])["passed"]
    assert len(passed) > 3
    server.wait_until_empty()
