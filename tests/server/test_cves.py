"""Known vulnerabilities of other servers, each tried here; keys and hosts: test_access.py."""

import contextlib
import inspect
import json
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from mlx_mtp.convert.source import INDEX, HubRepo, open_source
from mlx_mtp.errors import (
    CheckpointError,
    ConvertError,
    InvalidRequestError,
    ModelError,
    UnsupportedModelError,
)
from mlx_mtp.models.hub import BUNDLED_MODEL, resolve_model
from mlx_mtp.models.loader import load_model
from mlx_mtp.server.api.anthropic.protocol import CountRequest, MessagesRequest
from mlx_mtp.server.api.openai.protocol import ChatRequest, CompletionRequest
from mlx_mtp.server.api.responses.protocol import ResponsesRequest
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import library_tokenizer, tokenizer_with
from tests.support.fake_engine import FakeEngine, answer
from tests.support.in_process import (
    CHAT,
    COUNT,
    GOOD,
    HI,
    IGNORED,
    MESSAGES,
    RESPONSES,
    TEXT,
    TOKENIZE,
    in_process,
)
from tests.support.raw_http import error_of
from tests.support.tiny_models import change_json

WIRE: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    MESSAGES: MessagesRequest,
    COUNT: CountRequest,
    RESPONSES: ResponsesRequest,
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with in_process() as client:
        yield client


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model to be changed; its Python file leaves a mark when it is run."""
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


def test_cve_2026_5843_mlx_lm_code_named_by_a_configuration(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json's `model_file` was imported and run when the model was loaded."""
    for fields in ({"text_config": {"model_file": "evil.py"}}, {"model_file": "evil.py"}):
        change_json(model / "config.json", **fields)
        with pytest.raises(UnsupportedModelError, match="runs no code"):
            load_model(model, enable_mtp=False, lazy=True)
    # Code that transformers would run.
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks whether to run it"))
    classes = {"AutoTokenizer": ["evil.Evil"] * 2}
    classes |= dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    for name, fields in (
        ("config.json", {}),
        ("tokenizer_config.json", {"tokenizer_class": "Evil"}),
    ):
        before = (model / name).read_text()
        change_json(model / name, auto_map=classes, **fields)
        with contextlib.suppress(ModelError):
            assert Tokenizer.load(model).encode("hi")
        (model / name).write_text(before)
    assert not (model.parent / "ran").exists()


def test_cve_2025_62426_vllm_template_kwargs_that_steer_the_library(client: httpx.Client) -> None:
    """`tokenize`, `chat_template` and others were passed on to apply_chat_template itself."""
    from transformers.utils.chat_template_utils import render_jinja_template

    steps = (library_tokenizer().apply_chat_template, render_jinja_template)
    names = {name for step in steps for name in inspect.signature(step).parameters}
    assert {"tokenize", "chat_template", "add_generation_prompt", "documents"} <= names
    for name in sorted(names | {"messages", "self", "raise_exception", "__class__", "range"}):
        for path, body in ((CHAT, GOOD[CHAT]), (TOKENIZE, {"messages": HI})):
            response = client.post(path, json=body | {"chat_template_kwargs": {name: True}})
            if name == "__class__":  # harmless: the template has no such variable
                assert name in response.headers[IGNORED]
            else:
                assert name in error_of(response, path, 400)


TEMPLATES = [
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ namespace.__init__.__globals__ }}"),
    *("{{ raise_exception.__globals__.x }}", "{% include '/etc/passwd' %}"),
    *("{% import 'os' as os %}", "{{ messages.append(1) }}", "{{ range(100000000) | list }}"),
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_models_template_stays_in_its_box(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="template"):
        tokenizer_with(template).render_chat(HI)


BAD_SCHEMAS: list[Any] = [
    *({"type": "thing"}, {"type": 3}, {"type": ["string", None]}, {"properties": {"a": 3}}),
    *({"type": "string", "pattern": "["}, {"type": "string", "pattern": 3}, {"items": [[[]]]}),
    *({"type": "string", "minLength": -1}, {"type": "integer", "minimum": "x"}, {"not": {}}),
    *({"type": "array", "minItems": 5, "maxItems": 1}, {"$ref": "#"}, {"$ref": "#/nowhere"}),
    *({"$ref": "file:///etc/passwd"}, {"$ref": "http://127.0.0.1:1"}, {"enum": []}, {"enum": 3}),
    *({"allOf": 3}, {"anyOf": []}, {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
]


def test_cve_2025_48944_vllm_malformed_tool_schemas(client: httpx.Client) -> None:
    """A `pattern` or `type` that can't be compiled ended the worker, and so the server."""
    for schema in BAD_SCHEMAS:
        function = {"name": "f", "parameters": schema, "strict": True}
        forced = {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}
        for path, fields in (
            (CHAT, {"tools": [{"type": "function", "function": function}]}),
            (CHAT, {"guided_json": schema}),
            (MESSAGES, forced),
        ):
            response = client.post(path, json=GOOD[path] | fields)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:
                error_of(response, path)
    good = GOOD[CHAT] | {"guided_json": {"type": "integer"}}
    assert client.post(CHAT, json=good).status_code == 200


# Fields that an object must have beside a field within it.
BESIDE = {"thinking": {"type": "enabled"}}
INTEGERS: list[tuple[str, tuple[str, ...]]] = [
    *((path, ("mtp", "num_draft_tokens")) for path in (CHAT, TEXT)),
    *((path, ("thinking", "budget_tokens")) for path in (MESSAGES, COUNT)),
    *(
        (path, (name,))
        for path, model in WIRE.items()
        for name, field in model.model_json_schema()["properties"].items()
        if any(form.get("type") == "integer" for form in (field, *field.get("anyOf", [])))
    ),
]
EXTREMES = [-1, -(1 << 31), -(1 << 63), 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30]


def test_cve_2026_21869_llama_cpp_integers_that_nobody_clamped() -> None:
    """A negative `n_discard` was used as an index, and caused a write out of bounds."""
    engine = FakeEngine(answer([300]))
    assert len(INTEGERS) > 20
    with in_process(engine) as client:
        for path, field in INTEGERS:
            for value in [*EXTREMES, 1.5, 1e300, True, "1", [1], {}]:
                inner: Any = value
                for name in reversed(field[1:]):
                    inner = {**BESIDE.get(field[0], {}), name: inner}
                engine.submitted.clear()
                response = client.post(path, json={**GOOD[path], field[0]: inner})
                assert response.status_code in (200, 400), response.text
                if response.status_code == 400:
                    error_of(response, path)
                    assert not engine.submitted
                else:
                    assert type(value) is int, "nothing else passes for an integer"
                for request in engine.submitted:
                    request.sampling.validate(engine.info.vocab_size)
                    longest = engine.info.max_model_len - len(request.prompt_token_ids)
                    assert 1 <= request.sampling.max_tokens <= longest


TRAVERSALS = [
    *("../../marked-file", "/tmp/marked-file", "..%2f..%2fmarked-file", "a/../../marked-file"),
    *("file:///marked-file", "http://127.0.0.1:1/marked-file", "marked-file\x00", "~/marked-file"),
    *("sha256:../../marked-file", "\\\\server\\marked-file", "marked-file/marked-file"),
]


def test_cve_2024_37032_ollama_no_name_of_a_client_is_opened(client: httpx.Client) -> None:
    """A digest like `../../x` in a request was used as a path, which was read and written."""
    seen: list[str] = []
    watching = True
    own = threading.get_ident()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        watched = watching and threading.get_ident() != own
        if watched and event in ("open", "os.listdir", "os.scandir", "socket.getaddrinfo"):
            seen.append(f"{event} {arguments[0]!r}")

    sys.addaudithook(watch)  # for good: an audit hook can't be removed, only switched off
    try:
        for name in TRAVERSALS:
            for path, good in GOOD.items():
                refused = client.post(path, json={**good, "model": name})
                error_of(refused, path, 404)
            for field in ("adapters", "adapter_path", "lora"):
                assert client.post(CHAT, json=GOOD[CHAT] | {field: name}).status_code == 400
            for field in ("draft_model", "path", "file_id"):  # ignored
                assert client.post(CHAT, json=GOOD[CHAT] | {field: name}).status_code == 200
            content = [{"type": "image_url", "image_url": {"url": name}}]
            messages = [{"role": "user", "content": content}]
            assert client.post(CHAT, json=GOOD[CHAT] | {"messages": messages}).status_code == 400
    finally:
        watching = False
    assert [event for event in seen if "marked-file" in event or "127.0.0.1" in event] == []


def test_cve_2024_37032_names_of_repositories_and_files_lead_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> None:
        pytest.fail("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for name in ("../x/y", "a/..", "./a/b/../c", "http://a/b", "a/b\0", "a%2f..", "a\\..\\b"):
        with pytest.raises((ModelError, ValueError)):
            resolve_model(name)
    for etag in ("../../x", "/etc/passwd", "a/b", "..", "", "a\0", None):
        found = types.SimpleNamespace(size=1, etag=etag, commit_hash="abc")
        monkeypatch.setattr("mlx_mtp.convert.source.get_hf_file_metadata", lambda _, f=found: f)
        repo = HubRepo("a/b", None)
        repo.commit_hash = "abc"
        with pytest.raises(ConvertError):
            repo.remote("mtp.safetensors")
    for name in ("/etc/passwd", "..", "x.bin", "x.safetensors/../y"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"mtp.fc.weight": name}}))
        with pytest.raises(CheckpointError, match="only safetensors"):
            open_source(str(tmp_path))
