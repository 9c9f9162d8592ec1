"""KV blocks over torch.distributed: a process group of two for each reader and owner. Loads torch.

transport   the `KvTransport`: serves its own pool, reads those of others
owner       one thread for each reader          reader     one thread for each owner
channel     their TCP connection, authenticated (`metadata`: how a reader finds and is let in)
group       the seam of a group of two          gloo_group, nccl_group   its kinds; `choose` takes one
store       through which the two meet          messages   which bytes go together, some ahead (`lane`)
"""

from kv_transfer.pairs.transport import PairTransport

__all__ = ["PairTransport"]
