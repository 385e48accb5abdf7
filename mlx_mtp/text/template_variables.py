"""A chat template's syntax, and which variables it reads, without running any of it."""

import re
from functools import lru_cache
from typing import NoReturn

from jinja2 import Environment, TemplateError, meta, nodes

_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols"])
_ENVIRONMENT.globals.clear()  # They are variables too.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # a tag that transformers adds
_WORD = re.compile(r"\w+")


def syntax_of(template: str) -> nodes.Template:
    """Parse, no more: compiling would compute constants such as 7 ** 10**8.

    Raises TemplateError, or RecursionError.
    """
    return _ENVIRONMENT.parse(_GENERATION.sub("", template))


class _Tracker(meta.TrackingCodeGenerator):
    """Jinja's `find_undeclared_variables`, but it computes no constants."""

    def __init__(self) -> None:
        super().__init__(_ENVIRONMENT)
        self.optimizer = None

    def _output_child_to_const(self, *_: object) -> NoReturn:
        raise nodes.Impossible


@lru_cache(maxsize=16)
def variables(template: str) -> frozenset[str]:
    """The names that a template reads and has not set before in any case.

    A hostile template of 64 KB takes seconds.
    """
    tracker = _Tracker()
    try:
        tracker.visit(syntax_of(template))
    except (TemplateError, RecursionError):
        return frozenset(_WORD.findall(template))  # Rendering will say what is wrong with it.
    return frozenset(tracker.undeclared_identifiers)
