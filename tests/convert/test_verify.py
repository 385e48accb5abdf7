"""`--verify` measures what serving would accept, and a wrong head fails it."""

import re
import shutil

import pytest

from mlx_mtp.convert import verify
from mlx_mtp.convert.convert import add_head
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.loader import load_model
from tests.conftest import DEMO
from tests.convert.checkpoints import read_file, write_file
from tests.convert.conftest import snapshot


def test_a_wrong_head_is_not_put_in_place_and_a_right_one_is(tmp_path, capsys, monkeypatch):
    """Without the norms' 1, which is what a wrong --mtp-norms gives."""
    monkeypatch.setattr(verify, "PROMPTS", verify.PROMPTS[1::2])
    monkeypatch.setattr(verify, "NUM_TOKENS", 16)
    source, target = tmp_path / "source", tmp_path / "target"
    tensors = {}
    for path in DEMO.glob("*.safetensors"):
        tensors |= read_file(path)[0]
    for directory, is_head in ((source, True), (target, False)):
        directory.mkdir()
        for path in DEMO.glob("*.json"):
            if "index" not in path.name:
                shutil.copy(path, directory)
        kept = {name: each for name, each in tensors.items() if name.startswith("mtp.") == is_head}
        name, metadata = ("mtp", {}) if is_head else ("model", {"format": "pt"})
        write_file(directory / f"{name}.safetensors", kept, metadata)
    before = snapshot(target)
    with pytest.raises(ConvertError, match="The head is wrong"):
        add_head(str(target), str(source), mtp_norms="mlx", verify=True)
    assert snapshot(target) == before
    add_head(str(target), str(source), mtp_norms="hf", verify=True)
    assert load_model(target, enable_mtp=True).head_source == "sidecar mtp.safetensors"
    capsys.readouterr()
    add_head(str(target), str(source), mtp_norms="hf", verify=True)
    said = capsys.readouterr().out
    assert "nothing to do" in said
    assert said.count("healthy heads") == 3
    first, second, third = map(float, re.findall(r"depth \d: +([\d.]+)%", said))
    assert 100 >= first >= second > third > 40
