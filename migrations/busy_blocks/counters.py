"""The counters: which differ from the attached jobs, and their correction."""

import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row, bindparam, text

from busy_blocks import objects

log = logging.getLogger("dstack.busy_blocks")

BATCH = 500  # instances a transaction: a server waits for few rows, and not for long


def drift(connection: Connection) -> list[Row[Any]]:
    """Instances whose counter differs: name, id, is_now and should_be, in blocks. Writes nothing."""
    return list(connection.execute(text(objects.read(connection.dialect.name, "drift"))))


def correct(connection: Connection, commit: Callable[[], None]) -> int:
    """Correct every counter that differs, one line of log each, and return the number of them.

    Writes instances.busy_blocks of those rows, in batches, with `commit` called after each. Naming the
    status makes the triggers sum the attached jobs anew under the row's lock, so a server may go on.
    """
    update = text("UPDATE instances SET status = status WHERE id IN :ids")
    update = update.bindparams(bindparam("ids", expanding=True))
    wrong = drift(connection)
    for start in range(0, len(wrong), BATCH):
        batch = wrong[start : start + BATCH]
        connection.execute(update, {"ids": [row.id for row in batch]})
        commit()
        for row in batch:
            log.warning(
                "Instance %s (%s): busy_blocks was %s, is %s", row.name, row.id, row.is_now, row.should_be
            )
    if wrong:
        plural = "" if len(wrong) == 1 else "s"
        log.warning("%d instance%s had a wrong busy_blocks: corrected", len(wrong), plural)
    return len(wrong)
