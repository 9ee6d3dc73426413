"""What the triggers keep: which instances differ from their attached jobs, and their correction."""

import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row, bindparam, text

from busy_blocks import objects

log = logging.getLogger("dstack.busy_blocks")

# The column that is kept, and the report of the instances where it is wrong.
REPORTS = {"busy_blocks": "drift", "status": "status_drift"}
BATCH = 500  # instances a transaction: a server waits for few rows, and not for long


def kept(revision: str) -> list[str]:
    """The columns that the triggers of this revision keep."""
    return ["busy_blocks", "status"] if revision >= "0003" else ["busy_blocks"]


def drift(connection: Connection, column: str) -> list[Row[Any]]:
    """Instances where the column differs: name, id, is_now and should_be. Writes nothing."""
    return list(connection.execute(text(objects.read(connection.dialect.name, REPORTS[column]))))


def correct(connection: Connection, column: str, commit: Callable[[], None]) -> int:
    """Correct the column wherever it differs, one line of log each, and return the number of instances.

    Writes to those rows of instances, in batches, with `commit` called after each. Naming the status makes
    the triggers look at the attached jobs anew under the row's lock, so a server may go on.
    """
    update = text("UPDATE instances SET status = status WHERE id IN :ids")
    update = update.bindparams(bindparam("ids", expanding=True))
    wrong = drift(connection, column)
    for start in range(0, len(wrong), BATCH):
        batch = wrong[start : start + BATCH]
        connection.execute(update, {"ids": [row.id for row in batch]})
        commit()
        for row in batch:
            log.warning(
                "Instance %s (%s): %s was %s, is %s", row.name, row.id, column, row.is_now, row.should_be
            )
    if wrong:
        plural = "" if len(wrong) == 1 else "s"
        log.warning("%d instance%s had a wrong %s: corrected", len(wrong), plural, column)
    return len(wrong)
