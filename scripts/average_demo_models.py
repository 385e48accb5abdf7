#!/usr/bin/env python
"""Average the weights of checkpoints of one run's phases into a new checkpoint.

python scripts/average_demo_models.py build/moe.2 build/moe.3 --output build/moe

A short last phase leaves noise in the weights; the mean of its beginning and its end has less.
After Wortsman et al., "Robust fine-tuning of zero-shot models", https://arxiv.org/abs/2109.01903.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> None:
    """Write the mean and how it was made; not how good it is, which is for the evaluation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+", help="directories, of one preset")
    parser.add_argument("--output", type=Path, required=True, help="directory of the new one")
    arguments = parser.parse_args()

    from demo_model.evaluate import config_of
    from demo_model.export import load_published, write_checkpoint
    from demo_model.network.model import DemoModel

    sources: list[Path] = arguments.checkpoints
    config = config_of(sources[0])
    if any(config_of(source) != config for source in sources):
        parser.error("the checkpoints are not of one shape")
    models = [load_published(DemoModel(config), source) for source in sources]
    states = [model.state_dict() for model in models]
    mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
    models[0].load_state_dict(mean)
    write_checkpoint(models[0], arguments.output)
    told = [json.loads((source / "metrics.json").read_text("utf-8")) for source in sources]
    phases = [{k: v for k, v in each["training"].items() if k != "history"} for each in told]
    training = {"generator": phases[-1]["generator"], "mean_of": phases}
    metrics = {**told[0], "training": training, "evaluation": {}}
    text = json.dumps(metrics, indent=1) + "\n"
    (arguments.output / "metrics.json").write_text(text, encoding="utf-8")
    print(f"wrote {arguments.output}, the mean of {len(sources)}")


if __name__ == "__main__":
    main()
