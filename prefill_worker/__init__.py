"""The prefill role: compute prompts, hold their KV blocks under a lease, hand tickets out.

worker      what a prefill worker is made of
session     one router's requests
holder      blocks under a lease, from the offer of a ticket to the owner's verdict
attendance  the calls of a ticket's readers
checksums   what a ticket's blocks held
"""

from __future__ import annotations

from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.worker import MakeEngine, PrefillWorker

__all__ = ["MakeEngine", "PrefillWorker", "PrefillWorkerConfig"]
