"""guidance's VLLMModel, which sends the grammar twice: in vLLM's old field and in its new one."""

import os
import re
import subprocess

import pytest

from tests.support.process import MODEL, Server

pytestmark = pytest.mark.full


_GUIDANCE = """
import sys
from guidance import gen, select
from guidance.models.experimental import VLLMModel
from guidance import assistant, user
model = VLLMModel(sys.argv[2], base_url=sys.argv[1], api_key="none", echo=False)
with user():
    model += sys.argv[3]
with assistant():
    model += select(["yes", "no"], name="sure") + gen(name="age", regex="[0-9]{2}")
print(model["sure"], model["age"])
"""


def test_guidance(server: Server) -> None:
    """guidance needs another llguidance than this server, and so runs in its own environment."""
    python = os.environ.get("MLX_MTP_TEST_GUIDANCE")
    if not python:
        pytest.skip("MLX_MTP_TEST_GUIDANCE names no Python that has guidance and openai")
    command = [python, "-c", _GUIDANCE, f"{server.url}/v1", MODEL, "Tell me about Anna the fox."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.fullmatch(r"(yes|no) [0-9]{2}\n", done.stdout), done.stderr[-2000:]
