"""What goes wrong on purpose, as the configuration says: reads of KV, and calls between processes."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.environment import ALLOW_FAULTS, read_environment
from kv_transfer import FaultKind, FaultyTransport, PoolMemory, ReadFaults
from protocol.errors import StartupError
from protocol.ids import WorkerId
from protocol.ports import KvTransport
from rpc import CallFaultKind, CallFaults, Dial, FaultyDial, open_channel


def check_faults(config: ClusterConfig) -> None:
    """Raise `StartupError` for faults that cannot be, and for any that this environment does not allow."""
    _read_faults(config)
    _call_faults(config)
    if not config.faults.is_empty and not read_environment().allows_faults:
        raise StartupError(
            "the configuration has faults, by which calls fail and KV goes wrong: leave them out,"
            f" or set {ALLOW_FAULTS}=1 where nobody relies on the answers"
        )


def with_read_faults(
    config: ClusterConfig, transport: KvTransport, memory: PoolMemory, worker_id: WorkerId, serial: int
) -> KvTransport:
    """The transport itself unless its reads are to go wrong."""
    if not config.faults.reads:
        return transport
    return FaultyTransport(transport, memory, _read_faults(config).plan(f"{worker_id}/{serial}"))


def dial_of(config: ClusterConfig, caller: str) -> Dial:
    """How a process opens its channels; `caller` names it within the cluster."""
    return FaultyDial(_call_faults(config), caller) if config.faults.calls else open_channel


def _read_faults(config: ClusterConfig) -> ReadFaults:
    faults = config.faults
    try:
        rates = {FaultKind(kind): rate for kind, rate in faults.reads.items()}
        return ReadFaults(rates, faults.seed, faults.max_delay_s)
    except ValueError as error:
        raise StartupError(f"faults.reads: {error}") from error


def _call_faults(config: ClusterConfig) -> CallFaults:
    faults = config.faults
    try:
        rates = {
            method: {CallFaultKind(kind): rate for kind, rate in rates.items()}
            for method, rates in faults.calls.items()
        }
        return CallFaults(rates, faults.seed, faults.max_delay_s)
    except ValueError as error:
        raise StartupError(f"faults.calls: {error}") from error
