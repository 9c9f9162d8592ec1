"""How are bytes said to people?"""

from __future__ import annotations


def in_words(num_bytes: float) -> str:
    """`64 KiB`, `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            digits = 0 if num_bytes >= 100 * size else 1
            return f"{num_bytes / size:.{digits}f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes:.0f} bytes"
