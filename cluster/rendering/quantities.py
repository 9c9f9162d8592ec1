"""How does Kubernetes write a number of bytes?"""

from __future__ import annotations

UNITS = (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))


def quantity(num_bytes: int) -> str:
    """`16Gi`, for example; in the largest unit that is exact."""
    return next(
        (f"{num_bytes // size}{unit}" for unit, size in UNITS if num_bytes % size == 0), str(num_bytes)
    )
