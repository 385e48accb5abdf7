"""The holes of other servers, each tried here. Those of browsers and keys: test_browsers.py."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
import socket
import sys
import threading
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from safetensors.numpy import save_file

from mlx_mtp import backend
from mlx_mtp.convert.hub import HubRepo
from mlx_mtp.convert.source import INDEX, open_source
from mlx_mtp.convert.tensors import SafetensorsFile
from mlx_mtp.errors import CheckpointError, ConvertError, ModelError, UnsupportedModelError
from mlx_mtp.models.hub import _FILES, BUNDLED_MODEL, resolve_model
from mlx_mtp.server.anthropic.wire import CountRequest, MessagesRequest
from mlx_mtp.server.http_protocol import MAX_HEADER_BYTES, MAX_HEADERS
from mlx_mtp.server.openai.wire import ChatRequest, CompletionRequest
from mlx_mtp.server.responses.wire import ResponsesRequest
from mlx_mtp.server.token_routes import DetokenizeRequest, TokenizeRequest
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served, library_tokenizer, tokenizer_with
from tests.server.fake_engine import FakeEngine, FakeInfo, answer
from tests.server.raw_http import error_of, exchange, request_bytes

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    CHAT: (ChatRequest, {"model": MODEL, "messages": HI}),
    "/v1/completions": (CompletionRequest, {"model": MODEL, "prompt": "hi"}),
    "/v1/messages": (MessagesRequest, {"model": MODEL, "messages": HI, "max_tokens": 5}),
    "/v1/messages/count_tokens": (CountRequest, {"model": MODEL, "messages": HI}),
    "/v1/responses": (ResponsesRequest, {"model": MODEL, "input": "hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [300]}),
}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(answer([300]))


@pytest.fixture(scope="module")
def client(serve: Serve, engine: FakeEngine) -> Iterator[Served]:
    with serve(engine) as client:
        yield client


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model's directory, to be spoilt; with a Python file that leaves a mark."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in BUNDLED_MODEL.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, copy)
        elif file.suffix == ".safetensors":
            (copy / file.name).symlink_to(file)
    mark = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    (copy / "evil.py").write_text(mark + "class Evil: pass\nModel = ModelArgs = Evil\n")
    return copy


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("nested", [False, True])
def test_cve_2026_5843_mlx_lm_code_named_by_a_configuration(model: Path, nested: bool) -> None:
    """config.json's `model_file` was imported and run by whoever loaded the model."""
    backend.prepare()
    from mlx_mtp.models.loader import load_model

    if nested:
        edit(model / "config.json", text_config={"model_file": "evil.py"})
    else:
        edit(model / "config.json", model_file="evil.py")
    with pytest.raises(UnsupportedModelError, match="runs no code"):
        load_model(model, enable_mtp=False, lazy=True)
    assert not (model.parent / "ran").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_cve_2026_5843_code_that_transformers_would_run(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks whether to run it"))
    auto_map = {
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
    }
    edit(model / name, auto_map=auto_map)
    if name == "tokenizer_config.json":
        edit(model / name, tokenizer_class="Evil")
    try:
        loaded = Tokenizer.load(model)
    except ModelError:
        loaded = None
    assert loaded is None or loaded.encode("hi")
    assert not (model.parent / "ran").exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "weights.npz", "model.gguf", "model.pt"])
def test_nothing_but_safetensors_is_read(model: Path, file: str) -> None:
    """A pickle runs whatever its author wrote."""
    backend.prepare()
    from mlx_mtp.models.loader import load_model

    for weights in model.glob("*.safetensors"):
        weights.unlink()
    (model / file).write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(CheckpointError, match=f"but {file}: only safetensors"):
        load_model(model, enable_mtp=False)


def test_the_hub_is_asked_for_no_code_and_no_pickles() -> None:
    from huggingface_hub.utils import filter_repo_objects

    bad = ["evil.py", "a/evil.py", "pytorch_model.bin", "x.pt", "x.pkl", "x.npz", "x.so", "x.gguf"]
    good = ["config.json", "model-00001-of-2.safetensors", "mtp.safetensors", "chat_template.jinja"]
    assert list(filter_repo_objects([*bad, *good], allow_patterns=_FILES)) == good


def test_cve_2025_62426_vllm_template_kwargs_that_steer_the_library(
    client: Served,
) -> None:
    """`tokenize`, `chat_template` and others reached apply_chat_template itself."""
    from transformers.utils.chat_template_utils import render_jinja_template

    steps = (library_tokenizer().apply_chat_template, render_jinja_template)
    names = {name for step in steps for name in inspect.signature(step).parameters}
    assert {"tokenize", "chat_template", "add_generation_prompt", "documents"} <= names
    for name in sorted(names | {"messages", "self", "raise_exception", "__class__", "range"}):
        for path in (CHAT, "/tokenize"):
            body = {"messages": HI, "chat_template_kwargs": {name: True}}
            if path == CHAT:
                body["model"] = MODEL
            response = client.post(path, json=body)
            assert response.status_code == 400, name
            assert name in error_of(response, path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.x }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
        "{{ range(100000000) | list }}",
    ],
)
def test_a_models_template_stays_in_its_box(serve: Serve, template: str) -> None:
    with serve(FakeEngine(answer([300])), tokenizer=tokenizer_with(template)) as client:
        response = client.post(CHAT, json={"model": MODEL, "messages": HI})
        assert response.status_code in (400, 500)
        assert "template" in error_of(response, CHAT)
        assert "root:" not in response.text


def test_a_message_is_no_template(client: Served, tokenizer: Tokenizer) -> None:
    text = "{{ 7 * 191 }}{% include '/etc/passwd' %}"
    body = {"messages": [{"role": "user", "content": text}]}
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    assert text in client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_cve_2026_34756_vllm_unbounded_n(client: Served, engine: FakeEngine) -> None:
    """A million choices of one request took all memory before any limit was met."""
    before = len(engine.submitted)
    for path, body in (
        (CHAT, {"messages": HI, "n": 1_000_000}),
        (CHAT, {"messages": HI, "n": 17}),
        ("/v1/completions", {"prompt": "hi", "n": (1 << 63) - 1}),
        ("/v1/completions", {"prompt": ["hi"] * 9, "n": 16}),
        ("/v1/completions", {"prompt": "hi", "n": 1, "best_of": 1_000_000}),
        ("/v1/completions", {"prompt": ["hi"] * 100_000}),
    ):
        response = client.post(path, json={"model": MODEL, **body})
        assert response.status_code == 400
        error_of(response, path)
    assert len(engine.submitted) == before


BAD_SCHEMAS: list[Any] = [
    {"type": "thing"},
    {"type": 3},
    {"type": ["string", None]},
    {"type": "string", "pattern": "["},
    {"type": "string", "pattern": 3},
    {"type": "string", "minLength": -1},
    {"type": "string", "maxLength": "x"},
    {"type": "integer", "minimum": "x"},
    {"properties": 3},
    {"properties": {"a": 3}},
    {"type": "object", "required": "a", "properties": {"a": {}}},
    {"$ref": "#/nowhere"},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "http://127.0.0.1:1/"},
    {"$ref": "#"},
    {"enum": []},
    {"enum": 3},
    {"allOf": 3},
    {"anyOf": []},
    {"items": [[[]]]},
    {"type": "array", "minItems": 5, "maxItems": 1},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"not": {}},
]


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=json.dumps)
def test_cve_2025_48944_vllm_malformed_tool_schemas(client: Served, schema: Any) -> None:
    """A `pattern` or `type` that can't be compiled ended the worker, and with it the server."""
    function = {"name": "f", "parameters": schema, "strict": True}
    for path, body in (
        (CHAT, {"messages": HI, "tools": [{"type": "function", "function": function}]}),
        (CHAT, {"messages": HI, "guided_json": schema}),
        (
            "/v1/messages",
            {
                "messages": HI,
                "max_tokens": 5,
                "tools": [{"name": "f", "input_schema": schema}],
                "tool_choice": {"type": "any"},
            },
        ),
    ):
        response = client.post(path, json={"model": MODEL, **body})
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            error_of(response, path)
    good = {"model": MODEL, "messages": HI, "guided_json": {"type": "integer"}}
    assert client.post(CHAT, json=good).status_code == 200


def test_cve_2025_48956_vllm_headers_without_bound(client: Served) -> None:
    """Headers of any length were kept in memory."""
    for lines in (
        ["X: " + "a" * (1 << 22)],
        ["a" * (1 << 20) + ": x"],
        ["X: a"] * (MAX_HEADERS + 1),
        ["Cookie: " + "a" * (MAX_HEADER_BYTES // 4)] * 5,
    ):
        sent = "\r\n".join(("GET /health HTTP/1.1", "Host: localhost", *lines, "", "")).encode()
        refused = exchange(client, sent)
        assert refused.status == 431
        error_of(refused, "/health")
    # Without an end they are refused as soon as there are too many.
    endless = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 5000
    assert exchange(client, endless).status == 431
    with socket.create_connection(client.address, timeout=30) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        assert client.get("/health").status_code == 200
        slow.sendall(b"a\r\n\r\n")
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")


def integer_fields(
    model: type[BaseModel], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Paths of all fields that may be an integer, those of objects within among them."""
    for name, info in model.model_fields.items():
        path = (*prefix, info.alias or name)
        for kind in kinds(info.annotation):
            if kind is int:
                yield path
            elif inspect.isclass(kind) and issubclass(kind, BaseModel):
                yield from integer_fields(kind, path)


def kinds(annotation: Any) -> set[Any]:
    """The alternatives of an annotation, as they are without validators."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(kinds, typing.get_args(annotation)))
    return {annotation}


# What the fields within an object need beside them.
BESIDE = {"thinking": {"type": "enabled"}, "stream_options": {"include_usage": True}}
INTEGERS = [(path, field) for path, (model, _) in GOOD.items() for field in integer_fields(model)]
EXTREMES = [-1, -(1 << 31), -(1 << 63), 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30]


def test_the_integer_fields_are_found() -> None:
    names = {(path, ".".join(field)) for path, field in INTEGERS}
    assert {
        *((CHAT, "n"), (CHAT, "top_k"), (CHAT, "seed"), (CHAT, "mtp.num_draft_tokens")),
        *(("/v1/completions", "best_of"), ("/v1/completions", "logprobs")),
        *(("/v1/messages", "thinking.budget_tokens"), ("/v1/messages", "max_tokens")),
        *(("/v1/responses", "max_output_tokens"), ("/v1/responses", "max_tool_calls")),
    } <= names


@pytest.mark.parametrize(("path", "field"), INTEGERS, ids=str)
def test_cve_2026_21869_llama_cpp_integers_that_nobody_clamped(
    client: Served, engine: FakeEngine, path: str, field: tuple[str, ...]
) -> None:
    """A negative `n_discard` became an index, and wrote outside of its array."""
    for value in [*EXTREMES, 1.5, 1e300, True, "1", [1], {}]:
        inner: Any = value
        for name in reversed(field[1:]):
            inner = {**BESIDE.get(field[0], {}), name: inner}
        before = len(engine.submitted)
        response = client.post(path, json={**GOOD[path][1], field[0]: inner})
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            error_of(response, path)
            assert len(engine.submitted) == before
        else:
            assert type(value) is int, "nothing else passes for an integer"
        for request in engine.submitted[before:]:
            request.sampling.validate(engine.info.vocab_size)
            longest = engine.info.max_model_len
            assert 1 <= request.sampling.max_tokens <= longest - len(request.prompt_token_ids)


@pytest.mark.parametrize("field", ["n_keep", "n_discard", "n_predict", "id_slot", "n_probs"])
def test_cve_2026_21869_llama_cpps_own_fields(client: Served, field: str) -> None:
    body = {"model": MODEL, "prompt": "hi", field: -1}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert f"{field} is not a parameter" in error_of(response, "/v1/completions")


@pytest.mark.parametrize(
    "body",
    [
        *({"prompt": [value]} for value in EXTREMES),
        *({"prompt": "hi", "stop_token_ids": [value]} for value in EXTREMES),
        *({"prompt": "hi", "logit_bias": {str(value): 1}} for value in EXTREMES),
        {"prompt": "hi", "logit_bias": {"1": 1e300}},
        {"prompt": "hi", "logit_bias": {"-0": 1}},
        {"prompt": "hi", "logit_bias": {"\uff11": 1}},
    ],
    ids=str,
)
def test_cve_2026_21869_token_ids_that_nobody_checked(client: Served, body: dict[str, Any]) -> None:
    response = client.post("/v1/completions", json={"model": MODEL, **body})
    assert response.status_code == 400
    error_of(response, "/v1/completions")


def test_cve_2024_28224_ollama_dns_rebinding(serve: Serve) -> None:
    """A page let its own name point to 127.0.0.1, and was of the server's origin by that."""
    with serve(FakeEngine(answer([300]))) as client:
        port = client.address[1]
        name = f"rebound.example:{port}"
        body = json.dumps(GOOD[CHAT][1]).encode()
        for headers in ({"Host": name}, {"Host": name, "Origin": f"http://{name}"}):
            refused = exchange(client, request_bytes("POST", CHAT, headers, body))
            assert refused.status == 403
            assert "rebound.example" in error_of(refused, CHAT)
        own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
        assert exchange(client, request_bytes("POST", CHAT, own, body)).status == 200


TRAVERSALS = [
    *("../../marked-file", "/tmp/marked-file", "..%2f..%2fmarked-file", "a/../../marked-file"),
    *("file:///marked-file", "http://127.0.0.1:1/marked-file", "marked-file\x00", "~/marked-file"),
    *("sha256:../../marked-file", "\\\\server\\marked-file", "marked-file/marked-file"),
]


def test_cve_2024_37032_ollama_no_name_of_a_client_is_opened(client: Served) -> None:
    """A digest like `../../x` in a request became a path that was read and written."""
    seen: list[str] = []
    watching = True
    clients_own = threading.get_ident()  # It looks the server's address up when it connects anew.

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        watched = watching and threading.get_ident() != clients_own
        if watched and event in ("open", "os.listdir", "os.scandir", "socket.getaddrinfo"):
            seen.append(f"{event} {arguments[0]!r}")

    sys.addaudithook(watch)  # For good: it can't be taken away, only be told to rest.
    try:
        for name in TRAVERSALS:
            for path, (_, good) in GOOD.items():
                refused = client.post(path, json={**good, "model": name})
                assert refused.status_code == 404
                error_of(refused, path)
            for field in ("adapters", "adapter_path", "lora", "draft_model", "path", "file_id"):
                body = {**GOOD[CHAT][1], field: name}
                assert client.post(CHAT, json=body).status_code == 400
            content = [{"type": "image_url", "image_url": {"url": name}}]
            body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
            assert client.post(CHAT, json=body).status_code == 400
    finally:
        watching = False
    assert [event for event in seen if "marked-file" in event or "127.0.0.1" in event] == []


@pytest.mark.parametrize(
    "name",
    [
        *("../x/y", "a/..", "a/../../b", "a/b/c", "./a/b/../c", "a/.b", "http://a/b", "a/b\x00"),
        *("hf://a/b", "a//b", "-a/b", "a/b?x", "a/b#x", "a%2f..", "a\\..\\b", "spaces for/all"),
    ],
)
def test_cve_2024_37032_names_of_repositories(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> None:
        pytest.fail("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises((ModelError, ValueError)):
        resolve_model(name)


@pytest.mark.parametrize("etag", ["../../x", "/etc/passwd", "a/b", "..", "", "a\x00", None])
def test_cve_2024_37032_what_a_hub_says_becomes_no_path(
    etag: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = types.SimpleNamespace(size=1, etag=etag, commit_hash="abc")
    monkeypatch.setattr("mlx_mtp.convert.hub.get_hf_file_metadata", lambda _: found)
    repo = HubRepo("a/b", None)
    repo.commit = "abc"
    with pytest.raises(ConvertError):
        repo.remote("mtp.safetensors")


def test_cve_2024_37032_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    backend.prepare()
    import numpy as np

    outside, inside = tmp_path / "x.safetensors", tmp_path / "model"
    inside.mkdir()
    save_file({"mtp.fc.weight": np.zeros(4, np.float32)}, outside)
    index = {"weight_map": {"mtp.fc.weight": "../x.safetensors"}}
    (inside / INDEX).write_text(json.dumps(index))
    source = open_source(str(inside))
    assert set(source.file_of.values()) == {"x.safetensors"}
    with pytest.raises(CheckpointError, match="missing"):
        source.repo.fetch(source.files)
    for name in ("/etc/passwd", "..", "x.bin", "x.safetensors/../y"):
        index = {"weight_map": {"mtp.fc.weight": name}}
        (inside / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="only safetensors"):
            open_source(str(inside))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 62]},
    ],
    ids=str,
)
def test_headers_of_weights_that_lie(tmp_path: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({"x": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError):
        SafetensorsFile(file)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_models_json_that_is_too_deep(model: Path, text: str) -> None:
    backend.prepare()
    from mlx_mtp.models.loader import load_model

    (model / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        load_model(model, enable_mtp=False, lazy=True)


def test_a_failure_of_ours_tells_no_secrets(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(answer([300]), FakeInfo())
    engine.refusal = RuntimeError("/home/me/.ssh")
    caplog.set_level(logging.CRITICAL)
    with serve(engine) as client:
        for path in (CHAT, "/v1/messages", "/v1/responses"):
            response = client.post(path, json=GOOD[path][1])
            assert response.status_code == 500
            assert ".ssh" not in error_of(response, path)
