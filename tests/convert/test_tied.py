"""Copies of the trunk's matrices are left out; whether they were copies is printed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.convert.checkpoints import Raw, bf16, encode_all, write_file
from tests.tiny_models import Layout, hf_tensors

COPIES = {
    "mtp.embed_tokens.weight": "embed_tokens.weight",
    "mtp.lm_head.weight": "lm_head.weight",
    "mtp.shared_head.head.weight": "lm_head.weight",
}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize(
    ("change", "words", "count"),
    [
        (lambda copy, values: values, "; they are equal", 3),
        (lambda copy, v: v[::-1] if "lm_head" in copy else v, "warning: mtp.lm_head.weight", 1),
        (lambda copy, values: values[:50], "warning: ", 3),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_copies(pair, family, tied, change, words, count):
    layout = Layout(family, tied=tied)
    pair.write(layout)
    raws, meant = encode_all(hf_tensors(layout), "BF16")
    for copy, ending in COPIES.items():
        name = "embed_tokens.weight" if tied else ending
        trunk = next(k for k in meant if k.endswith(name) and "mtp." not in k)
        raws[copy] = Raw("BF16", bf16(change(copy, meant[trunk])))
    write_file(pair.source / "model.safetensors", raws, {"format": "pt"})
    said = pair.run()
    assert said.count("is left out, as the trunk's own is used") == 3
    assert said.count(words) == count
    assert not any(name.encode() in pair.sidecar.read_bytes() for name in COPIES)


def test_copies_with_no_trunk_at_hand(pair):
    def change(raws):
        for name in [name for name in raws if "mtp." not in name]:
            del raws[name]
        raws.update({copy: Raw("BF16", np.zeros((96, 64), np.uint16)) for copy in COPIES})

    pair.rewrite(change)
    assert pair.run().count("not compared") == 3
