"""/tokenize and /detokenize, there and back; the recorded exchanges have their forms."""

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.fake_engine import FakeEngine, answer
from tests.server.wire_help import WEATHER

TEXT = "Once upon a time, é 🎉 <|im_start|>"


def test_there_and_back(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(FakeEngine(answer([300]))) as client:
        for text in (TEXT, "one two " * 20_000):
            body = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
            assert body["tokens"] == list(tokenizer.encode(text))
            assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
            assert body["token_strs"] == [tokenizer.token_text(token) for token in body["tokens"]]
            ids = {"model": MODEL, "tokens": body["tokens"]}
            assert client.post("/detokenize", json=ids).json() == {"prompt": text, "content": text}
        messages, kwargs = [{"role": "user", "content": "hi"}], {"enable_thinking": True}
        chat = {"messages": messages, "tools": [WEATHER], "chat_template_kwargs": kwargs}
        expected = tokenizer.encode_chat(messages, [WEATHER], kwargs)
        assert client.post("/tokenize", json=chat).json()["tokens"] == list(expected)
