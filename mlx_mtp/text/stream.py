"""Turns one sequence's tokens into text, up to a stop string, and the text into events."""

import codecs
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlx_mtp.engine.request import RequestOutput, TokenLogprobs
from mlx_mtp.errors import EngineError
from mlx_mtp.text.parsing.answer import AnswerParser
from mlx_mtp.text.parsing.events import Event, OutputToken, Text, merge_texts
from mlx_mtp.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of one choice; a choice's last delta has a finish reason."""

    index: int
    events: Sequence[Event] = ()
    finish_reason: str | None = None
    progress: Mapping[str, int] | None = None  # of the prompt, before the answer's first token


class Detokenizer:
    """Returns one sequence's text as soon as its characters are complete."""

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        self._text_bytes = text_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_decoded = 0  # characters returned so far

    def push(self, token_id: int) -> str:
        """Read one token; returns the characters that are now complete."""
        return self._counted(self._utf8.decode(self._text_bytes(token_id)))

    def flush(self) -> str:
        """End the sequence; returns U+FFFD if a character is incomplete, else nothing."""
        return self._counted(self._utf8.decode(b"", final=True))

    def _counted(self, text: str) -> str:
        self.num_decoded += len(text)
        return text


class Echo(NamedTuple):
    """A prompt that is repeated at the beginning of its completion."""

    text: str
    token_ids: Sequence[int] = ()  # empty unless logprobs are returned
    ends: Sequence[int] = ()  # each token's end in the text, in characters


def echo_of(
    given: str | list[int],
    token_ids: Sequence[int],
    token_bytes: Callable[[int], bytes],
    *,
    with_tokens: bool,
) -> Echo:
    """Returns a prompt's echo: its text as given, or the text of its ids with special tokens."""
    if isinstance(given, str) and not with_tokens:
        return Echo(given)
    decoder = Detokenizer(token_bytes)
    decoded = [(decoder.push(token), decoder.num_decoded) for token in token_ids]
    pieces, ends = zip(*decoded)
    text = given if isinstance(given, str) else "".join((*pieces, decoder.flush()))
    return Echo(text, token_ids, ends) if with_tokens else Echo(text)


class OutputStream:
    """Detokenizes and parses one sequence, and counts its tokens; a step yields one or several."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        parser: AnswerParser,
        stops: StopStrings,
        echo: Echo | None = None,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []  # so far, a stop token included
        self.num_reasoning_tokens = 0
        self.num_reused_tokens = 0  # of the prompt, from the prefix cache
        self.num_optimistic = 0
        self.last_drafts = 0  # drafts in the last step
        self.last_source = ""  # source of the drafts in the last step that had any
        # Drafts that were verified, by source and position in the window.
        self.drafts, self.accepted = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        self.steps: list[RequestOutput] = []  # so far, if a trace was requested
        self.finish_reason: str | None = None  # "stop", "length" or "tool_calls"
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()  # of all prompt tokens but the first
        self._detokenizer, self._parser, self._stops = detokenizer, parser, stops
        self._echo, self._has_begun = echo, False
        # Tokens whose text has not been emitted as content; then the end of the emitted content.
        self._waiting: deque[OutputToken] = deque()
        self._emitted = 0
        self._in_content = True

    def push(self, output: RequestOutput) -> Delta:
        if output.error is not None:
            raise output.error
        if output.finish_reason in ("error", "cancelled"):
            raise EngineError(f"The engine ended a sequence: {output.finish_reason}.")
        for entry in (*output.prompt_logprobs, *output.logprobs):
            # NaN fails this comparison too; an impossible token's -inf passes.
            values = (entry.logprob, *(value for _, value in entry.top))
            if not all(value < math.inf for value in values):
                raise EngineError(
                    "The model computed NaN: its weights are damaged, or its activations overflow "
                    "the data type (try --dtype float32)."
                )
        before = len(self.token_ids)
        events = [] if self._has_begun else self._begin(output.prompt_logprobs)
        shows_all = output.finish_reason != "stop" or self._stops.include
        hidden = None if shows_all else len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            self.token_ids.append(token)
            if position == hidden:
                # A stop token counts, but has no text. lm-eval requests one token after an echoed
                # prompt and reads the last logprobs as that token's, even if it is a stop token.
                if self._echo is not None and output.logprobs:
                    at = self._detokenizer.num_decoded
                    self._waiting.append(OutputToken(token, output.logprobs[position], at, at))
                break
            events += self._take_token(token, output.logprobs[position : position + 1])
            if self._ended_early:
                break
        self.num_reused_tokens += output.num_reused_tokens
        self.last_drafts = output.num_draft_tokens
        if output.drafts is not None:
            self.steps.append(replace(output, token_ids=tuple(self.token_ids[before:])))
        # Accepted drafts come first in a step; a stop string may have cut some of them off.
        accepted = min(output.num_accepted_tokens, len(self.token_ids) - before)
        self.num_optimistic += sum(place < accepted for place in output.optimistic)
        if output.num_draft_tokens:
            self.last_source = output.draft_source
            self.drafts.update((self.last_source, n) for n in range(output.num_draft_tokens))
            self.accepted.update((self.last_source, n) for n in range(accepted))
        reason = "stop" if self._ended_early else output.finish_reason
        if reason is None:
            return Delta(self.index, self._with_tokens(events))
        return self._finish(reason, events)

    def _begin(self, prompt_logprobs: Sequence[TokenLogprobs]) -> list[Event]:
        self.prompt_logprobs, self._has_begun = prompt_logprobs, True
        events: list[Event] = []
        if self._echo is not None:
            text, token_ids, ends = self._echo
            logprobs, starts = (None, *prompt_logprobs), (0, *ends)
            self._waiting += map(OutputToken, token_ids, logprobs, starts, ends)
            self._detokenizer.num_decoded = len(text)
            events = self._parser.feed(text)
        self._parser.stops = self._stops  # Stop strings apply only after the prompt.
        return events

    def _take_token(self, token: int, logprobs: Sequence[TokenLogprobs]) -> list[Event]:
        start = self._detokenizer.num_decoded
        text = self._detokenizer.push(token)
        self._stops.count_token()
        if logprobs:
            end = self._detokenizer.num_decoded
            self._waiting.append(OutputToken(token, logprobs[0], start, end))
        was_reasoning = self._parser.in_reasoning
        events = self._parser.feed(text)
        self.num_reasoning_tokens += was_reasoning or self._parser.in_reasoning
        return events

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def stop_text(self) -> str | None:
        return self._stops.found

    @property
    def _ended_early(self) -> bool:
        return self.stop_text is not None or self._parser.done

    def _finish(self, reason: str, events: list[Event]) -> Delta:
        events += self._parser.feed(self._detokenizer.flush())
        is_cut = reason == "length" or self.stop_text is not None
        events += self._parser.finish(cut=is_cut)
        if self.stop_text is not None:
            reason = "stop"  # The flushed text has completed a stop string.
        # A client must act neither on half a call nor on the calls before it as if complete.
        if reason == "stop" and self._parser.num_calls and not self._parser.ends_in_call:
            reason = "tool_calls"
        self.finish_reason = reason
        events = self._with_tokens(events)
        if self.stop_text is None and self._in_content:
            rest = tuple(token for token in self._waiting if token.start >= self._emitted)
            if rest:  # Tokens without text.
                events.append(Text("", self._emitted, rest))
        return Delta(self.index, events, reason)

    def _with_tokens(self, events: Iterable[Event]) -> list[Event]:
        joined = merge_texts(events)
        for number, event in enumerate(joined):
            self._in_content = False
            if isinstance(event, Text):
                self._in_content, self._emitted = True, event.start + len(event.text)
                if self._waiting:
                    joined[number] = replace(event, tokens=self._tokens_of(event))
        return joined

    def _tokens_of(self, event: Text) -> tuple[OutputToken, ...]:
        waiting = self._waiting
        while waiting and waiting[0].start < event.start >= waiting[0].end:
            waiting.popleft()  # A token of reasoning or of a call.
        tokens = []
        while waiting and waiting[0].start < self._emitted:
            tokens.append(waiting.popleft())
        return tuple(tokens)
