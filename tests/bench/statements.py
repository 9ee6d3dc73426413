"""The statements on jobs and instances that dstack 0.22.5 sends for an assign, a terminate, a lock and a heartbeat.

Text and columns are dstack's, as SQLAlchemy sends them; test_bench.py compares them with what capture.py sees.
Only the parameters have names here: `:name` is made into what the database wants.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

ASSIGN_INSTANCE = "UPDATE instances SET busy_blocks=:busy_with_job WHERE instances.id = :instance"
# The first job of an instance.
ASSIGN_IDLE_INSTANCE = (
    "UPDATE instances SET status=:busy, busy_blocks=:busy_with_job WHERE instances.id = :instance"
)
ASSIGN_JOB = (
    "UPDATE jobs SET fleet_id=:fleet, last_processed_at=:now,"
    " skip_min_processing_interval=:skip, job_provisioning_data=:job_provisioning_data,"
    " instance_assigned=:assigned, instance_id=:instance, used_instance_id=:instance,"
    " job_runtime_data=:job_runtime_data, lock_expires_at=:unlocked_until,"
    " lock_token=:unlocked, lock_owner=:unlocked_owner WHERE jobs.id = :job"
)
# A moment after the assign: the same blocks, in another text.
PROVISION_JOB = (
    "UPDATE jobs SET last_processed_at=:now, skip_min_processing_interval=:skip, status=:provisioning,"
    " job_runtime_data=:later_job_runtime_data, lock_expires_at=:unlocked_until, lock_token=:unlocked,"
    " lock_owner=:unlocked_owner WHERE jobs.id = :job"
)
# By the fetchers of the pipelines.
LOCK_SUBMITTED_JOB = (
    "UPDATE jobs SET lock_expires_at=:lock_expires_at, lock_token=:lock_token, lock_owner=:lock_owner"
    " WHERE jobs.id = :job"
)
LOCK_JOB = (
    "UPDATE jobs SET skip_min_processing_interval=:skip, lock_expires_at=:lock_expires_at,"
    " lock_token=:lock_token, lock_owner=:lock_owner WHERE jobs.id = :job"
)
LOCK_INSTANCE = (
    "UPDATE instances SET lock_expires_at=:lock_expires_at, lock_token=:lock_token,"
    " lock_owner=:lock_owner WHERE instances.id = :instance"
)
TERMINATE_JOB = (
    "UPDATE jobs SET last_processed_at=:now, status=:terminated, instance_id=:none,"
    " lock_expires_at=:unlocked_until, lock_token=:unlocked, lock_owner=:unlocked_owner"
    " WHERE jobs.id = :job AND jobs.lock_token = :lock_token RETURNING jobs.id"
)
TERMINATE_INSTANCE = (
    "UPDATE instances SET last_processed_at=:now, busy_blocks=:busy_without_job, last_job_processed_at=:now,"
    " lock_expires_at=:unlocked_until, lock_token=:unlocked, lock_owner=:unlocked_owner"
    " WHERE instances.id = :instance AND instances.lock_token = :lock_token"
    " AND instances.lock_owner = :lock_owner RETURNING instances.id"
)
# The last job of an instance.
TERMINATE_INSTANCE_IDLE = (
    "UPDATE instances SET last_processed_at=:now, status=:idle, busy_blocks=:busy_without_job,"
    " last_job_processed_at=:now, lock_expires_at=:unlocked_until, lock_token=:unlocked,"
    " lock_owner=:unlocked_owner WHERE instances.id = :instance AND instances.lock_token = :lock_token"
    " AND instances.lock_owner = :lock_owner RETURNING instances.id"
)
# Of dstack's Heartbeater, for one row.
HEARTBEAT_JOB = (
    "UPDATE jobs SET lock_expires_at=:lock_expires_at WHERE jobs.id = :job"
    " AND jobs.lock_token = :lock_token RETURNING jobs.id"
)
HEARTBEAT_INSTANCE = (
    "UPDATE instances SET lock_expires_at=:lock_expires_at WHERE instances.id = :instance"
    " AND instances.lock_token = :lock_token RETURNING instances.id"
)


class Work(NamedTuple):
    """What is repeated: transactions, each of one or more statements."""

    name: str
    transactions: tuple[tuple[str, ...], ...]
    # Whether the statements that take the locks are left out.
    keeps_locks: bool = False


_ASSIGN = (ASSIGN_INSTANCE, ASSIGN_JOB)
_TERMINATE = (TERMINATE_JOB, TERMINATE_INSTANCE)
_LOCKS = ((LOCK_JOB,), (LOCK_INSTANCE,))
HEARTBEATS = Work("heartbeats and locks", (*_LOCKS, (HEARTBEAT_JOB,), (HEARTBEAT_INSTANCE,)))
FOUR_STATEMENTS = Work("assign + terminate without locks", (_ASSIGN, _TERMINATE), keeps_locks=True)
ASSIGN_TERMINATE = Work("assign + terminate", (_ASSIGN, *_LOCKS, _TERMINATE))
WHOLE_LIFE = Work(
    "a job's whole life",
    ((LOCK_SUBMITTED_JOB,), _ASSIGN, (LOCK_JOB,), (PROVISION_JOB,), *_LOCKS, _TERMINATE),
)
FIRST_AND_LAST_JOB = Work(
    "assign + terminate of the only job",
    ((ASSIGN_IDLE_INSTANCE, ASSIGN_JOB), *_LOCKS, (TERMINATE_JOB, TERMINATE_INSTANCE_IDLE)),
)
WORKS = (HEARTBEATS, FOUR_STATEMENTS, ASSIGN_TERMINATE, WHOLE_LIFE, FIRST_AND_LAST_JOB)


def with_parameters(statement: str, replace: Callable[[str], str]) -> str:
    """The statement with every `:name` replaced."""
    return re.sub(r":(\w+)", lambda found: replace(found.group(1)), statement)
