"""The times and drafts of a request's answers, in llama.cpp's form."""

from collections import Counter
from typing import Any

from mlx_mtp.server.generation.generation import Generation


def timings(generation: Generation) -> dict[str, Any]:
    """The `timings` of an answer; the prompt's time lasts until the first tokens have come."""
    first = generation.last if generation.first is None else generation.first
    prompt, predicted = first - generation.began, generation.last - first
    cached, num_tokens = generation.cached_tokens, generation.completion_tokens
    computed = generation.prompt_tokens - cached
    streams = generation.streams
    drafts = sum((stream.drafts for stream in streams), Counter[tuple[str, int]]())
    accepted = sum((stream.accepted for stream in streams), Counter[tuple[str, int]]())
    sources: dict[str, dict[str, list[int]]] = {}
    for source, position in sorted(drafts):
        counts = sources.setdefault(source, {"draft_n": [], "draft_n_accepted": []})
        counts["draft_n"].append(drafts[source, position])
        counts["draft_n_accepted"].append(accepted[source, position])
    optimistic = {"draft_n_optimistic": sum(stream.num_optimistic for stream in streams)}
    return {
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": prompt * 1e3,
        "prompt_per_second": _rate(computed, prompt),
        "predicted_n": num_tokens,
        "predicted_ms": predicted * 1e3,
        "predicted_per_second": _rate(num_tokens - generation.first_tokens, predicted),
        "draft_n": drafts.total(),
        "draft_n_accepted": accepted.total(),
        **(optimistic if generation.requests[0].sampling.optimistic else {}),
        "draft_sources": sources,
    }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
