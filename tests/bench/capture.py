"""Prints the statements on jobs and instances that dstack sends, one a line, its parameters as `?`. A script.

    DSTACK_DATABASE_URL=... python bench/capture.py

The pipelines of storm.py assign two jobs to an instance that has none and terminate them, one after the other;
then dstack's heartbeater renews the locks of a job and of the instance.
"""

import asyncio
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


async def main() -> None:
    storm.stub_shim()
    storm.INSTANCES = 1
    storm.ATTACHED_BLOCKS, storm.REQUESTED_BLOCKS = {"assign": ()}, {"assign": (1, 1)}
    added = await storm.add_round("assign")
    async with get_session_ctx() as session:
        await session.execute(update(InstanceModel).values(status=InstanceStatus.IDLE))
    event.listen(Engine, "before_cursor_execute", write)
    async with storm.running("assign"):
        provisioned = JobModel.status == JobStatus.PROVISIONING
        await until(lambda: all_of(added.jobs, provisioned))
        for job in added.jobs:
            await storm.stop_jobs([job], JobStatus.PROVISIONING)
            await until(lambda job=job: all_of([job], JobModel.status == JobStatus.TERMINATED))
    await heartbeat(JobModel, added.jobs[0])
    await heartbeat(InstanceModel, added.instances[0])


async def all_of(jobs: list[uuid.UUID], condition: Any) -> bool:
    return await storm.count_jobs(jobs, condition) == len(jobs)


if __name__ == "__main__":
    asyncio.run(main())
