"""Requirements on other packages: each is declared, and each private part in use exists."""

import argparse
import ast
import dis
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

import mlx_mtp
from mlx_mtp.flags import CommandParser
from mlx_mtp.server.http import protocol
from mlx_mtp.server.serving import Server

PACKAGE = Path(mlx_mtp.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
DECLARED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["plot"]]
# Our classes that change others', the name of the other object in our code, and its class.
USES: list[tuple[type, str, type]] = [
    (protocol.LimitedProtocol, "self", HttpToolsProtocol),
    (protocol.LimitedProtocol, "cycle", RequestResponseCycle),
    (protocol.LimitedProtocol, "parser", httptools.HttpRequestParser),
    (Server, "self", uvicorn.Server),
    (CommandParser, "self", argparse.ArgumentParser),
]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> set[str]:
    """Returns the top-level modules that the package imports from other packages."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - {"mlx_mtp"} - sys.stdlib_module_names


def test_every_package_that_is_imported_is_declared() -> None:
    declared = {normalized(re.match(r"[\w.-]+", line)[0]) for line in DECLARED}
    owners = metadata.packages_distributions()
    missing = {
        name for name in imported() if not declared & set(map(normalized, owners.get(name, ())))
    }
    assert not missing


def test_packages_whose_private_parts_are_used_have_upper_bounds() -> None:
    for name in ("uvicorn", "httptools"):
        (line,) = (line for line in DECLARED if re.match(rf"{name}\b", line))
        assert "<" in line


def attributes(theirs: type) -> set[str]:
    """Returns the names that a class defines, or that its methods set."""
    methods = (each for base in theirs.__mro__ for each in vars(base).values())
    code = (each for each in methods if inspect.isfunction(each))
    steps = (step for each in code for step in dis.get_instructions(each))
    return {*dir(theirs), *(step.argval for step in steps if step.opname == "STORE_ATTR")}


@pytest.mark.parametrize(("ours", "name", "theirs"), USES)
def test_what_is_used_and_overridden_of_other_packages_exists(
    ours: type, name: str, theirs: type
) -> None:
    def is_named(node: Any) -> bool:
        return getattr(node, "id", None) == name or getattr(node, "attr", None) == name

    tree = ast.parse(inspect.getsource(ours))
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in uses if is_named(node.value)}
    set_here = {node.attr for node in uses if isinstance(node.ctx, ast.Store)}
    own = {defined for defined in vars(ours) if not defined.startswith("__")}
    assert used - own - set_here <= attributes(theirs)
    if name == "self":
        # A method that our code never calls must override one that their code calls.
        overriding = own - {node.attr for node in uses if not isinstance(node.value, ast.Call)}
        assert overriding and overriding <= attributes(theirs)


def test_serving_installs_no_developers_tools(tmp_path: Path) -> None:
    def installed(target: str) -> list[str]:
        argv = ["make", "--dry-run", target, f"VENV={tmp_path}", "EXTRA=cpu"]
        done = subprocess.run(argv, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
        # pip shows its progress: it is not quiet.
        return re.findall(r"pip install --disable-pip-version-check --editable '(.*)'", done.stdout)

    assert installed("serve") == [".[cpu]"]
    assert installed("test") == installed("setup") == [".[cpu]", ".[cpu,dev]"]
    assert installed("test-full") == [".[cpu]", ".[cpu,dev]", ".[cpu,dev,clients]"]


def test_uvicorn_is_used_as_it_is_called() -> None:
    """`Server._accept` creates the protocols, and uvicorn gets no socket to listen on."""
    assert {"config", "server_state", "app_state"} <= set(
        inspect.signature(HttpToolsProtocol).parameters
    )
    assert "sockets" in inspect.signature(uvicorn.Server.startup).parameters


def test_what_a_response_does_with_its_transport_is_offered() -> None:
    """`LimitedProtocol` stands in for the transport."""
    used = re.findall(r"self\.transport\.(\w+)", inspect.getsource(RequestResponseCycle))
    assert set(used) == {"write", "close", "is_closing"}
