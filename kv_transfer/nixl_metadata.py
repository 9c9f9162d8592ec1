"""What does a NIXL reader need to know of a peer's pool, and did it arrive whole?

NIXL parses its own blob in C++ and trusts it, so nothing reaches it that the checksum does not cover.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from kv_transfer.memory import MemoryKind

_HEADER = struct.Struct("<4sHHIQ")  # magic, version, memory kind, device id, address
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all that follows
_MAGIC = b"SSKV"
_VERSION = 1
_KINDS = (MemoryKind.HOST, MemoryKind.DEVICE)


@dataclass(frozen=True, slots=True)
class NixlMetadata:
    """Where the pool lies in the peer's address space, and NIXL's own description of the agent."""

    address: int
    kind: MemoryKind
    device_id: int
    agent_blob: bytes

    def to_bytes(self) -> bytes:
        header = _HEADER.pack(_MAGIC, _VERSION, _KINDS.index(self.kind), self.device_id, self.address)
        body = header + self.agent_blob
        return _CHECKSUM.pack(zlib.crc32(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> NixlMetadata:
        """Raises `ValueError` for anything but what `to_bytes` made."""
        if len(data) < _CHECKSUM.size + _HEADER.size:
            raise ValueError(f"{len(data)} bytes are too few")
        (checksum,), body = _CHECKSUM.unpack_from(data), data[_CHECKSUM.size :]
        if checksum != zlib.crc32(body):
            raise ValueError("the checksum does not match")
        magic, version, kind, device_id, address = _HEADER.unpack_from(body)
        if magic != _MAGIC or version != _VERSION or kind >= len(_KINDS):
            raise ValueError(f"version {version} or memory kind {kind} is not known here")
        return cls(address, _KINDS[kind], device_id, body[_HEADER.size :])
