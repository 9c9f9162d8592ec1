"""A rank in a process of its own whose reads never end, to be killed: prints its address, then waits."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from worker_fakes import CLUSTER_TOKEN

from decode_worker import RankReadServer
from protocol.handoff import Fingerprint, TransportEndpoint
from protocol.ports import FetchStatus


class EndlessReader:
    """A reader, and its reads."""

    num_bytes = 0

    def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None: ...

    def disconnect(self, agent: str) -> None: ...

    def fetch_tokens(self, *read: object) -> EndlessReader:
        print("reading", flush=True)
        return self

    def poll(self) -> FetchStatus:
        return FetchStatus.PENDING

    def checksums(self) -> Mapping[int, int]:
        raise NotImplementedError

    def release(self) -> None: ...

    def close(self) -> None: ...


if __name__ == "__main__":
    server = RankReadServer(EndlessReader(), host="127.0.0.1", port=0, token=CLUSTER_TOKEN, on_fault=print)
    print(server.start(timeout_s=20), flush=True)
    sys.stdin.read()
