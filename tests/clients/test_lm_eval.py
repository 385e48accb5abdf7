"""lm-eval measures the same over HTTP as with transformers on the same model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO
from tests.support.harness import MEASURED
from tests.support.process import MODEL, Server

_MISSING = [name for name in ("lm_eval", "torch") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}"),
]

COUNT = 24
TASKS: dict[str, dict[str, Any]] = {
    "generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 60, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "chat": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 60, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 1,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{prompt}}{{answer}}",
        "metric_list": [
            {"metric": "word_perplexity"},
            {"metric": "byte_perplexity"},
            {"metric": "bits_per_byte"},
        ],
    },
}
# A process of its own, as it imports PyTorch and must not find modules of this project.
RUN = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
path, tasks, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
manager = TaskManager(include_path=path, include_defaults=False)
found = lm_eval.simple_evaluate(tasks=tasks, task_manager=manager, bootstrap_iters=0, **options)
samples = {task: [each["resps"] for each in found["samples"][task]] for task in tasks}
with open(f"{path}/found.json", "w") as file:
    json.dump({"results": found["results"], "samples": samples}, file, default=str)
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks above and their documents, so that nothing is downloaded."""
    path = tmp_path_factory.mktemp("tasks")
    data = json.loads((Path(__file__).parents[1] / "data" / "demo_prompts.json").read_text("utf-8"))
    begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    # Only prompts of one turn without a system message, with an answer on one line.
    wanted = [
        each
        for each in data["prompts"]
        if each["prompt"].startswith(begin)
        and each["prompt"].count(begin) == 1
        and each["answer"].count("\n") == 0
        and len(each["answer"]) < 120
    ][:COUNT]
    assert len(wanted) == COUNT
    answers = [each["answer"] for each in wanted]
    lines = []
    for number, each in enumerate(wanted):
        question = each["prompt"].removeprefix(begin).removesuffix(end)
        choices = [answers[number - 1], answers[number], answers[number - 2]]
        lines.append(json.dumps({**each, "question": question, "choices": choices}))
    (path / "docs.jsonl").write_text("\n".join(lines), "utf-8")
    for name, fields in TASKS.items():
        dataset = {"dataset_path": "json", "test_split": "test"}
        dataset |= {"dataset_kwargs": {"data_files": {"test": str(path / "docs.jsonl")}}}
        # JSON is valid YAML.
        text = json.dumps({"task": name, **dataset, **fields})
        (path / f"{name}.yaml").write_text(text, "utf-8")
    return path


def evaluate(path: Path, *names: str, **options: Any) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment["HF_DATASETS_CACHE"] = str(path / "cache")
    argv = [sys.executable, "-c", RUN, str(path), json.dumps(names), json.dumps(options)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((path / "found.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def transformers(tasks: Path) -> dict[str, Any]:
    model = {"model": "hf", "model_args": f"pretrained={DEMO},dtype=float32", "device": "cpu"}
    found = evaluate(tasks, "generate", "choice", "rolling", **model, batch_size=4)
    chat = evaluate(tasks, "chat", **model, apply_chat_template=True)
    return {key: found[key] | chat[key] for key in found}


def numbers(samples: Any) -> list[float]:
    """Returns all logprobs in nested samples, in order; "True" and "False" become 1.0 and 0.0."""
    if isinstance(samples, list):
        return [number for each in samples for number in numbers(each)]
    if samples in ("True", "False"):
        return [float(samples == "True")]
    return [float(samples)]


@pytest.mark.parametrize("more", ["num_concurrent=1", "num_concurrent=4,tokenized_requests=False"])
def test_completions(server: Server, tasks: Path, transformers: dict[str, Any], more: str) -> None:
    """The results agree for batched prompts of token ids and for concurrent prompts of text."""
    where = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={DEMO},{more}"
    names = ("generate", "choice", "rolling")
    options = {"model": "local-completions", "model_args": where, "batch_size": 4}
    found = evaluate(tasks, *names, **options)
    assert found["samples"]["generate"] == transformers["samples"]["generate"]
    for name in ("choice", "rolling"):
        got, expected = (numbers(each["samples"][name]) for each in (found, transformers))
        assert got == pytest.approx(expected, abs=1e-3, rel=1e-5)
        far = max(abs(one - other) for one, other in zip(got, expected))
        MEASURED.append(f"lm-eval, {name}, {more}: {len(got)} values differ by {far:.1e} at most")
    for name in names:
        figures = transformers["results"][name]
        for metric, value in figures.items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-4)
                MEASURED.append(f"  {name} {metric}: {found['results'][name][metric]} and {value}")
    assert found["results"]["choice"]["acc,none"] > 0.8


def test_chats(server: Server, tasks: Path, transformers: dict[str, Any]) -> None:
    where = f"model={MODEL},base_url={server.url}/v1/chat/completions,num_concurrent=4"
    options = {"model": "local-chat-completions", "model_args": where}
    found = evaluate(tasks, "chat", **options, apply_chat_template=True)
    assert found["samples"]["chat"] == transformers["samples"]["chat"]
    assert found["results"]["chat"] == transformers["results"]["chat"]
    assert found["results"]["chat"]["exact_match,none"] > 0.8
