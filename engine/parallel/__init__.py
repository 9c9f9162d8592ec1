"""One model over several ranks: pipeline parallelism, and tensor parallelism in each of its stages.

shard           which part of the model is whose
communicator    what ranks can do together: solo, `tcp`, `gloo`, `nccl`; `connect` after a `rendezvous`
partition       what they do together within a pass of the model
leader          the rank with scheduler and sampler     follower    the others
channel         what goes between them per step         message     as numbers

The leader is an `Executor`; nothing above it knows how many ranks there are. Only what a model needs is
named here: leader and follower, which need the runner, have their own modules.
"""

from engine.parallel.communicator import Communicator, SoloCommunicator
from engine.parallel.connect import connect
from engine.parallel.groups import RankGroups, connect_groups
from engine.parallel.partition import RankPartition
from engine.parallel.rendezvous import host_store, join_store
from engine.parallel.shard import Cut, Shard, shard_of

__all__ = [
    "Communicator",
    "Cut",
    "RankGroups",
    "RankPartition",
    "Shard",
    "SoloCommunicator",
    "connect",
    "connect_groups",
    "host_store",
    "join_store",
    "shard_of",
]
