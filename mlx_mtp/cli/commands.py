"""The commands in the order of the help: functions that register them."""

from mlx_mtp.bench.arguments import add_bench
from mlx_mtp.chat.command import add_terminal
from mlx_mtp.cli.config import add_config
from mlx_mtp.cli.launch import add_launch
from mlx_mtp.cli.serve_command import add_serve
from mlx_mtp.cli.service import add_service
from mlx_mtp.cli.top import add_top
from mlx_mtp.connect.command import add_connect
from mlx_mtp.convert.commands import add_convert
from mlx_mtp.inspect.command import add_inspect
from mlx_mtp.selftest.arguments import add_selftest

ADDERS = (
    *(
        add_serve,
        add_launch,
        add_terminal,
        add_connect,
        add_config,
        add_service,
        add_top,
        add_bench,
    ),
    *(add_selftest, add_inspect, add_convert),
)
