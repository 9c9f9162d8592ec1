"""What names a Ray cluster? Ray itself answers anything else with a traceback."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_ADDRESS = re.compile(r"auto|([a-z]+://)?(\[[0-9A-Fa-f:.]+\]|[^\s/:]+):\d{1,5}")


def _check(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise ValueError("must be auto or host:port, such as 10.0.0.10:6379")
    return text


RayAddress = Annotated[str, AfterValidator(_check)]
