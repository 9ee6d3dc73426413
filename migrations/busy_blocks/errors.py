"""What a user can meet: one sentence that says what is wrong, what was changed, what to run next."""

from sqlalchemy.exc import DBAPIError

LOCK_NOT_AVAILABLE = "55P03"
DEADLOCK_DETECTED = "40P01"


class Refused(Exception):
    """Nothing was changed, or what was changed is named; the message is for the user as it is."""


def sqlstate(error: DBAPIError) -> str | None:
    """SQLSTATE of a PostgreSQL error, from psycopg and from asyncpg alike; None for SQLite."""
    return getattr(error.orig, "sqlstate", None)


def is_lock_conflict(error: DBAPIError) -> bool:
    """Whether trying again can help: somebody else holds a lock for the moment."""
    return sqlstate(error) in (LOCK_NOT_AVAILABLE, DEADLOCK_DETECTED)


def first_line(error: DBAPIError) -> str:
    """What the driver says, without the statement, its parameters and the hints below."""
    lines = str(error.orig).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error.orig).__name__


def explain(error: DBAPIError, where: str) -> str:
    """One sentence for a driver's error. `where` is the URL without its password.

    The transaction that failed is rolled back; what an earlier revision of the same run committed is
    completed by the next run.
    """
    reason = first_line(error)
    if "database is locked" in reason:
        reason = "the SQLite database is locked by another process"
    elif "readonly database" in reason or sqlstate(error) == "25006":
        reason = "the database is read-only"
    return (
        f"The database {where} could not be used: {reason}. What failed changed nothing; when"
        " the cause is mended, run the same command again."
    )
