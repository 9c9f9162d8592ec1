"""An owner of KV blocks in a process of its own, to be killed: says how to reach it, then waits.

    nixl_owner.py AGENT NUM_BLOCKS BLOCK_BYTES SALT

Prints its endpoint as one line of base64 and lives until its stdin ends.
"""

from __future__ import annotations

import base64
import sys

from transport_kit import filled_pool

from kv_transfer import create_transport
from protocol.codec import endpoint_to_wire


def main(agent: str, num_blocks: int, block_bytes: int, salt: int) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL looks for it, and it takes seconds
    transport = create_transport("nixl", filled_pool(num_blocks, block_bytes, salt), agent)
    print(base64.b64encode(endpoint_to_wire(transport.endpoint).SerializeToString()).decode(), flush=True)
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], *(int(arg) for arg in sys.argv[2:]))
