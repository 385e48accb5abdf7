"""Compiles and caches requests' grammars, off the event loop and off the engine's thread."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_mtp.errors import GrammarError, UnavailableError, UnsupportedParameterError
from mlx_mtp.sampling.grammar import Grammar, GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.generation.inputs import Tool
from mlx_mtp.server.grammar.json_schemas import styled
from mlx_mtp.server.grammar.tool_errors import named_error
from mlx_mtp.server.http.admission import FairExecutor
from mlx_mtp.text.sandbox import grammar_check
from mlx_mtp.text.sandbox.helper import Helper
from mlx_mtp.text.tokenizer import Tokenizer

MAX_CACHED = 16
"""Grammars that are cached, wrong ones included. Their lexers grow as answers use them, up to some
64 MB with the 50,000 states that each may have (llguidance reports no size). Of 399 real schemas 4
needed more than 5,000 states and none more than 10,000."""

_SEARCH_SECONDS = 1.0  # for the tool at fault


class Grammars:
    """Compiles grammars one at a time, and keeps the latest.

    Construct it before serving: that takes up to a second and holds up all threads. If
    `as_standard`, a JSON schema allows all that its standard allows.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], *, as_standard: bool = False
    ) -> None:
        self._as_standard = as_standard
        known = [token for token in eos_token_ids if token < tokenizer.vocab_size]
        tokenizer_json = tokenizer.to_json()
        self._compiler: GrammarCompiler | None = None
        self._checker = Helper(grammar_check.__name__, [tokenizer_json, known])
        self._cache: OrderedDict[GrammarSpec, Grammar | GrammarError] = OrderedDict()
        self._missing = "this model names no token that ends an answer"
        if known:
            try:
                self._compiler = GrammarCompiler(tokenizer_json, known)
            except ValueError as error:
                self._missing = f"llguidance can't use its tokenizer: {error}"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlx-mtp-grammars")
        # The thread's stack is larger than a checked grammar can need.
        before = threading.stack_size(8 * grammar_check.STACK_BYTES)
        self._pool.submit(int).result()
        threading.stack_size(before)
        self._turns = FairExecutor(1, self._pool)

    async def compile(
        self,
        spec: GrammarSpec,
        field: str,
        client: tuple[str, ...],
        tools: Sequence[Tool] = (),
    ) -> Grammar:
        """Return the compiled grammar; GrammarError: that of `field` is wrong or too expensive.

        `tools` are those whose calls are in the grammar, in its order.
        """
        if self._compiler is None:
            raise UnsupportedParameterError(
                f"{field} needs a grammar, but {self._missing}.", param=field
            )
        grammar = self._cache.get(spec)
        if grammar is None:
            # Another request may have compiled it meanwhile.
            compiled = partial(self._compile, self._compiler, spec, tools)
            grammar = await self._turns.run(client, lambda: self._cache.get(spec) or compiled())
        self._cache[spec] = grammar
        self._cache.move_to_end(spec)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        if isinstance(grammar, GrammarError):
            field = grammar.param or field
            raise GrammarError(f"{field} can't be enforced: {grammar}", param=field)
        return grammar

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._checker.close()

    def _compile(
        self, compiler: GrammarCompiler, spec: GrammarSpec, tools: Sequence[Tool]
    ) -> Grammar | GrammarError:
        if spec.kind in ("json_schema", "json_object"):
            schema = json.loads(spec.value or '{"type": "object"}')
            text = json.dumps(styled(schema, as_standard=self._as_standard))
            spec = replace(spec, kind="json_schema", value=text)
        try:
            grammar_check.try_grammar(self._checker, spec)
            return grammar_check.compile_grammar(compiler, spec)
        except GrammarError as error:
            if not tools:
                return GrammarError(str(error))
            until = time.monotonic() + _SEARCH_SECONDS

            def error_of(schema: Mapping[str, Any]) -> str | None:
                if time.monotonic() > until:
                    raise TimeoutError from None
                try:
                    grammar_check.try_grammar(
                        self._checker, GrammarSpec("json_schema", json.dumps(schema))
                    )
                except GrammarError as fault:
                    return str(fault)
                except UnavailableError:
                    raise TimeoutError from None
                return None

            return named_error(str(error), spec.value, tools, error_of)
