"""KV blocks over torch.distributed: a process group of two for each reader and owner. Loads torch.

transport   the `KvTransport`: serves its own pool, reads those of others
owner       one thread for each reader          reader     one thread for each owner
channel     their TCP connection, authenticated (`metadata`: how a reader finds and is let in)
group       the group of two, by Gloo or NCCL   messages   which bytes go together
"""

from kv_transfer.pairs.transport import PairTransport

__all__ = ["PairTransport"]
