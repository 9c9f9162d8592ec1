"""The decode role: take a prompt's KV over from its owner, then generate the rest of the answer.

worker    what a decode worker is made of
session   one router's requests          intake   one ticket's way to admission
peers     connections to owners          keeper   renews one lease
owner     the owner's side over gRPC     reader   the thread that moves blocks
"""

from __future__ import annotations

from decode_worker.config import DecodeWorkerConfig, OnKvFailure
from decode_worker.worker import DecodeWorker, MakeEngine

__all__ = ["DecodeWorker", "DecodeWorkerConfig", "MakeEngine", "OnKvFailure"]
