"""The decode role: take a prompt's KV over from its owner, then generate the rest of the answer.

worker       what a decode worker is made of            config    what can be set
session      one router's requests                      service   one stream each, over gRPC
intake       one ticket's way to admission              local_prefill  the way without a ticket
submission   do ticket and request belong together      tools     what all intakes share
reservation  when blocks are reserved                   credit    what routers may hand over
keeper       progress and lease of one ticket           watch     what ends an intake early
fetching     chunks, as they are ready                  pending_read  who owns blocks being read into
handback     the way back to the owner                  peers     connections to owners
owner        the owner's side over gRPC                 reader    the thread that moves blocks
group_reader all ranks read, at the leader              rank_proxy  the others, as the leader sees them
rank_service the others' side of that
"""

from __future__ import annotations

from decode_worker.config import DecodeWorkerConfig, OnKvFailure
from decode_worker.group_reader import GroupReader
from decode_worker.rank_proxy import RankProxy
from decode_worker.rank_service import RankReadServer
from decode_worker.worker import DecodeWorker, MakeEngine

__all__ = [
    "DecodeWorker",
    "DecodeWorkerConfig",
    "GroupReader",
    "MakeEngine",
    "OnKvFailure",
    "RankProxy",
    "RankReadServer",
]
