"""What `make bench` starts."""

from benchmarks.concurrency import contenders
from mlx_mtp import cli


def test_the_contenders_can_be_started(tmp_path):
    first, off, *mtp = contenders(tmp_path)
    assert first.name == "mlx_lm.server"
    assert (tmp_path / "float32" / "config.json").is_file()
    assert [c.name for c in mtp] == [*(f"MTP, k = {k}" for k in (1, 2, 3)), "MTP, auto"]
    for contender in (off, *mtp):
        start_of_ours = contender.command.index("mlx_mtp") + 1
        given = cli._parser().parse_args(contender.command[start_of_ours:])
        assert given.command == "serve"
        assert getattr(given, "enable_mtp", False) == (contender is not off)
