"""Sizes in bytes, as people read them."""


def size_text(nbytes: int) -> str:
    """A size for people: 3.3 GB."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
