"""`splitserve drain` finds its worker, tells how far it is, and when to give up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from worker_fakes import FINGERPRINT

from cluster.drain import POLL_S, REPLACE_S, DrainTools, choose, drain
from protocol.errors import NotFound, WorkerUnavailable
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.membership import Load, WorkerRecord


def record(name: str, *, running: int = 0, held: int = 0, draining: bool = True) -> WorkerRecord:
    worker_id, _, incarnation = name.partition("@")
    load = Load(num_running=running, num_held=held)
    identity = WorkerIdentity(WorkerId(worker_id), incarnation or "1")
    return WorkerRecord(identity, Role.DECODE, f"{name}:1", FINGERPRINT, 64, load, draining)


class Operator:
    """Looks at a cluster that changes with every look."""

    def __init__(self, *looks: Sequence[WorkerRecord]) -> None:
        self.looks = list(looks)
        self.told: list[tuple[str, float]] = []
        self.said: list[str] = []
        self.now = 0.0

    def look(self) -> Sequence[WorkerRecord]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def drain(self, worker: str, limit_s: float) -> bool:
        return drain(
            worker,
            limit_s,
            DrainTools(
                self.look,
                lambda *told: self.told.append(told),
                self.said.append,
                lambda: self.now,
                self.sleep,
            ),
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("name", ["ab", "ab@1", "abc@9", "abc", "b"])
def test_a_worker_is_found_by_its_name_or_a_beginning_of_it(name: str) -> None:
    workers = [record("ab@1"), record("abc@9"), record("b@2")]
    assert str(choose(workers, name).identity).startswith(name)


def test_a_name_that_is_none_or_several_says_which_there_are() -> None:
    workers = [record("ab@1"), record("ac@2"), record("b@3")]
    with pytest.raises(NotFound, match="several workers: ab@1, ac@2; give more"):
        choose(workers, "a")
    with pytest.raises(NotFound, match="begins with 'x'; those that live: ab@1, ac@2, b@3"):
        choose(workers, "x")
    with pytest.raises(NotFound, match="those that live: none"):
        choose([], "")


def test_progress_is_told_until_the_worker_is_gone() -> None:
    others = [record("other", draining=False)]
    operator = Operator(
        [record("w", running=2, draining=False), *others],
        [record("w", running=2, draining=False), *others],
        [record("w", running=2), *others],
        [record("w", running=2), *others],
        [record("w", held=1), *others],
        [record("w"), *others],
        others,
    )
    assert operator.drain("w", 60)
    assert operator.told == [("w:1", 60)]
    assert operator.said == [
        "w@1: takes no new work; what runs has 60 s to end",
        "0.0 s: has not begun",
        f"{POLL_S:.1f} s: 2 running, 0 waiting, 0 held",
        f"{3 * POLL_S:.1f} s: 0 running, 0 waiting, 1 held",
        f"{4 * POLL_S:.1f} s: empty; it is being replaced",
        f"{5 * POLL_S:.1f} s: gone",
    ]


def test_work_that_outlived_the_limit_is_reported_as_handed_back() -> None:
    operator = Operator(*[[record("w", running=1)]] * 6, [])
    assert operator.drain("w", 1)
    assert operator.said[-1].endswith("gone, what still ran was handed back")


def test_a_worker_that_does_not_go_is_given_up() -> None:
    operator = Operator([record("w", running=1)])
    assert not operator.drain("w", 2)
    assert operator.now == pytest.approx(2 + REPLACE_S, abs=2 * POLL_S)
    assert "is still there 30 s after its limit" in operator.said[-1]


def test_a_directory_that_falls_silent_does_not_look_like_success() -> None:
    operator = Operator([record("w")])
    looks = iter([[record("w")]])

    def look() -> Sequence[WorkerRecord]:
        try:
            return next(looks)
        except StopIteration:
            raise WorkerUnavailable("silent") from None

    operator.look = look  # type: ignore[method-assign]
    with pytest.raises(WorkerUnavailable, match="was told to drain, but the directory does not say"):
        operator.drain("w", 2)
