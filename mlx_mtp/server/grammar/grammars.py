"""Grammars for requests: compiled off the event loop and off the engine's thread, and kept."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from mlx_mtp.errors import GrammarError, UnsupportedParameterError
from mlx_mtp.sampling.grammar import Grammar, GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.grammar.json_schemas import styled
from mlx_mtp.server.http.fair_executor import FairExecutor
from mlx_mtp.text.sandbox.grammar_check import STACK_BYTES, check, checker, compile_grammar
from mlx_mtp.text.tokenizer import Tokenizer

MAX_CACHED = 16
"""Grammars that are kept, those that are wrong among them. Their lexers grow as answers use them,
and llguidance tells no size: some 64 MB with the 50,000 states that each may have. Of 399 real
schemas 4 needed more than 5,000 and none more than 10,000."""


class Grammars:
    """Compiles what requests ask for, one at a time, and keeps the latest.

    Build it before anything is served: it takes up to a second, and holds up all threads meanwhile.
    If `as_standard`, a JSON schema means what its standard says, and no less.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], *, as_standard: bool = False
    ) -> None:
        self._as_standard = as_standard
        known = [token for token in eos_token_ids if token < tokenizer.vocab_size]
        tokenizer_json = tokenizer.to_json()
        self._compiler: GrammarCompiler | None = None
        self._checker = checker(tokenizer_json, known)
        self._kept: OrderedDict[GrammarSpec, Grammar | str] = OrderedDict()
        self._missing = "this model names no token that ends an answer"
        if known:
            try:
                self._compiler = GrammarCompiler(tokenizer_json, known)
            except ValueError as error:
                self._missing = f"llguidance can't use its tokenizer: {error}"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlx-mtp-grammars")
        # Its thread has a larger stack than a checked grammar can need.
        before = threading.stack_size(8 * STACK_BYTES)
        self._pool.submit(int).result()
        threading.stack_size(before)
        self._turns = FairExecutor(1, self._pool)

    async def compile(self, spec: GrammarSpec, field: str, client: tuple[str, ...]) -> Grammar:
        """Compile a grammar, or find it; GrammarError: that of `field` is wrong or expensive."""
        if self._compiler is None:
            raise UnsupportedParameterError(
                f"{field} needs a grammar, but {self._missing}.", param=field
            )
        found = self._kept.get(spec)
        if found is None:
            # Another client may have asked for the same one meanwhile.
            compiled = partial(self._compile, self._compiler, spec)
            found = await self._turns.run(client, lambda: self._kept.get(spec) or compiled())
        self._kept[spec] = found
        self._kept.move_to_end(spec)
        if len(self._kept) > MAX_CACHED:
            self._kept.popitem(last=False)
        if isinstance(found, str):
            raise GrammarError(f"{field} can't be enforced: {found}", param=field)
        return found

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._checker.close()

    def _compile(self, compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar | str:
        if spec.kind in ("json_schema", "json_object"):
            schema = json.loads(spec.value or '{"type": "object"}')
            text = json.dumps(styled(schema, as_standard=self._as_standard))
            spec = replace(spec, kind="json_schema", value=text)
        try:
            check(self._checker, spec)
            return compile_grammar(compiler, spec)
        except GrammarError as error:
            return str(error)
