"""How long does a cluster take to start, and how much memory does it need? One line per figure.

    make bench-start [ARGS="--model PATH --port 8010"]

The first start converts the model into an empty cache; the second one finds it there. A start ends when
a hand-off from the prefill to the decode worker has succeeded. Memory is the sum of the proportional set
sizes of all processes, looked at several times a second, so that shared pages count once.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SPLITSERVE = Path(sys.executable).parent / "splitserve"
STEP = re.compile(r"^ *(?P<at_s>[0-9.]+) s  (?P<step>.+)$")
PHASES = {
    "Ray runs": "ray",
    "the model is at": "model",
    "the application is deployed": "deployed",
    "router runs": "router",
    "prefill runs": "prefill",
    "decode runs": "decode",
    "ready:": "ready",
}


@dataclass
class Start:
    """One start, measured."""

    ready_s: float
    """From the command to ready, by our own clock: the interpreter's start included."""
    phases_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    cpu_s: float = 0.0
    stop_s: float = 0.0


class MemoryWatch(threading.Thread):
    """Samples a process and its descendants until told to stop."""

    def __init__(self, pid: int, period_s: float = 0.3) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._period_s = period_s
        self._ended = threading.Event()
        self.peak_bytes = 0
        self.cpu_s = 0.0

    def run(self) -> None:
        while not self._ended.wait(self._period_s):
            self.sample()

    def sample(self) -> None:
        total_bytes, cpu_s = 0, 0.0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                total_bytes += process.memory_full_info().pss
                cpu_s += sum(process.cpu_times()[:2])
            except psutil.Error:
                continue  # it ended meanwhile
        self.peak_bytes = max(self.peak_bytes, total_bytes)
        self.cpu_s = cpu_s

    def end(self) -> None:
        self._ended.set()
        self.join()


def measure(command: list[str], settle_s: float) -> Start:
    started_at = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watch = MemoryWatch(process.pid)
    watch.start()
    start = Start(ready_s=0.0)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if step := STEP.match(line):
            _note(start, step["step"], time.monotonic() - started_at)
        if "ready" in start.phases_s:
            break
    if "ready" not in start.phases_s:
        watch.end()
        sys.exit("the cluster did not start:\n" + "".join(lines))
    start.ready_s = start.phases_s["ready"]
    watch.sample()
    start.cpu_s = watch.cpu_s
    time.sleep(settle_s)
    watch.end()
    start.peak_bytes = watch.peak_bytes
    start.stop_s = _stop(process)
    return start


def _note(start: Start, step: str, at_s: float) -> None:
    for beginning, name in PHASES.items():
        if step.startswith(beginning):
            start.phases_s[name] = at_s


def _stop(process: subprocess.Popen[str]) -> float:
    started_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    return time.monotonic() - started_at


def report(name: str, start: Start) -> None:
    for phase, at_s in start.phases_s.items():
        print(f"{name}_until_{phase} {at_s:.1f} s")
    print(f"{name}_cpu {start.cpu_s:.1f} s")
    print(f"{name}_peak_memory {start.peak_bytes / 1e6:.0f} MB")
    print(f"{name}_stop {start.stop_s:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--port", type=int, default=8010)
    parser.add_argument("--settle", type=float, default=3.0, help="seconds to watch memory after ready")
    arguments, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as cache:
        command = [str(SPLITSERVE), "serve", arguments.model, "--port", str(arguments.port)]
        command += ["--set", f"cache_dir={cache}", *more]
        for name in ("first_start", "second_start"):
            report(name, measure(command, arguments.settle))


if __name__ == "__main__":
    main()
