"""What dstack's own InstancePipeline makes of an instance whose last job is detached; a script.

    DSTACK_DATABASE_URL=... python idle.py

The instance was made in 2023, is of no fleet that has to keep it, and may be idle for five minutes. A terminating worker that has lost its lock
detaches the job and writes nothing to the instance. Replaced is the call over SSH that asks the host how it is.
Prints, as JSON, the status after the pipeline has looked at the instance, and after it has done so again when
the last job is said to have ended an hour ago.
"""

import asyncio
import json
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

from dstack._internal.core.models.instances import InstanceStatus
from dstack._internal.core.models.profiles import TerminationPolicy
from dstack._internal.core.models.runs import JobStatus
from dstack._internal.server.background.pipeline_tasks.instances import InstancePipeline, check
from dstack._internal.server.db import get_db, get_session_ctx
from dstack._internal.server.models import InstanceModel, JobModel
from dstack._internal.server.schemas.instances import InstanceCheck
from dstack._internal.server.services import encryption  # noqa: F401  # Users' tokens need it.
from dstack._internal.server.testing import common as dstack
from sqlalchemy import select, update
from storm import Hinter


async def run_instance_check(*_: Any, **__: Any) -> InstanceCheck:
    return InstanceCheck(reachable=True)


async def add_busy_instance() -> tuple[uuid.UUID, uuid.UUID]:
    async with get_session_ctx() as session:
        user = await dstack.create_user(session=session)
        project = await dstack.create_project(session=session, owner=user)
        repo = await dstack.create_repo(session=session, project_id=project.id)
        instance = await dstack.create_instance(
            session=session,
            project=project,
            status=InstanceStatus.IDLE,
            termination_policy=TerminationPolicy.DESTROY_AFTER_IDLE,
            termination_idle_time=300,
        )
        run = await dstack.create_run(session=session, project=project, repo=repo, user=user)
        # As dstack assigns, in one transaction.
        instance.status = InstanceStatus.BUSY
        job = await dstack.create_job(
            session=session, run=run, instance=instance, status=JobStatus.TERMINATING
        )
        return instance.id, job.id


async def status_after_a_look(instance_id: uuid.UUID) -> str:
    pipeline = InstancePipeline(
        workers_num=1, min_processing_interval=timedelta(milliseconds=20), pipeline_hinter=Hinter()
    )
    started = datetime.now(timezone.utc)
    pipeline.start()
    pipeline.hint_fetch()
    while True:
        await asyncio.sleep(0.05)
        async with get_session_ctx() as session:
            instance = (
                await session.execute(select(InstanceModel).where(InstanceModel.id == instance_id))
            ).scalar_one()
            if instance.last_processed_at > started and instance.lock_token is None:
                break
    pipeline.shutdown()
    await pipeline.drain()
    return str(instance.status.name)


async def main() -> list[str]:
    assert hasattr(check, "_run_instance_check")
    check._run_instance_check = run_instance_check
    instance_id, job_id = await add_busy_instance()
    async with get_session_ctx() as session:
        await session.execute(update(JobModel).where(JobModel.id == job_id).values(instance_id=None))
    statuses = [await asyncio.wait_for(status_after_a_look(instance_id), 60)]
    async with get_session_ctx() as session:
        an_hour_ago = datetime.now(timezone.utc) - timedelta(hours=1)
        await session.execute(
            update(InstanceModel)
            .where(InstanceModel.id == instance_id)
            .values(last_job_processed_at=an_hour_ago)
        )
    statuses.append(await asyncio.wait_for(status_after_a_look(instance_id), 60))
    await get_db().engine.dispose()
    return statuses


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
