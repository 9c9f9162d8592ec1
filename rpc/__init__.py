"""gRPC plumbing: authenticated channels and servers, sessions, and what the two workers share.

- `open_channel`, `start_server`: both ends, with the cluster token, keepalive and size limits;
  `open_blocking_channel` for threads without an event loop.
- `WorkerSession`: a router's end of the one stream to a worker. `FrameOutbox`, `run_session`: the
  worker's end.
- `FaultyDial`: channels that go wrong on purpose, as `CallFaults` say.
- `abort`, `error_from_rpc`, `rpc_errors`: the error tree across a call.
- `WorkerShell`: a worker beside its role, made of `EngineLink`, `Health`, `TaskSet`, `Announcer`,
  `AdminService`, `EngineCollector` and `StartupClock`.
"""

from __future__ import annotations

from rpc.admin import AdminService
from rpc.announcer import Announcer
from rpc.blocking import open_blocking_channel
from rpc.client import open_channel
from rpc.engine_link import Engine, EngineLink, EngineStats
from rpc.engine_metrics import EngineCollector
from rpc.failures import abort, error_from_rpc, rpc_errors
from rpc.faults import CallFaultKind, CallFaults
from rpc.faulty_channel import Dial, FaultyDial
from rpc.frames import FrameOutbox, run_session
from rpc.health import Health
from rpc.server import Registrar, RunningServer, join_address, start_server
from rpc.startup import StartupClock, StartupCollector
from rpc.tasks import TaskSet
from rpc.worker_session import WorkerSession
from rpc.worker_shell import WorkerProfile, WorkerShell, wait_until

__all__ = [
    "AdminService",
    "Announcer",
    "CallFaultKind",
    "CallFaults",
    "Dial",
    "Engine",
    "EngineCollector",
    "EngineLink",
    "EngineStats",
    "FaultyDial",
    "FrameOutbox",
    "Health",
    "Registrar",
    "RunningServer",
    "StartupClock",
    "StartupCollector",
    "TaskSet",
    "WorkerProfile",
    "WorkerSession",
    "WorkerShell",
    "abort",
    "error_from_rpc",
    "join_address",
    "open_blocking_channel",
    "open_channel",
    "rpc_errors",
    "run_session",
    "start_server",
    "wait_until",
]
