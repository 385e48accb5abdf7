"""How foreseeable open text will be, before anything is trained: `python -m demo_model.estimate`.

A head drafts the rest of a sentence's fixed words almost surely, and misses some share of the words
that were chosen. That share is the model's; how many words are chosen is the text's.
"""

from __future__ import annotations

import argparse

from demo_model.dice import DEFAULT_LEAN, Dice
from demo_model.mixture import OPEN
from demo_model.tokenizer import load

MISSED = (0.2, 0.4, 0.6)


def estimate(lean: float, num_texts: int) -> list[tuple[str, float, float]]:
    """For each open task: bits of surprise a token, and chosen words a token."""
    tokenizer = load()
    out = []
    for make, _ in OPEN:
        dice = Dice("estimate", lean)
        texts = [make(dice) for _ in range(num_texts)]
        encoded = tokenizer.encode_batch_fast([t.answer for t in texts], add_special_tokens=False)
        size = sum(len(each.ids) for each in encoded)
        out.append((texts[0].task, dice.bits / size, dice.num_leaning / size))
    return out


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lean", type=float, default=DEFAULT_LEAN)
    parser.add_argument("--texts", type=int, default=400, help="of each task")
    arguments = parser.parse_args()
    shown = ", ".join(f"{missed:.0%}" for missed in MISSED)
    print(f"lean {arguments.lean}; acceptance at depth 1 if the head misses {shown} of the choices")
    for task, bits, chosen in estimate(arguments.lean, arguments.texts):
        rates = "  ".join(f"{1 - missed * chosen:.3f}" for missed in MISSED)
        print(f"{task:12} {bits:5.2f} bits a token, {chosen:5.1%} chosen, accepted {rates}")


if __name__ == "__main__":
    main()
