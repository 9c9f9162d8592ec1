"""The ranks of one worker as parts of a cluster: how they are started, meet, and end.

spec         what a follower is told                launch, forked, actors  how it is started
group        how a leader comes to its followers    meeting                 what ranks say at the start
team         what ranks agree on and do together    leading_engine          how all end with the leader's
follower     what a follower does, to its end       kv_side                 how the KV of a follower moves

What a launcher and its users need is named here; the rest needs torch.
"""

from cluster.ranks.forked import ForkedLauncher
from cluster.ranks.launch import RankHandle, RankLauncher, ThreadLauncher
from cluster.ranks.spec import RankSpec

__all__ = ["ForkedLauncher", "RankHandle", "RankLauncher", "RankSpec", "ThreadLauncher"]
