"""An owner of two ranks in a process of its own: says how to reach it, then waits for the end of stdin."""

from __future__ import annotations

import base64
import sys

from rank_kit import Owner, fingerprint_of
from transport_kit import Wire

from protocol.codec import endpoint_to_wire
from protocol.rank_layout import RankLayout

if __name__ == "__main__":
    wire = Wire("nixl")
    owner = Owner(wire, fingerprint_of(RankLayout(2), 4))
    print(base64.b64encode(endpoint_to_wire(owner.endpoint).SerializeToString()).decode(), flush=True)
    sys.stdin.read()
    wire.close()
