"""Sizes in bytes, as people write and read them."""

import re

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


def size_bytes(text: str) -> float | None:
    """Bytes of a size such as 8GB, 512MB, 1.5 GiB or 4096; None if it isn't one."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    return None if found is None or unit is None else float(found[1]) * unit


def size_text(nbytes: int) -> str:
    """A size for people: 3.3 GB."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
