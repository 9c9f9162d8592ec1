"""Do the workers that the directory names answer, and to our cluster token?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.admin import describe_worker
from cluster.doctor.facts import Seen, WorkerAnswer
from cluster.doctor.findings import Finding, Findings, Topic
from protocol.errors import SplitserveError, Unauthorized
from protocol.ids import Role
from protocol.membership import WorkerRecord

CHECK = "workers"
JOIN_TODO = (
    "does Ray run there, in this version? Where it asks for a token: RAY_AUTH_MODE=token, RAY_AUTH_TOKEN"
)
TOKEN_TODO = "set SPLITSERVE_CLUSTER_TOKEN to what the workers were started with"  # noqa: S105


async def ask_workers(records: Sequence[WorkerRecord], token: str) -> tuple[WorkerAnswer, ...]:
    """All at once, each for some seconds at most."""
    return tuple(await asyncio.gather(*(_ask(record, token) for record in records)))


async def _ask(record: WorkerRecord, token: str) -> WorkerAnswer:
    try:
        return WorkerAnswer(record, await describe_worker(record.address, token))
    except SplitserveError as error:
        return WorkerAnswer(record, None, error)


def check_workers(seen: Seen) -> Findings:
    if seen.live.problem:
        yield Topic("cluster", CHECK).problem(seen.live.problem, JOIN_TODO)
    for name in seen.live.lost_nodes:
        yield Topic(name, CHECK).warning(
            "this node left the Ray cluster", "start Ray there again, unless it was meant to go"
        )
    if not seen.live.knows_token:
        yield Topic("cluster", "token").problem(
            "workers run, and this command has no cluster token to ask them with", TOKEN_TODO
        )
        return
    for answer in seen.live.workers:
        yield _check_answer(answer)
    yield from _check_roles(seen)


def _check_answer(answer: WorkerAnswer) -> Finding:
    record = answer.record
    topic = Topic(f"{record.role} {record.identity.worker_id}", CHECK)
    if isinstance(answer.error, Unauthorized):
        return Topic(topic.where, "token").problem(
            f"at {record.address}: {answer.error.message}", TOKEN_TODO
        )
    if answer.answer is None:
        why = answer.error.message if answer.error else "no answer"
        return topic.problem(
            f"does not answer at {record.address}: {why}",
            f"look at its log; from elsewhere {record.address} must be reachable (`host` of its pool)",
        )
    if answer.answer.identity != record.identity:
        return topic.warning(
            f"another life of it answers at {record.address} than the directory names",
            "wait some seconds and look again",
        )
    return topic.ok(f"answers at {record.address}" + (", draining" if answer.answer.draining else ""))


def _check_roles(seen: Seen) -> Findings:
    if not seen.live.workers:
        return
    for role in Role:
        if not any(a.record.role is role for a in seen.live.workers):
            yield Topic("cluster", CHECK).problem(
                f"no {role} worker lives", "see `splitserve status`, and Serve's logs"
            )
