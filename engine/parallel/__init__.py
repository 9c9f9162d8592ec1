"""One model over several ranks: tensor parallelism.

shard           which part of the model is whose
communicator    what ranks do together: solo, `gloo`, `nccl`; `connect` by name, `rendezvous` before that
"""

from engine.parallel.communicator import Communicator, SoloCommunicator
from engine.parallel.connect import connect
from engine.parallel.rendezvous import host_store, join_store
from engine.parallel.shard import Cut, Shard, shard_of

__all__ = [
    "Communicator",
    "Cut",
    "Shard",
    "SoloCommunicator",
    "connect",
    "host_store",
    "join_store",
    "shard_of",
]
