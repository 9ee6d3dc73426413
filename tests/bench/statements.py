"""The statements on jobs and instances that dstack 0.22.5 sends for an assign, a terminate, a lock and a heartbeat.

Text and columns are dstack's, as SQLAlchemy sends them; test_bench.py compares them with what capture.py sees.
Only the parameters have names here: `:name` is made into what the database wants.
"""

import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

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
    # What its statements have besides bench.data.values(); of those called NEW..., another id in each cycle.
    parameters: dict[str, Any] | None = None


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


NEW = "new_"
EVERYTHING = "all that dstack sends for a job"
# As asyncpg gets it: the text, with $1 and so on, and its parameters.
Sent = tuple[str, tuple[Any, ...]]


class Recording(NamedTuple):
    """What dstack's server sent to PostgreSQL for a job from SUBMITTED to TERMINATED, reads and events too.

    The ids of the rows it was about, by the name of their kind.
    """

    rows: dict[str, uuid.UUID]
    transactions: tuple[tuple[Sent, ...], ...]


def as_work(recording: Recording, rows: dict[str, uuid.UUID]) -> Work:
    """The same for other rows: these, and each cycle's job and instance.

    An id that is none of the recorded rows' is a lock token's or an event's: NEW.
    """
    parameters: dict[str, Any] = dict(rows)
    names = {str(value): name for name, value in recording.rows.items()}
    counts = iter(("busy_with_job", "busy_without_job"))

    def rewritten(statement: str, values: tuple[Any, ...]) -> str:
        def name(found: re.Match[str]) -> str:
            value = values[int(found.group("number")) - 1]
            if found.group("column") == "busy_blocks=":
                return f"busy_blocks=:{next(counts)}"
            if re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(value)):
                known = names.setdefault(str(value), f"{NEW}{len(names)}")
            else:
                known = f"constant_{len(parameters)}"
                parameters[known] = value
            return f"{found.group('column') or ''}:{known}"

        parameter = r"(?P<column>\bbusy_blocks=)?\$(?P<number>\d+)::[A-Z]+( WITHOUT TIME ZONE)?"
        return re.sub(parameter, name, statement)

    transactions = tuple(
        tuple(rewritten(statement, values) for statement, values in transaction)
        for transaction in recording.transactions
    )
    parameters |= {name: None for name in names.values() if name.startswith(NEW)}
    return Work(EVERYTHING, transactions, parameters=parameters)
