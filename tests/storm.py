"""A storm of real dstack pipelines on one database; a script, run by the python of any dstack release.

    DSTACK_DATABASE_URL=... python storm.py teardown|assign ROUNDS PROCESSES

The pipelines, their fetchers, workers and heartbeats are dstack's own, unmodified, and so is every statement
that reaches the database while they run. Replaced is one thing: the call over SSH that has a host's shim
stop a container. All PROCESSES run the pipelines, as several servers on one database do; the first one makes
the rows, too. Each round has a project, a fleet and instances of its own; the last line of the output says in
JSON what the rounds did.

- teardown: jobs of several blocks, attached to few instances, all terminating at once.
- assign: jobs that wait for an instance are assigned by one pipeline while the other one detaches jobs
  from the same instances; half of them are stopped by their users as soon as they are provisioned.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

from dstack._internal.core.models.configurations import DevEnvironmentConfiguration
from dstack._internal.core.models.instances import InstanceStatus
from dstack._internal.core.models.profiles import CreationPolicy, Profile
from dstack._internal.core.models.resources import Range, ResourcesSpec
from dstack._internal.core.models.runs import JobStatus, JobTerminationReason
from dstack._internal.server.background.pipeline_tasks import jobs_submitted, jobs_terminating
from dstack._internal.server.db import get_db, get_session_ctx
from dstack._internal.server.models import JobModel
from dstack._internal.server.services import encryption  # noqa: F401  # Users' tokens need it.
from dstack._internal.server.testing import common as dstack
from sqlalchemy import func, select, update

TOTAL_BLOCKS = 8
INSTANCES = 6
# What each instance holds at first, and what is asked of it meanwhile: together no more than it has, so
# that no job ends for want of room.
ATTACHED_BLOCKS = {"teardown": (3, 2, 1, 1, 1), "assign": (1, 1, 1, 1)}
REQUESTED_BLOCKS = {"teardown": (), "assign": (1, 2, 1)}
# A teardown stops all jobs at once; the other storm stops them while the jobs to assign come in.
STOPPED_PER_TICK = {"teardown": 1000, "assign": 1}
WORKERS = 20
ROUND_TIMEOUT = 120

STOPPED_BY_USER = {
    "status": JobStatus.TERMINATING,
    "termination_reason": JobTerminationReason.TERMINATED_BY_USER,
    # The runner was asked to stop already, and there are no logs to wait for: what is left is the detach.
    "graceful_termination_attempts": 1,
    "skip_min_processing_interval": True,
}


class Hinter:
    """What dstack's PipelineManager is to the workers: wakes the fetchers."""

    def __init__(self) -> None:
        self.pipelines: list[Any] = []

    def hint_fetch(self, model_name: str) -> None:
        for pipeline in self.pipelines:
            if pipeline.hint_fetch_model_name == model_name:
                pipeline.hint_fetch()


class Round:
    """The rows of one round."""

    def __init__(self) -> None:
        self.instances: list[uuid.UUID] = []
        self.attached: list[uuid.UUID] = []
        self.submitted: list[uuid.UUID] = []

    @property
    def jobs(self) -> list[uuid.UUID]:
        return self.attached + self.submitted


def stub_shim() -> None:
    """A shim that stops every container, after as long as a round trip over SSH may take.

    All the while the worker sits on the number of blocks that it read before: the gap of the lost update.
    """

    async def stop_container(*_: Any) -> bool:
        await asyncio.sleep(random.uniform(0.005, 0.05))
        return True

    # Were the name gone in a release, the storm would dial out instead, and that must not pass in silence.
    assert hasattr(jobs_terminating, "_stop_container")
    jobs_terminating._stop_container = stop_container


def offer(blocks: int) -> Any:
    # The first is the offer of the whole instance: 2 CPUs and 8 GB are one block of eight.
    return dstack.get_instance_offer_with_availability(
        cpu_count=2 * blocks, memory_gib=8 * blocks, disk_gib=1000, blocks=blocks, total_blocks=TOTAL_BLOCKS
    )


def fleet_spec() -> Any:
    spec = dstack.get_fleet_spec()
    spec.configuration.blocks = TOTAL_BLOCKS
    return spec


async def add_round(kind: str) -> Round:
    added = Round()
    async with get_session_ctx() as session:
        user = await dstack.create_user(session=session, name=uuid.uuid4().hex)
        project = await dstack.create_project(session=session, owner=user, name=uuid.uuid4().hex)
        repo = await dstack.create_repo(session=session, project_id=project.id)
        fleet = await dstack.create_fleet(session=session, project=project, spec=fleet_spec())
        owner = {"session": session, "project": project, "repo": repo, "user": user}
        for number in range(INSTANCES):
            instance = await dstack.create_instance(
                session=session,
                project=project,
                fleet=fleet,
                status=InstanceStatus.BUSY,
                instance_num=number,
                name=f"instance-{number}",
                offer=offer(TOTAL_BLOCKS),
                total_blocks=TOTAL_BLOCKS,
            )
            added.instances.append(instance.id)
            for blocks in ATTACHED_BLOCKS[kind]:
                run = await dstack.create_run(fleet=fleet, run_name=uuid.uuid4().hex, **owner)
                # In one transaction with the job, so that any drift is the pipelines' alone.
                instance.busy_blocks += blocks
                job = await dstack.create_job(
                    session=session,
                    run=run,
                    fleet=fleet,
                    instance=instance,
                    instance_assigned=True,
                    status=JobStatus.RUNNING,
                    job_provisioning_data=dstack.get_job_provisioning_data(dockerized=True),
                    job_runtime_data=dstack.get_job_runtime_data(offer=offer(blocks)),
                )
                added.attached.append(job.id)
        for blocks in REQUESTED_BLOCKS[kind] * INSTANCES:
            added.submitted.append(await add_submitted_job(blocks, owner))
    return added


async def add_submitted_job(blocks: int, owner: dict[str, Any]) -> uuid.UUID:
    name = uuid.uuid4().hex
    spec = dstack.get_run_spec(
        repo_id=owner["repo"].name,
        run_name=name,
        # Only existing instances: there is no cloud to make new ones in.
        profile=Profile(name="default", creation_policy=CreationPolicy.REUSE),
        configuration=DevEnvironmentConfiguration(
            ide="vscode",
            resources=ResourcesSpec(cpu={"count": Range[int](min=2 * blocks, max=None)}, disk=None),
        ),
    )
    run = await dstack.create_run(run_name=name, run_spec=spec, **owner)
    job_id: uuid.UUID = (await dstack.create_job(session=owner["session"], run=run)).id
    return job_id


async def stop_jobs(jobs: list[uuid.UUID], status: JobStatus) -> None:
    """As when users stop their runs; jobs that a pipeline works on are left for the next call."""
    async with get_session_ctx() as session:
        await session.execute(
            update(JobModel)
            .where(JobModel.id.in_(jobs), JobModel.status == status, JobModel.lock_expires_at.is_(None))
            .values(**STOPPED_BY_USER)
        )


async def count_jobs(jobs: list[uuid.UUID], *conditions: Any) -> int:
    async with get_session_ctx() as session:
        chosen = select(func.count()).select_from(JobModel).where(JobModel.id.in_(jobs), *conditions)
        number: int = (await session.execute(chosen)).scalar_one()
        return number


@asynccontextmanager
async def running(kind: str) -> AsyncIterator[None]:
    """The pipelines of a dstack server at work, with shorter pauses between two looks at a job."""
    hinter = Hinter()
    options = {
        "workers_num": WORKERS,
        "min_processing_interval": timedelta(milliseconds=20),
        "pipeline_hinter": hinter,
    }
    hinter.pipelines.append(jobs_terminating.JobTerminatingPipeline(**options))
    if kind == "assign":
        hinter.pipelines.append(jobs_submitted.JobSubmittedPipeline(**options))
    for pipeline in hinter.pipelines:
        pipeline.start()
    hints = asyncio.create_task(keep_hinting(hinter))
    try:
        yield
    finally:
        hints.cancel()
        for pipeline in hinter.pipelines:
            pipeline.shutdown()
            await pipeline.drain()


async def keep_hinting(hinter: Hinter) -> None:
    while True:
        hinter.hint_fetch(JobModel.__name__)
        await asyncio.sleep(0.05)


async def run_round(kind: str) -> Round:
    added = await add_round(kind)
    # The first half, so that what happens last to an instance is a detach here and an attach there.
    impatient = added.submitted[: len(added.submitted) // 2]
    stopping = 0
    open_jobs = JobModel.status.in_([JobStatus.SUBMITTED, JobStatus.RUNNING, JobStatus.TERMINATING])
    provisioned = JobModel.status == JobStatus.PROVISIONING
    async with running(kind):
        while await count_jobs(added.jobs, open_jobs) or await count_jobs(impatient, provisioned):
            stopping += STOPPED_PER_TICK[kind]
            await stop_jobs(added.attached[:stopping], JobStatus.RUNNING)
            await stop_jobs(impatient, JobStatus.PROVISIONING)
            await asyncio.sleep(0.05)
    return added


@contextmanager
def server(kind: str) -> Iterator[None]:
    """One more process that runs the pipelines."""
    process = subprocess.Popen(
        [sys.executable, __file__, "serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield
    process.communicate()
    assert process.returncode == 0


async def serve(kind: str) -> None:
    """Until the standard input ends."""
    stub_shim()
    async with running(kind):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await get_db().engine.dispose()


async def storm(kind: str, rounds: int) -> dict[str, float]:
    stub_shim()
    began = time.monotonic()
    jobs: list[uuid.UUID] = []
    submitted: list[uuid.UUID] = []
    for _ in range(rounds):
        added = await asyncio.wait_for(run_round(kind), ROUND_TIMEOUT)
        jobs += added.jobs
        submitted += added.submitted
    was_attached = JobModel.used_instance_id.is_not(None)
    result = {
        "seconds": time.monotonic() - began,
        "jobs": len(jobs),
        "attached_by_pipeline": await count_jobs(submitted, was_attached),
        "detached_by_pipeline": await count_jobs(jobs, was_attached, JobModel.instance_id.is_(None)),
        "still_attached": await count_jobs(jobs, JobModel.instance_id.is_not(None)),
    }
    await get_db().engine.dispose()
    return result


def main() -> None:
    if sys.argv[1] == "serve":
        asyncio.run(serve(sys.argv[2]))
        return
    kind, rounds, processes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with ExitStack() as servers:
        for _ in range(processes - 1):
            servers.enter_context(server(kind))
        did = asyncio.run(storm(kind, rounds))
    print(json.dumps(did))


if __name__ == "__main__":
    main()
