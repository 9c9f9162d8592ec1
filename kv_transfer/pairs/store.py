"""What do the two tell each other before their group is connected? What one side sets, the other gets."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import distributed_c10d

from kv_transfer.pairs.channel import GREETING_LIMIT_S, Channel
from protocol.errors import TransferFailed

_FRAME = b"S"


class ChannelStore(distributed_c10d.Store):
    """The store of a group of two, over their channel and so for nobody else. Raises `TransferFailed`."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = raw
        name = key.encode()
        self._channel.send(_FRAME + len(name).to_bytes(2, "little") + name + raw)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until_s = time.monotonic() + (timeout.total_seconds() if timeout else GREETING_LIMIT_S)
        while not self.check(keys):
            self._take(self._channel.recv(until_s - time.monotonic()))

    def _take(self, frame: bytes) -> None:
        if frame[:1] != _FRAME:
            raise TransferFailed("the other side spoke before the two were connected")
        size = int.from_bytes(frame[1:3], "little")
        self._values[frame[3 : 3 + size].decode()] = frame[3 + size :]
