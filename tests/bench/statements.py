"""The statements that dstack 0.22.5 sends for an assign, a terminate, a lock and a heartbeat.

Text and columns are dstack's, as SQLAlchemy sends them; test_bench.py compares them with what a storm of dstack's
pipelines sends. Only the parameters have names here: `:name` is made into what the database wants.
"""

import re
from collections.abc import Callable

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


def with_parameters(statement: str, replace: Callable[[str], str]) -> str:
    """The statement with every `:name` replaced."""
    return re.sub(r":(\w+)", lambda found: replace(found.group(1)), statement)


# What is repeated: transactions, each of statements.
ASSIGN = (ASSIGN_INSTANCE, ASSIGN_JOB)
TERMINATE = (TERMINATE_JOB, TERMINATE_INSTANCE)
LOCKS = ((LOCK_JOB,), (LOCK_INSTANCE,))
FOUR_STATEMENTS = (ASSIGN, TERMINATE)
WITH_LOCKS = (ASSIGN, *LOCKS, TERMINATE)
FIRST_AND_LAST_JOB = (
    (ASSIGN_IDLE_INSTANCE, ASSIGN_JOB),
    *LOCKS,
    (TERMINATE_JOB, TERMINATE_INSTANCE_IDLE),
)
HEARTBEATS = (*LOCKS, (HEARTBEAT_JOB,), (HEARTBEAT_INSTANCE,))
