"""The tokenizer: byte-level BPE over the generator's text, and its files in Hugging Face's form.

`python -m demo_model.tokenizer` (from scripts/) writes `tokenizer.json` beside this file. It is
kept in the repository: both models and all runs share it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from demo_model.chat import END, START, ToolFormat, segments, template
from demo_model.dice import Dice
from demo_model.mixture import Settings, training_chat
from demo_model.phrasing import invented

VOCAB_SIZE = 4096
SPECIAL = ("<|endoftext|>", START, END)
ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
PAD_ID = VOCAB_SIZE - len(SPECIAL) - len(ADDED)
END_ID = PAD_ID + SPECIAL.index(END)
MAX_LENGTH = 65536
FILE = Path(__file__).parent / "tokenizer.json"


def train(num_chats: int, seed: int) -> Any:
    """A tokenizer from so many chats.

    Digits stay single, so that arithmetic sees them; the rest is the library's own byte level.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PAD_ID,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_chats, seed), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def _texts(num_chats: int, seed: int) -> Iterator[str]:
    """The chats without their added tokens, and invented words, which need short pieces."""
    dice = Dice(f"tokenizer {seed}")
    settings = Settings(max_tokens=1024)
    for number in range(num_chats):
        if number % 4 == 0:
            yield " ".join(invented(dice) for _ in range(60))
        for text, _ in segments(training_chat(dice, settings), "xml" if number % 2 else "hermes"):
            for token in (*SPECIAL, *ADDED):
                text = text.replace(token, "\n")
            yield text


@cache
def load() -> Any:
    """The tokenizer in the repository, read once."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(FILE))


def write_files(directory: Path, tool_format: ToolFormat) -> None:
    """tokenizer.json and tokenizer_config.json, with the chat template in it."""
    (directory / "tokenizer.json").write_bytes(FILE.read_bytes())
    fields = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(PAD_ID + index): {"content": token, **fields, "special": token in SPECIAL}
        for index, token in enumerate((*SPECIAL, *ADDED))
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [START, END],
        "bos_token": None,
        "chat_template": template(tool_format),
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "pad_token": SPECIAL[0],
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    train(num_chats=40_000, seed=7).save(str(FILE), pretty=False)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
