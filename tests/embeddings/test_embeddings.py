"""Embeddings: equal to a reference in NumPy, and as OpenAI's and Ollama's clients read them."""

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from mlx_mtp.cli import main as cli
from mlx_mtp.config import ServerConfig
from mlx_mtp.console import size_text
from mlx_mtp.embeddings import EmbeddingEngine
from mlx_mtp.inspect.embeddings import embedding_directory
from mlx_mtp.inspect.needs import _need
from mlx_mtp.server.app import create_app
from mlx_mtp.text.tokenizer import Tokenizer
from tests.embeddings.qwen3 import Weights, reference, write_embedding_model
from tests.server.conftest import Served, listening

EMBEDDINGS, EMBED = "/v1/embeddings", "/api/embed"
TEXTS = ["A fox.", "The lamp in the forest was old, and nobody knew who had left it there.", "x"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    path = tmp_path_factory.mktemp("models") / "tiny-Embedding"
    return path, write_embedding_model(path)


@pytest.fixture(scope="module")
def tokenizer(made: Any) -> Tokenizer:
    return Tokenizer.load(made[0])


@pytest.fixture(scope="module")
def client(made: Any, tokenizer: Tokenizer) -> Iterator[Served]:
    config = ServerConfig(model_name="tiny", other_names=("same",), max_queue=4)
    engine: Any = EmbeddingEngine(made[0], "float32", 1 << 40, 64)
    engine.launch()
    served = Served(timeout=60)
    with listening(create_app(engine, tokenizer, config, {}), served):
        yield served


def close(one: Any, other: Any) -> bool:
    return bool(np.max(np.abs(np.asarray(one) - np.asarray(other))) < 2e-6)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_vectors_are_those_of_the_reference(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors don't depend on the other texts of a batch, or on the number of steps."""
    monkeypatch.setattr("mlx_mtp.embeddings.STEP_TOKENS", 64)
    weights = write_embedding_model(tmp_path / "model", prefix)
    engine = EmbeddingEngine(tmp_path / "model", "float32", 1 << 40)
    draw = random.Random(0)
    lengths = [1, 2, 7, 30, 64, 65, 200, 1, 64, 128, 3]
    rows = [[draw.randrange(4096) for _ in range(n)] for n in lengths]
    seen = []
    for group in engine.groups(rows):
        of_group = [rows[index] for index in group]
        longest = max(map(len, of_group))
        assert len(group) == 1 or len(group) * longest <= 64
        for index, row in zip(group, engine.embed(of_group, 48)):
            assert close(row, reference(weights, rows[index])), lengths[index]
        seen += group
    assert sorted(seen) == list(range(len(rows)))


def test_openais_and_ollamas_sdks_get_them(client: Served, made: Any, tokenizer: Tokenizer) -> None:
    ids = [list(tokenizer.encode(text)) for text in TEXTS]
    expected = [reference(made[1], each) for each in ids]
    count = sum(map(len, ids))
    url = str(client.base_url)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
        for given in (TEXTS, ids):
            for encoding in ("float", "base64", openai.NOT_GIVEN):  # the SDK's default is base64
                made_of: Any = {"model": "tiny", "input": given, "encoding_format": encoding}
                answer = sdk.embeddings.create(**made_of)
                vectors = [
                    np.frombuffer(base64.b64decode(each.embedding), "<f4")
                    if isinstance(each.embedding, str)
                    else each.embedding
                    for each in answer.data
                ]
                assert close(vectors, expected)
                assert [each.index for each in answer.data] == [0, 1, 2]
                assert answer.usage.prompt_tokens == answer.usage.total_tokens == count
                assert answer.model == "tiny"
        one = sdk.embeddings.create(model="same", input=TEXTS[0], dimensions=8).data[0].embedding
        assert len(one) == 8
        assert close(one, expected[0][:8] / np.linalg.norm(expected[0][:8]))
        assert [each.id for each in sdk.models.list()] == ["tiny", "same"]
        assert sdk.models.retrieve("tiny").model_dump()["dimensions"] == 48
    of_ollama = ollama.Client(url)
    shown = of_ollama.embed("tiny", TEXTS)
    assert close(shown.embeddings, expected)
    assert shown.prompt_eval_count == count
    assert len(of_ollama.embed("tiny:latest", TEXTS[1], dimensions=8).embeddings[0]) == 8
    assert of_ollama.show("tiny").capabilities == ["embedding"]
    # A text that is too long is cut before its last token, unless `truncate` is false.
    text = "word " * 200
    whole = list(tokenizer.encode(text))
    cut = of_ollama.embed("tiny", text).embeddings[0]
    assert close(cut, reference(made[1], [*whole[:63], whole[-1]]))
    with pytest.raises(ollama.ResponseError, match=f"{len(whole)} tokens > 63|too long"):
        of_ollama.embed("tiny", text, truncate=False)
    of_ollama._client.close()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (EMBEDDINGS, {"input": []}, "non-empty"),
        (EMBEDDINGS, {"input": ["a", ""]}, "prompt 1 is empty"),
        (EMBEDDINGS, {"input": [[1, 4096]]}, "token ids are 0 to 4095"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "at most 2048"),
        (EMBEDDINGS, {"input": "a", "dimensions": 49}, "have 48 numbers"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a " * 300}, "too long"),
        (EMBEDDINGS, {}, "input"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "/v1/embedd"),
        ("/v1/completions", {"prompt": "a"}, "'tiny' makes embeddings"),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, "'tiny' makes embeddings"),
        ("/v1/responses", {"input": "a"}, "'tiny' makes embeddings"),
        ("/api/chat", {"messages": []}, "'tiny' makes embeddings"),
        ("/api/generate", {"prompt": "a"}, "'tiny' makes embeddings"),
    ],
)
def test_what_is_refused(client: Served, path: str, body: dict[str, Any], said: str) -> None:
    answer = client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 400
    assert said in answer.text
    assert "nan" not in client.post(EMBEDDINGS, json={"input": "a"}).text.lower()


def test_which_models_make_embeddings(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embedding_directory(str(made[0])) == made[0]
    assert embedding_directory(None) is None
    other = tmp_path / "other"
    write_embedding_model(other)
    assert embedding_directory(str(other)) is None  # a chat model has the same type
    (other / "modules.json").write_text("[]")
    assert embedding_directory(str(other)) == other
    (other / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert embedding_directory(str(other)) is None
    fields = {"dtype": "float32", "max_model_len": 100, "enable_mtp": None}
    need = _need(str(made[0]), {**fields, "prefill_step_size": None, "prefix_cache_size": None})
    assert (need["able"], need["context"], need["size"]) == (["embedding"], 100, 48)
    weights = sum(4 * each.size for each in made[1].values())
    assert need["weights"] == weights < need["nbytes"]
    assert cli.main(["inspect", str(made[0]), "--dtype", "float32", "--memory-limit", "1GB"]) == 0
    shown = capsys.readouterr().out
    assert "yes, in 1.0 GB (--memory-limit)" in shown
    assert "makes embeddings of 48 numbers" in shown
    assert f"{size_text(weights)} and a text of 4,096 tokens" in shown
