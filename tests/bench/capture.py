"""What dstack's own pipelines send to the database. A script.

    DSTACK_DATABASE_URL=... python bench/capture.py

prints the UPDATEs of jobs and instances, one a line, its parameters as `?`: the pipelines of storm.py assign two
jobs to an instance that has none and terminate them, one after the other; then dstack's heartbeater renews the
locks of a job and of the instance.

    DSTACK_DATABASE_URL=postgresql+asyncpg://... python bench/capture.py FILE

pickles every statement of the life of one job, of two blocks, on an instance that has another one; see `Recording`.
"""

import asyncio
import pickle
import re
import sys
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import storm
from dstack._internal.core.models.instances import InstanceStatus
from dstack._internal.core.models.runs import JobStatus
from dstack._internal.server.background.pipeline_tasks.base import Heartbeater, PipelineItem
from dstack._internal.server.db import get_session_ctx
from dstack._internal.server.models import InstanceModel, JobModel
from sqlalchemy import Engine, event, update

from bench.statements import Recording, Sent


def write(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
    if statement.startswith(("UPDATE jobs", "UPDATE instances")):
        print(" ".join(re.sub(r"\$\d+::[A-Z ]+(?<! )|:\w+", "?", statement).split()))


async def until(done: Callable[[], Any]) -> None:
    while not await done():
        await asyncio.sleep(0.05)


async def heartbeat(model: Any, item: uuid.UUID) -> None:
    token, now = uuid.uuid4(), datetime.now(timezone.utc)
    # One that is about to expire is renewed.
    heartbeater: Any = Heartbeater(
        model_type=model, lock_timeout=timedelta(seconds=30), heartbeat_trigger=timedelta(days=1)
    )
    await heartbeater.track(
        PipelineItem(
            __tablename__=model.__tablename__,
            id=item,
            lock_expires_at=now + timedelta(seconds=30),
            lock_token=token,
            prev_lock_expired=False,
        )
    )
    await heartbeater.heartbeat()


async def all_of(jobs: list[uuid.UUID], condition: Any) -> bool:
    return await storm.count_jobs(jobs, condition) == len(jobs)


async def assign_and_terminate(attached: tuple[int, ...], requested: tuple[int, ...]) -> storm.Round:
    """On one instance, to which jobs of so many blocks are attached before."""
    storm.stub_shim()
    storm.INSTANCES = 1
    storm.ATTACHED_BLOCKS, storm.REQUESTED_BLOCKS = {"assign": attached}, {"assign": requested}
    added = await storm.add_round("assign")
    if not attached:
        async with get_session_ctx() as session:
            await session.execute(update(InstanceModel).values(status=InstanceStatus.IDLE))
    async with storm.running("assign"):
        provisioned = JobModel.status == JobStatus.PROVISIONING
        await until(lambda: all_of(added.submitted, provisioned))
        for job in added.submitted:
            await storm.stop_jobs([job], JobStatus.PROVISIONING)
            await until(lambda job=job: all_of([job], JobModel.status == JobStatus.TERMINATED))
    return added


async def updates() -> None:
    event.listen(Engine, "before_cursor_execute", write)
    added = await assign_and_terminate((), (1, 1))
    await heartbeat(JobModel, added.jobs[0])
    await heartbeat(InstanceModel, added.instances[0])


async def everything() -> Recording:
    script = asyncio.current_task()
    begun: dict[int, list[Sent]] = {}
    transactions: list[tuple[Sent, ...]] = []

    def send(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        # What this script itself asks for, as whether a job is done, is no server's work.
        if asyncio.current_task() is not script:
            for each in parameters if isinstance(parameters, list) else [parameters]:
                begun.setdefault(id(connection), []).append((statement, tuple(each)))

    def end(connection: Any) -> None:
        sent = begun.pop(id(connection), [])
        # A fetcher that found no job is as frequent as its pause is short.
        if any("SKIP LOCKED" not in statement for statement, _ in sent):
            transactions.append(tuple(sent))

    event.listen(Engine, "before_cursor_execute", send)
    event.listen(Engine, "commit", end)
    event.listen(Engine, "rollback", end)
    added = await assign_and_terminate((1,), (2,))
    async with get_session_ctx() as session:
        job = await session.get_one(JobModel, added.submitted[0])
        rows = {"job": job.id, "run": job.run_id, "project": job.project_id, "fleet": job.fleet_id}
    return Recording(rows | {"instance": added.instances[0]}, tuple(transactions))


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_bytes(pickle.dumps(asyncio.run(everything())))
    else:
        asyncio.run(updates())
