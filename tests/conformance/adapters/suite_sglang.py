"""SGLang's kit for Anthropic's messages, as a test case against our server."""

import importlib.util
import os
import unittest
from pathlib import Path

from suite_server import serve
from suite_stubs import stub

stub("sglang")
_FILE = Path(os.getcwd()) / "anthropic_messages_kit.py"
_spec = importlib.util.spec_from_file_location("anthropic_messages_kit", _FILE)
assert _spec is not None
assert _spec.loader is not None
_kit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_kit)


class TestMessages(_kit.AnthropicMessagesMixin, unittest.TestCase):
    model = os.environ["SUITE_MODEL"]
    api_key = "none"

    @classmethod
    def setUpClass(cls) -> None:
        cls.base_url = serve("--served-model-name", cls.model)
