"""Fields about single tokens: log-probabilities, and the trace for `mtp: {"trace": true}`."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from mlx_mtp.engine.request import RequestOutput, TokenLogprobs
from mlx_mtp.text.parsing.events import OutputToken
from mlx_mtp.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # OpenAI's, for an impossible token: JSON has no infinity
OutputTokens = Sequence[OutputToken]


def logprob_entries(tokenizer: Tokenizer, tokens: OutputTokens) -> list[dict[str, Any]]:
    """Returns OpenAI's entries for a chat's tokens, each with its alternatives."""

    def candidate(token_id: int, logprob: float) -> dict[str, Any]:
        text, content = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": _clamped(logprob), "bytes": list(content)}

    entries = []
    for token in tokens:
        assert token.logprobs is not None
        top = [candidate(*pair) for pair in token.logprobs.top]
        entries.append(candidate(token.token_id, token.logprobs.logprob) | {"top_logprobs": top})
    return entries


def completion_logprobs(tokenizer: Tokenizer, tokens: OutputTokens, most: int) -> dict[str, Any]:
    """Returns OpenAI's lists for a completion's tokens, with up to `most` alternatives each.

    The tokens of an echo are included.
    """
    name = tokenizer.token_text
    logprobs: list[float | None] = []
    alternatives: list[dict[str, float] | None] = []
    for token in tokens:
        logprob, top = None, None
        if token.logprobs is not None:
            logprob = _clamped(token.logprobs.logprob)
            # The token itself is always among the alternatives, as in OpenAI's API.
            pairs = (*token.logprobs.top[:most], (token.token_id, logprob))
            top = {name(other): _clamped(value) for other, value in pairs}
        logprobs.append(logprob)
        alternatives.append(top)
    return {
        "tokens": [name(token.token_id) for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": alternatives,
        "text_offset": [token.start for token in tokens],
    }


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], most: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Returns vLLM's list for a prompt's tokens: each token and `most` alternatives, by their ids.

    `entries` are for all tokens but the first, whose place in the list has None.
    """

    def candidate(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"logprob": _clamped(logprob), "rank": rank, "decoded_token": text}

    listed: list[dict[str, dict[str, Any]] | None] = [None]
    for token_id, entry in zip(token_ids[1:], entries, strict=True):
        top = enumerate(entry.top[:most], start=1)
        ranked = {str(other): candidate(other, value, rank) for rank, (other, value) in top}
        itself = {str(token_id): candidate(token_id, entry.logprob, entry.rank)}
        listed.append(itself | ranked | itself)
    return listed


def _clamped(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


class Trace:
    """Reports what each step of one choice drafted, accepted and sampled.

    The joined texts of the tokens are the answer as the model wrote it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], steps: list[RequestOutput]) -> None:
        self._token_bytes, self._steps = token_bytes, steps
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self) -> list[dict[str, Any]]:
        """Returns the steps since the last call."""
        steps = list(map(self._step, self._steps))
        self._steps.clear()
        return steps

    def _step(self, output: RequestOutput) -> dict[str, Any]:
        # Drafts follow the tokens before the step, which may end within a character.
        before = self._utf8.getstate()
        source = output.draft_source
        drafts = [{**self._token(each), "source": source} for each in output.drafts or ()]
        self._utf8.setstate(before)
        tokens = list(map(self._token, output.token_ids))
        accepted = min(output.num_accepted_tokens, len(tokens))
        return {"tokens": tokens, "drafts": drafts, "num_accepted": accepted}

    def _token(self, token_id: int) -> dict[str, Any]:
        return {"id": token_id, "text": self._utf8.decode(self._token_bytes(token_id))}
