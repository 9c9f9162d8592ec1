"""Moving KV blocks from the worker that computed them to the one that decodes with them.

lease         which tickets still hold              fingerprint  may two workers exchange KV at all
memory        where a pool lies, which blocks may be touched
provision     memory for the blocks that come next
checksums     what blocks hold, in a number each
factory       a transport by name                   peers        what all transports check
nixl          between workers (`nixl_agent`, `nixl_metadata`)
pairs         between workers over torch.distributed, where both sides work for a read
loopback      within one process
faulty        any transport with faults on purpose (`faults`)
reader        tokens from owners of any layout (`layout`, `staging`, `staging_area`, `repack`)
parts         who has what this rank needs, where the ranks are dealt out otherwise (`source`, `spans`)
joint         several ranks of an owner read like one
"""

from kv_transfer.checksums import block_checksums, require_checksums
from kv_transfer.factory import agent_name, create_transport
from kv_transfer.faults import FaultKind, ReadFaults
from kv_transfer.faulty import FaultyTransport
from kv_transfer.fingerprint import check_compatible
from kv_transfer.joint import JointFetch
from kv_transfer.lease import LeaseTable
from kv_transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.parts import num_rows
from kv_transfer.provision import Provision
from kv_transfer.reader import LayoutReader

__all__ = [
    "FaultKind",
    "FaultyTransport",
    "JointFetch",
    "LayoutReader",
    "LeaseTable",
    "LoopbackNetwork",
    "LoopbackTransport",
    "MemoryKind",
    "PoolMemory",
    "Provision",
    "ReadFaults",
    "agent_name",
    "block_checksums",
    "check_compatible",
    "create_transport",
    "num_rows",
    "require_checksums",
]
