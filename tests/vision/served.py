"""A tiny model with a vision tower and the bundled tokenizer, as a directory for `serve`."""

import json
from pathlib import Path
from typing import Any

from mlx_mtp.models.hub import BUNDLED_MODEL
from tests.support.tiny_models import Layout, change_json, write_checkpoint

NAMES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}
{%- if p.type != 'image' %}{{ p.text }}
{%- else %}
  {%- if m.role == 'system' %}{{ raise_exception('no images here') }}{% endif %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def seeing_library_tokenizer() -> Any:
    """Returns transformers' tokenizer with image tokens, and a template that places images."""
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
    inner.add_special_tokens({"additional_special_tokens": list(NAMES)})
    inner.chat_template = TEMPLATE
    return inner


def write_served_model(path: Path) -> None:
    inner = seeing_library_tokenizer()
    write_checkpoint(path, Layout("qwen3_5", sees=True, vocab=4160))
    inner.save_pretrained(str(path))
    fields = "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"
    change_json(path / "config.json", **dict(zip(fields, inner.convert_tokens_to_ids(list(NAMES)))))
    size = {"shortest_edge": 64, "longest_edge": 1 << 20}
    (path / "preprocessor_config.json").write_text(json.dumps({"size": size}))
