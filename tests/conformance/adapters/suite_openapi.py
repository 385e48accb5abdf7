"""schemathesis's requests, changed so that most name the served model and want short answers.

Unchanged, nearly all would be refused for the model's name or for a parameter. So one request in
eight stays as it is; most of the others keep few of their parameters, and most get a plain
question. The choice depends on the request alone, because hypothesis makes each of them again.
"""

import json
import os
import random
from typing import Any

import schemathesis

_MODEL = os.environ["SUITE_MODEL"]
_LIMITS = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8, "n": 2}
_PLAIN = {
    "/chat/completions": ("messages", [{"role": "user", "content": "Hi"}], "max_tokens"),
    "/completions": ("prompt", "Hi", "max_tokens"),
    "/responses": ("input", "Hi", "max_output_tokens"),
}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict) or context.operation.path not in _PLAIN:
        return body
    asked, question, length = _PLAIN[context.operation.path]
    source = random.Random(json.dumps(body, sort_keys=True, default=repr))

    def chance(share: float) -> bool:
        return source.random() < share

    if chance(0.125):
        return body
    if chance(0.75):
        body = {key: value for key, value in body.items() if key == asked or chance(0.15)}
    if chance(0.75):
        body = {**body, asked: question}
    given = [name for name in _LIMITS if isinstance(body.get(name), int)]
    limits = {name: min(body[name], _LIMITS[name]) for name in given}
    if not any("max" in name for name in given):
        limits[length] = _LIMITS[length]
    return {**body, **limits, "model": _MODEL}


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    if isinstance(path_parameters, dict) and "model" in path_parameters:
        return {**path_parameters, "model": _MODEL}
    return path_parameters
