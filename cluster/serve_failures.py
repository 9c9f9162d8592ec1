"""What did a replica say before it gave up? Found at the end of what Serve reports about it."""

from __future__ import annotations

from protocol.errors import error_classes


def explain_failure(message: str) -> str:
    """What the exception at the end of Serve's report says, without the traceback before it."""
    text = message.strip()
    for kind in error_classes():
        _, separator, explanation = text.rpartition(f"protocol.errors.{kind}: ")
        if separator:
            return explanation.strip()
    return text.splitlines()[-1] if text else ""
