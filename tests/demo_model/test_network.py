"""The PyTorch models: equal to the reference head and to the server, packed or alone."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `train`")

from demo_model.acceptance import DEPTH  # noqa: E402
from demo_model.dice import Dice  # noqa: E402
from demo_model.export import load_published, published, write_checkpoint  # noqa: E402
from demo_model.network.config import PRESETS, smaller, text_config  # noqa: E402
from demo_model.network.decoding import Noise, answers  # noqa: E402
from demo_model.network.model import DemoModel, attention_masks  # noqa: E402
from demo_model.packing import Document, pack  # noqa: E402
from mlx_mtp.models.loader import load_model  # noqa: E402
from tests.harness import Driver, greedy, plain, request  # noqa: E402
from tests.reference_head import ReferenceHead  # noqa: E402

torch.set_num_threads(1)
VOCAB = 4096


def random_model(name: str) -> DemoModel:
    """Weights far enough from their beginning that every one of them matters."""
    torch.manual_seed(5)
    model = DemoModel(smaller(PRESETS[name])).eval()
    for key, parameter in model.named_parameters():
        if "norm" in key:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
        elif parameter.ndim >= 2 and "conv" not in key:
            parameter.data.mul_(4)
    return model


@pytest.fixture(scope="module", params=tuple(PRESETS))
def saved(request, tmp_path_factory):
    """A model as a checkpoint holds it, and the checkpoint's directory."""
    directory = tmp_path_factory.mktemp(request.param)
    model = random_model(request.param)
    write_checkpoint(model, directory)
    return load_published(model, directory), directory


def some_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def test_drafts_are_those_of_the_reference_head(saved):
    """At every depth: the logits of a window that begins at one row, all drafts accepted."""
    model, _ = saved
    tensors = {k: v.float().numpy() for k, v in published(model).items()}
    infix = "" if model.config.num_experts else "language_model."
    embed = f"model.{infix}embed_tokens.weight"
    head = ReferenceHead(tensors, text_config(model.config), "mtp.", embed)
    ids = some_ids(1, 32)
    start = 12
    segments = torch.ones_like(ids)
    masks = attention_masks(segments, DEPTH)
    with torch.no_grad():
        hidden, _ = model.trunk(ids, segments, masks[0])
        for depth in range(DEPTH):
            made = model.drafts(ids, segments, hidden, masks)[depth][0]
            ours = model.lm_head(made)[0, start + depth]
            tokens = ids[0, 1 : start + 2].tolist()
            theirs = head.drafts(hidden[0, : start + 1].numpy(), tokens, DEPTH)[depth]
            np.testing.assert_allclose(ours.numpy(), theirs, atol=3e-5, rtol=1e-3)
            # The reference feeds itself its own drafts: make these the text, which is causal.
            ids[0, start + depth + 2] = int(np.argmax(theirs))


def test_documents_of_a_row_do_not_see_each_other():
    """Logits of trunk and head in a packed row are those of the document alone."""
    model = random_model("moe")
    lengths = (37, 50, 21)
    texts = [some_ids(1, n)[0].roll(i).tolist() for i, n in enumerate(lengths)]
    rows = pack([Document(t, [2] * len(t)) for t in texts], 128, Dice(0))
    assert len(rows) == 1
    ids = torch.from_numpy(rows.ids).long()
    segments = torch.from_numpy(rows.segments).int()
    with torch.no_grad():
        packed = drafts_and_logits(model, ids, segments)
        for number in range(1, len(texts) + 1):
            where = segments[0] == number
            length = int(where.sum())
            alone = torch.zeros(1, 64, dtype=torch.long)
            alone[0, :length] = ids[0, where]
            own = (torch.arange(64) < length).int().unsqueeze(0)
            for name, (a, b) in enumerate(
                zip(packed, drafts_and_logits(model, alone, own), strict=True)
            ):
                # A head's row needs the token after it, and as many rows before it as its depth.
                inside = slice(max(0, name - 1), length - (1 if name else 0))
                torch.testing.assert_close(
                    a[0, where][inside], b[0, :length][inside], atol=1e-4, rtol=1e-3
                )


def drafts_and_logits(model, ids, segments) -> list[torch.Tensor]:
    masks = attention_masks(segments, DEPTH)
    hidden, _ = model.trunk(ids, segments, masks[0])
    made = [each for each, _ in model.drafts(ids, segments, hidden, masks)]
    return [model.lm_head(each) for each in (hidden, *made)]


def test_answers_are_those_of_the_server(saved):
    """Greedy, ragged prompts together."""
    model, directory = saved
    prompts = [some_ids(1, 70)[0, :n].tolist() for n in (5, 33, 64)]
    loaded = load_model(directory, enable_mtp=True)
    said = answers(model, prompts, 24, Noise(0.0, 0))
    driver = Driver(loaded, vocab_size=VOCAB, stop_ids=(4089, 4087))
    for index, prompt in enumerate(prompts):
        wanted = request(str(index), prompt, greedy(24))
        assert tuple(said[index]) == plain(loaded, wanted, VOCAB, (4089, 4087)).tokens
        driver.add(wanted)
    assert driver.run() == {str(i): tokens for i, tokens in enumerate(said)}
