"""A chat template's syntax, and which variables it reads, without running any of it."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from jinja2 import Environment, TemplateError, nodes

_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols"])
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # a tag that transformers adds
_WORD = re.compile(r"\w+")


def syntax_of(template: str) -> nodes.Template:
    """Parse, no more: compiling would compute constants such as 7 ** 10**8.

    Raises TemplateError, or RecursionError.
    """
    return _ENVIRONMENT.parse(_GENERATION.sub("", template))


@lru_cache(maxsize=16)
def variables(template: str) -> frozenset[str]:
    """The names that a template reads before it has set them in any case."""
    try:
        return frozenset(_read(syntax_of(template).body, set()))
    except (TemplateError, RecursionError):
        return frozenset(_WORD.findall(template))  # Whether it means something shows later.


def _read(parts: Iterable[nodes.Node], known: set[str]) -> Iterator[str]:
    """The names that are read and not known; known ones are added as they are set."""
    for node in parts:
        match node:
            case nodes.Name():
                if node.ctx == "load" and node.name not in known:
                    yield node.name
            case nodes.Assign():
                yield from _read([node.node], known)
                known |= _set_in(node.target)
            case nodes.AssignBlock():
                yield from _read(node.body, set(known))
                known |= _set_in(node.target)
            case nodes.For():
                yield from _read([node.iter], known)
                inner = known | _set_in(node.target) | {"loop"}
                yield from _read([*node.body, *([node.test] if node.test else [])], inner)
                yield from _read(node.else_, set(known))
            case nodes.If():
                yield from _read([node.test], known)
                for branch in (node.body, node.elif_, node.else_):
                    yield from _read(branch, set(known))
            case nodes.Macro() | nodes.CallBlock():
                yield from _read(node.defaults, known)
                own = {argument.name for argument in node.args}
                if isinstance(node, nodes.Macro):
                    known.add(node.name)
                else:
                    yield from _read([node.call], known)
                yield from _read(node.body, known | own | {"caller", "varargs", "kwargs"})
            case _:
                yield from _read(node.iter_child_nodes(), known)


def _set_in(target: nodes.Node) -> set[str]:
    names = [target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name)
    return {name.name for name in names}
