"""May two workers exchange KV? Asked once per pair, before any traffic."""

from __future__ import annotations

from protocol.errors import LayoutMismatch
from protocol.handoff import Fingerprint


def check_compatible(mine: Fingerprint, theirs: Fingerprint) -> None:
    """Raise `LayoutMismatch`, with what differs and both sides whole, unless the two are equal."""
    differences = mine.differences(theirs)
    if differences:
        raise LayoutMismatch(
            f"KV cannot be exchanged: {'; '.join(differences)}. Here: {mine}. There: {theirs}."
        )
