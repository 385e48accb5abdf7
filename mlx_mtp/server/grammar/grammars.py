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
"""Maximum number of cached grammars, invalid ones included. A grammar's lexer grows as answers use
it, to about 64 MB at its limit of 50,000 states (llguidance reports no size). Of 399 real schemas 4
needed more than 5,000 states and none more than 10,000."""

_SEARCH_SECONDS = 1.0  # limit of the search for the tool whose schema is at fault


class Grammars:
    """Compiles grammars one at a time, and caches the latest.

    Construct it before serving: that holds the GIL for up to a second. If `as_standard`, objects
    may have properties beyond those of their JSON schema.
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
        # The thread's stack is larger than a grammar that passed the check can need.
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
        """Returns the compiled grammar; waits for the turn of `client`.

        `field` names the grammar in errors; `tools` are the tools in the grammar, in its order.
        Raises GrammarError if the grammar is invalid or too expensive, UnsupportedParameterError
        if no grammar can be used with this model, and UnavailableError if the check was killed.
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
