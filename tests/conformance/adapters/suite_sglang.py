"""SGLang's kit for Anthropic's messages, as a test case against our server."""

import os
import unittest

from suite_server import serve
from suite_stubs import stub

stub("sglang")

from anthropic_messages_kit import AnthropicMessagesMixin  # noqa: E402


class TestMessages(AnthropicMessagesMixin, unittest.TestCase):
    model = os.environ["SUITE_MODEL"]
    api_key = "none"

    @classmethod
    def setUpClass(cls) -> None:
        cls.base_url = serve("--served-model-name", cls.model)
