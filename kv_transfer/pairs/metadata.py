"""What does a reader need to know to be let in by an owner?

The secret travels in the endpoint, which workers tell each other over authenticated calls only. Ranks of
one worker tell it their leader through the store in which they meet, which is as open as their network.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

VERSION = 1
"""Of the handshake, and of which bytes make a message."""

_HEADER = struct.Struct("<4sHHHH")  # magic, version, port, bytes of the agent's name, bytes of the host
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all that follows
_MAGIC = b"SSPG"
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class PairMetadata:
    """Where an owner listens, who it is, and what opens it."""

    agent: str
    host: str
    port: int
    secret: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        agent, host = self.agent.encode(), self.host.encode()
        header = _HEADER.pack(_MAGIC, VERSION, self.port, len(agent), len(host))
        body = header + agent + host + self.secret
        return _CHECKSUM.pack(zlib.crc32(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> PairMetadata:
        """Raises `ValueError` for anything but what `to_bytes` made."""
        if len(data) < _CHECKSUM.size + _HEADER.size:
            raise ValueError(f"{len(data)} bytes are too few")
        (checksum,), body = _CHECKSUM.unpack_from(data), data[_CHECKSUM.size :]
        if checksum != zlib.crc32(body):
            raise ValueError("the checksum does not match")
        magic, version, port, agent_bytes, host_bytes = _HEADER.unpack_from(body)
        names, secret = body[_HEADER.size : -SECRET_BYTES], body[-SECRET_BYTES:]
        if magic != _MAGIC or version != VERSION or len(names) != agent_bytes + host_bytes:
            raise ValueError(f"version {version} of it is not known here")
        return cls(names[:agent_bytes].decode(), names[agent_bytes:].decode(), port, secret)
