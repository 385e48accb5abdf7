"""The suites, each pinned to one version of its project."""

from __future__ import annotations

import os

from tests.conformance.runner import HERE, Suite
from tests.conformance.sources import Package, Repository

OPENAI = Package(
    "openai-python",
    "openai==3.52.0",
    "258a4fec3e40b412c58672526ed33f20738c2e4ea27601792e73843af62466af",
    "openai-3.52.0",
    ("tests/*", "src/*", "pyproject.toml"),
)
LLAMA_CPP = Package(
    "llama.cpp",
    "llama-cpp-python==0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "llama_cpp_python-0.3.36/vendor/llama.cpp/tools/server/tests",
    ("*",),
)
VLLM = Package(
    "vllm",
    "vllm==0.33.0",
    "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    "vllm-0.33.0",
    ("tests/*",),
)
SGLANG = Package(
    "sglang",
    "sglang==0.5.23",
    "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
    "sglang/test/kits",
    ("*.py",),
    wheel=True,
)
OPENAPI = Repository(
    "openai-openapi",
    "https://github.com/openai/openai-openapi",
    "f85dbe223d40e1a31cba812ab2d755c7e98a92a3",
)

SUITES = (
    Suite(
        "openai_python_chat",
        OPENAI,
        "suite_openai",
        ("tests/api_resources/chat", "tests/api_resources/test_models.py"),
        paths=(".", "src"),
        model="gpt-6-astra",
        arguments=("-c", "pyproject.toml", "-o", "addopts="),
    ),
    Suite(
        "openai_python_completions",
        OPENAI,
        "suite_openai",
        ("tests/api_resources/test_completions.py",),
        paths=(".", "src"),
        model="gpt-3.5-turbo-instruct",
        arguments=("-c", "pyproject.toml", "-o", "addopts="),
    ),
    Suite(
        "llama_cpp",
        LLAMA_CPP,
        "suite_llama_cpp",
        (
            "unit/test_basic.py",
            "unit/test_chat_completion.py",
            "unit/test_compat_anthropic.py",
            "unit/test_compat_oai_responses.py",
            "unit/test_completion.py",
            "unit/test_ctx_shift.py",
            "unit/test_security.py",
            "unit/test_template.py",
            "unit/test_tokenize.py",
            "unit/test_tool_call.py",
        ),
    ),
    Suite(
        "vllm",
        VLLM,
        "suite_vllm",
        (
            "entrypoints/anthropic/test_messages.py",
            "entrypoints/openai/chat_completion/test_chat.py",
            "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
            "entrypoints/openai/completion/test_completion.py",
            "entrypoints/openai/completion/test_prompt_validation.py",
            "entrypoints/openai/responses/test_simple.py",
            "entrypoints/serve/tokenize/test_tokenization.py",
        ),
        folder="tests",
        paths=("..",),
        arguments=("-c", os.devnull, "--rootdir=.", "--confcutdir=entrypoints"),
    ),
    Suite(
        "sglang",
        SGLANG,
        "suite_sglang",
        ("suite_sglang.py",),
        arguments=("-c", os.devnull, f"--rootdir={HERE / 'adapters'}"),
    ),
)
