"""Sizes and speeds, as people read them."""


def size_text(nbytes: int) -> str:
    """A size for people: 3.3 GB."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def speed_text(
    tokens: int, rate: float, prompt_tokens: int | None, first: float, drafts: int, accepted: int
) -> str:
    """An answer's speed and acceptance in a line; `first`: seconds to the first token."""
    prompt = "first" if prompt_tokens is None else f"prompt of {prompt_tokens}"
    told = f"{accepted / drafts:.0%} of {drafts} drafts accepted" if drafts else "no drafts"
    return f"[{tokens} tokens, {rate:.1f}/s; {prompt} in {first:.2f} s; {told}]"
