"""A process that has loaded everything that workers need, and forks one for each line it reads.

Loading torch, gRPC and NIXL takes a fresh process seconds; a fork has them at once, and shares their
memory. The template itself computes nothing and starts no thread, so that forking it is safe. It ends,
and all that it forked with it, when its stdin is closed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress

from cluster.process_main import run_process
from cluster.process_spec import ProcessSpec
from cluster.process_tree import die_with_parent
from protocol.errors import StartupError


def warm_up() -> None:
    """Import what both roles use."""
    import cluster.compose
    import cluster.engine_parts  # noqa: F401
    import decode_worker  # noqa: F401
    import prefill_worker  # noqa: F401
    from kv_transfer.nixl import load_library

    with suppress(StartupError):  # whoever needs NIXL says so
        load_library()
    gc.collect()
    gc.freeze()


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    own_pid = os.getpid()
    while line := sys.stdin.readline():
        if os.fork() == 0:
            _be_child(ProcessSpec.from_line(line), own_pid)


def _be_child(spec: ProcessSpec, parent_pid: int) -> None:
    code = 1
    try:
        die_with_parent(parent_pid)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = run_process(spec)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
