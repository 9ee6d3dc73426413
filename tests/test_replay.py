"""replay.sql: what the server logged of each counter, and the collisions in it; expected values by hand."""

import os
import subprocess
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest
import support
from conftest import Databases, migrate
from dstack._internal.server.testing import common as dstack
from releases import python_of
from sqlalchemy import Connection, text
from support import (
    ROOT,
    Database,
    add_instance,
    add_job,
    add_project,
    add_row,
    as_hex,
    job_runtime_data,
    run_sql,
)

MAX_STORMS = 5
BEGINS = "the log begins here"
NOT_IN_LOG = "computed_from is not in the log of the minute before"
STALE = "stale read"
NOT_STORED = "the last number was not stored, or the counter was changed since"
TIMES = "equal times, order unknown"
MESSAGES = {"+": "Job assigned to instance.", "-": "Job unassigned from instance."}


class Story:
    """Writes the history of one instance as the server would have."""

    def __init__(self, connection: Connection, owner: Mapping[str, str], **instance: Any):
        self.connection, self.owner = connection, owner
        self.name = instance.setdefault("name", "instance")
        self.instance = add_instance(connection, owner, **{"status": "BUSY"} | instance)
        self.jobs: dict[str, str] = {}

    def job(self, name: str, blocks: int | None = 1, **values: Any) -> None:
        """Ids are in the order in which the jobs are added: it is what the report sorts by at equal times."""
        if blocks is not None:
            values.setdefault("job_runtime_data", job_runtime_data(blocks))
        number = self.connection.execute(text("SELECT count(*) FROM jobs")).scalar_one()
        self.jobs[name] = add_job(
            self.connection, self.owner, id=f"{number + 1:032x}", job_name=name, **values
        )

    def log(self, *steps: tuple[str, str, int]) -> None:
        """Steps like ("09:20:37", "-a", 5): at that time a, unassigned, left 5 busy."""
        for time, step, busy in steps:
            if step[1:] not in self.jobs:
                self.job(step[1:])
            message = f"{MESSAGES[step[0]]} Instance blocks: {busy}/8 busy"
            self.event(time, message, job=self.jobs[step[1:]], name=step[1:])

    def event(self, time: str, message: str, job: str | None, name: str = "") -> None:
        day, _, clock = time.rpartition(" ")
        recorded_at = datetime.fromisoformat(f"{day or '2026-08-09'} {clock}")
        event = add_row(self.connection, "events", message=message, recorded_at=recorded_at)
        targets = [("INSTANCE", self.instance, self.name)]
        if job:
            targets.append(("JOB", job, name))
        for kind, entity, entity_name in targets:
            add_row(
                self.connection,
                "event_targets",
                event_id=event,
                entity_type=kind,
                entity_id=entity,
                entity_name=entity_name,
                entity_project_id=self.owner["project_id"],
            )

    def end(self, busy: int, attached: str = "") -> None:
        """The counter and the attached jobs as they are now."""
        run_sql(
            self.connection,
            "UPDATE instances SET busy_blocks = :busy WHERE id = :instance",
            busy=busy,
            instance=self.instance,
        )
        for name in attached:
            run_sql(
                self.connection,
                "UPDATE jobs SET instance_id = :instance WHERE id = :job",
                instance=self.instance,
                job=self.jobs[name],
            )

    def delete_job(self, name: str) -> None:
        run_sql(self.connection, "DELETE FROM jobs WHERE id = :job", job=self.jobs[name])


def report(connection: Connection) -> list[Any]:
    """As psql or sqlite3 would run the file, as SQLAlchemy's text would, and with parameters asked for."""
    statement = (ROOT / "sql" / connection.dialect.name / "replay.sql").read_text()
    rows = connection.exec_driver_sql(statement).all()
    body = "\n".join(line for line in statement.splitlines() if not line.lstrip().startswith("--"))
    assert connection.execute(text(body)).all() == rows
    if connection.dialect.name == "postgresql":
        assert connection.exec_driver_sql(body, {}).all() == rows
    return rows


def clock(row: Any) -> str | None:
    return None if row.recorded_at is None else str(row.recorded_at)[11:19]


def table(connection: Connection, story: Story | None = None) -> list[tuple[Any, ...]]:
    """Time, step, what it was computed from, busy, expected, off by, truth, verdict; one story's or all."""
    return [
        (
            clock(row), f"{'+' if row.step == 'assigned' else '-'}{row.job}" if row.job else row.step,
            row.computed_from, row.busy, row.expected, row.off_by, row.truth, row.verdict,
        )
        for row in report(connection)
        if story is None or as_hex(row.instance_id) == story.instance
    ]  # fmt: skip


def notes(connection: Connection) -> list[tuple[Any, ...]]:
    """What the report says in words: time, busy, off by, verdict, note."""
    return [
        (clock(row), row.busy, row.off_by, row.verdict, row.note)
        for row in report(connection)
        if row.verdict != "ok"
    ]


def totals(connection: Connection) -> set[tuple[Any, ...]]:
    """Per instance and day: collisions, off by, unknown."""
    return {
        (row.instance, str(row.recorded_at)[:10], row.day_collisions, row.day_off_by, row.day_unknown)
        for row in report(connection)
        if row.recorded_at is not None
    }


@pytest.fixture
def connection(bare: Database):
    with bare.engine.connect() as opened:
        yield opened


@pytest.fixture
def story(connection: Connection) -> Story:
    return Story(connection, add_project(connection))


# The unassignments are those of dstack#4117; the assignments between them are the only ones possible.
HISTORY_OF_4117 = [
    ("09:10:00", "+a", 1), ("09:10:10", "+b", 2), ("09:10:20", "+c", 3),
    ("09:10:30", "+d", 4), ("09:10:40", "+e", 5), ("09:10:50", "+f", 6),
    ("09:20:37", "-a", 5), ("09:20:37", "-b", 5), ("09:20:37", "-c", 5),
    ("09:25:00", "+g", 6),
    ("09:28:21", "-d", 5), ("09:28:24", "-e", 5),
    ("09:29:00", "+h", 6), ("09:29:10", "+i", 7), ("09:29:20", "+j", 8),
    ("09:29:59", "-f", 7), ("09:30:01", "-g", 7),
    ("09:30:30", "+k", 8),
    ("09:31:03", "-h", 7), ("09:31:03", "-i", 7),
]  # fmt: skip


def split_times(history: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """No two at the same time any more, in the order given."""
    return [(f"{time}.{number:06}", step, busy) for number, (time, step, busy) in enumerate(history)]


def test_dstack_4117(connection: Connection, story: Story) -> None:
    story.log(*split_times(HISTORY_OF_4117))
    story.end(7, "jk")
    assert table(connection) == [
        ("09:10:00", "+a", 0, 1, None, None, 1, "unknown"),
        ("09:10:10", "+b", 1, 2, 2, 0, 2, "ok"),
        ("09:10:20", "+c", 2, 3, 3, 0, 3, "ok"),
        ("09:10:30", "+d", 3, 4, 4, 0, 4, "ok"),
        ("09:10:40", "+e", 4, 5, 5, 0, 5, "ok"),
        ("09:10:50", "+f", 5, 6, 6, 0, 6, "ok"),
        ("09:20:37", "-a", 6, 5, 5, 0, 5, "ok"),
        ("09:20:37", "-b", 6, 5, 4, 1, 4, "collision"),
        ("09:20:37", "-c", 6, 5, 4, 1, 3, "collision"),
        ("09:25:00", "+g", 5, 6, 6, 0, 4, "ok"),
        ("09:28:21", "-d", 6, 5, 5, 0, 3, "ok"),
        ("09:28:24", "-e", 6, 5, 4, 1, 2, "collision"),
        ("09:29:00", "+h", 5, 6, 6, 0, 3, "ok"),
        ("09:29:10", "+i", 6, 7, 7, 0, 4, "ok"),
        ("09:29:20", "+j", 7, 8, 8, 0, 5, "ok"),
        ("09:29:59", "-f", 8, 7, 7, 0, 4, "ok"),
        ("09:30:01", "-g", 8, 7, 6, 1, 3, "collision"),
        ("09:30:30", "+k", 7, 8, 8, 0, 4, "ok"),
        ("09:31:03", "-h", 8, 7, 7, 0, 3, "ok"),
        ("09:31:03", "-i", 8, 7, 6, 1, 2, "collision"),
        (None, "counter now", 7, 7, 7, 0, 2, "ok"),
    ]
    assert totals(connection) == {("instance", "2026-08-09", 5, 5, 1)}


def test_dstack_4117_to_the_second(connection: Connection, story: Story) -> None:
    """The times as the issue gives them, several equal."""
    story.log(*HISTORY_OF_4117)
    story.end(7, "jk")
    assert notes(connection) == [
        ("09:10:00", 1, None, "unknown", BEGINS),
        ("09:20:37", 5, 1, "collision", STALE),
        ("09:20:37", 5, 1, "collision", STALE),
        ("09:28:24", 5, 1, "collision", STALE),
        ("09:30:01", 7, 1, "collision", STALE),
        ("09:31:03", 7, 1, "collision", STALE),
    ]
    assert totals(connection) == {("instance", "2026-08-09", 5, 5, 1)}


@pytest.mark.parametrize("times", [list, split_times])
@pytest.mark.parametrize("jobs_exist", [True, False])
def test_dstack_4117_as_quoted(connection: Connection, story: Story, times: Any, jobs_exist: bool) -> None:
    """Only the lines that the issue quotes: what lies between them is a gap, and said to be unknown."""
    story.log(*times([line for line in HISTORY_OF_4117 if line[1][0] == "-"]))
    if not jobs_exist:
        for name in "abcdefghi":
            story.delete_job(name)
    found = notes(connection)
    assert [(time, busy) for time, busy, _, verdict, _ in found if verdict == "collision"] == [
        ("09:20:37", 5),
        ("09:20:37", 5),
        ("09:28:24", 5),
        ("09:30:01", 7),
        ("09:31:03", 7),
    ]
    assert [(time, busy) for time, busy, _, verdict, _ in found if verdict == "unknown"] == [
        ("09:20:37", 5),
        ("09:28:21", 5),
        ("09:29:59", 7),
        ("09:31:03", 7),
        (None, 0),
    ]
    lost = {("instance", "2026-08-09", 5, 5, 4)} if jobs_exist else {("instance", "2026-08-09", 5, 0, 9)}
    assert totals(connection) == lost


def test_several_blocks(connection: Connection, story: Story) -> None:
    """Losses of the other job's blocks, decrements and increments."""
    story.job("a", 3)
    story.job("b", 2)
    story.job("c", None, job_runtime_data=None)
    story.job("d", 4)
    story.log(
        ("10:00:00", "+a", 3),
        ("10:00:01", "+b", 5),
        ("10:00:02", "+c", 6),
        ("10:00:03", "-a", 3),
        ("10:00:04", "-b", 4),  # from 6: the 3 of a are counted again
        ("10:00:05", "+d", 8),
        ("10:00:06", "-c", 3),  # from 4: the 4 of d are lost
    )
    story.end(3, "d")
    assert table(connection) == [
        ("10:00:00", "+a", 0, 3, None, None, 3, "unknown"),
        ("10:00:01", "+b", 3, 5, 5, 0, 5, "ok"),
        ("10:00:02", "+c", 5, 6, 6, 0, 6, "ok"),
        ("10:00:03", "-a", 6, 3, 3, 0, 3, "ok"),
        ("10:00:04", "-b", 6, 4, 1, 3, 1, "collision"),
        ("10:00:05", "+d", 4, 8, 8, 0, 5, "ok"),
        ("10:00:06", "-c", 4, 3, 7, -4, 4, "collision"),
        (None, "counter now", 3, 3, 3, 0, 4, "ok"),
    ]
    assert totals(connection) == {("instance", "2026-08-09", 2, -1, 1)}


def test_history_that_starts_in_the_middle(connection: Connection, story: Story) -> None:
    """dstack deletes events after 30 days; the first number may be wrong already."""
    story.log(("10:00:00", "-a", 5), ("10:00:01", "-b", 4), ("10:00:01.5", "-c", 4))
    story.end(4)
    assert table(connection) == [
        ("10:00:00", "-a", 6, 5, None, None, 2, "unknown"),
        ("10:00:01", "-b", 5, 4, 4, 0, 1, "ok"),
        ("10:00:01", "-c", 5, 4, 3, 1, 0, "collision"),
        (None, "counter now", 4, 4, 4, 0, 0, "ok"),
    ]
    assert notes(connection)[0][-1] == BEGINS


def test_gap_or_repair(connection: Connection, story: Story) -> None:
    """A number from nowhere is no collision; neither is the same one after more than a minute."""
    story.log(
        ("10:00:00", "+a", 1),
        ("10:00:10", "+b", 4),  # 3 was never logged
        ("10:00:20", "-a", 1),  # from 2: repaired meanwhile
        ("10:01:21", "-b", 1),  # from 2, which was read 61 seconds ago
        ("10:02:21", "+c", 3),  # from 2, which was read 60 seconds ago
    )
    story.end(3, "c")
    assert notes(connection) == [
        ("10:00:00", 1, None, "unknown", BEGINS),
        ("10:00:10", 4, 2, "unknown", NOT_IN_LOG),
        ("10:00:20", 1, -2, "unknown", NOT_IN_LOG),
        ("10:01:21", 1, 1, "unknown", NOT_IN_LOG),
        ("10:02:21", 3, 1, "collision", STALE),
    ]
    assert totals(connection) == {("instance", "2026-08-09", 1, 1, 4)}


def test_deleted_jobs(connection: Connection, story: Story) -> None:
    """Their blocks are unknown: a collision only where no number of blocks explains what was logged."""
    story.log(
        ("10:00:00", "+a", 1),
        ("10:00:10", "+b", 3),  # by 2, or by 1 and a collision
        ("10:00:20", "+c", 4),
        ("10:00:30", "-a", 3),
        ("10:00:40", "-b", 3),  # no decrement at all
        ("10:00:50", "+d", 3),  # no increment at all
        ("10:01:51", "-d", 3),  # as -b, but after more than a minute
        ("10:01:52", "-c", 2),
    )
    for name in "bd":
        story.delete_job(name)
    story.end(2)
    assert table(connection) == [
        ("10:00:00", "+a", 0, 1, None, None, None, "unknown"),
        ("10:00:10", "+b", None, 3, None, None, None, "unknown"),
        ("10:00:20", "+c", 3, 4, 4, 0, None, "ok"),
        ("10:00:30", "-a", 4, 3, 3, 0, None, "ok"),
        ("10:00:40", "-b", None, 3, None, None, None, "collision"),
        ("10:00:50", "+d", None, 3, None, None, None, "collision"),
        ("10:01:51", "-d", None, 3, None, None, None, "unknown"),
        ("10:01:52", "-c", 3, 2, 2, 0, None, "ok"),
        (None, "counter now", 2, 2, 2, 0, None, "ok"),
    ]
    impossible = "blocks unknown, but one or more cannot explain it"
    assert notes(connection) == [
        ("10:00:00", 1, None, "unknown", BEGINS),
        ("10:00:10", 3, None, "unknown", "blocks unknown"),
        ("10:00:40", 3, None, "collision", impossible),
        ("10:00:50", 3, None, "collision", impossible),
        ("10:01:51", 3, None, "unknown", "blocks unknown"),
    ]
    assert totals(connection) == {("instance", "2026-08-09", 2, 0, 5)}


def test_job_of_a_deleted_run(connection: Connection, story: Story) -> None:
    """The run takes its jobs and their event targets with it; the event stays, and its instance."""
    story.log(("10:00:00", "+a", 1))
    story.event("10:00:01", "Job assigned to instance. Instance blocks: 2/8 busy", job=None)
    story.event("10:00:02", "Job unassigned from instance. Instance blocks: 2/8 busy", job=None)
    assert notes(connection)[:3] == [
        ("10:00:00", 1, None, "unknown", BEGINS),
        ("10:00:01", 2, None, "unknown", "blocks unknown"),
        ("10:00:02", 2, None, "collision", "blocks unknown, but one or more cannot explain it"),
    ]


@pytest.mark.parametrize(
    ("data", "blocks"),
    [
        (None, 1),
        ("{}", 1),
        ('{"offer": null}', 1),
        ('{"offer": {"price": 1, "total_blocks": 9}}', 1),
        ('{"offer": {"blocks": 3, "total_blocks": 9}}', 3),
        ('{"offer":{"instance":{"name":"x"},"total_blocks":9,"blocks":3},"ports":{"1":2}}', 3),
        ('{"offer": {"blocks": 0}}', 0),
        ('{"offer": {"blocks": 999999}}', 999999),
        ('{"offer": {"backend_data": "{\\"blocks\\": 7}", "blocks": 3}}', 3),
        ('{"offer": {"blocks": 1000000}}', None),
        ('{"offer": {"blocks": -1}}', None),
        ('{"offer": {"blocks": 2.0}}', None),
        ('{"offer": {"blocks": "2"}}', None),
        ('{"offer": {"blocks": null}}', None),
        ('{"offer": {"blocks": 2', None),
        ("", None),
    ],
)
def test_blocks_of_a_job(connection: Connection, story: Story, data: str | None, blocks: int | None) -> None:
    story.job("a", None, job_runtime_data=data)
    story.log(("10:00:00", "+a", 1))
    story.end(1, "a")
    step, now = report(connection)
    assert (step.blocks, now.blocks, now.truth) == (blocks, blocks, blocks)


def test_blocks_of_a_job_as_dstack_writes_it(connection: Connection, story: Story) -> None:
    offer = dstack.get_instance_offer_with_availability(blocks=3, total_blocks=8)
    story.job("a", None, job_runtime_data=dstack.get_job_runtime_data(offer=offer).model_dump_json())
    story.log(("10:00:00", "+a", 3))
    assert report(connection)[0].blocks == 3


def test_interleaved_instances(connection: Connection, story: Story) -> None:
    other = Story(connection, story.owner)
    quiet = Story(connection, story.owner)
    for one, job in ((story, "a"), (other, "b"), (story, "c"), (other, "d")):
        one.job(job)
    story.log(("10:00:00", "+a", 1))
    other.log(("10:00:00", "+b", 6))
    story.log(("10:00:01", "+c", 2))
    other.log(("10:00:01", "+d", 7))
    story.log(("10:00:02", "-a", 1))
    other.log(("10:00:02", "-b", 6))
    other.log(("10:00:03", "-d", 6))
    story.log(("10:00:03", "-c", 0))
    other.end(6)
    assert table(connection, story) == [
        ("10:00:00", "+a", 0, 1, None, None, 1, "unknown"),
        ("10:00:01", "+c", 1, 2, 2, 0, 2, "ok"),
        ("10:00:02", "-a", 2, 1, 1, 0, 1, "ok"),
        ("10:00:03", "-c", 1, 0, 0, 0, 0, "ok"),
        (None, "counter now", 0, 0, 0, 0, 0, "ok"),
    ]
    assert table(connection, other) == [
        ("10:00:00", "+b", 5, 6, None, None, 1, "unknown"),
        ("10:00:01", "+d", 6, 7, 7, 0, 2, "ok"),
        ("10:00:02", "-b", 7, 6, 6, 0, 1, "ok"),
        ("10:00:03", "-d", 7, 6, 5, 1, 0, "collision"),
        (None, "counter now", 6, 6, 6, 0, 0, "ok"),
    ]
    # An instance without steps has no history to tell.
    assert table(connection, quiet) == []


def test_instance_created_again(connection: Connection, story: Story) -> None:
    """The same name, another row: its counter starts anew."""
    again = Story(connection, story.owner)
    story.log(("10:00:00", "+a", 1), ("10:00:01", "+b", 2))
    again.log(("10:00:02", "+c", 1), ("10:00:03", "+d", 2))
    story.log(("10:00:04", "-a", 1))
    again.end(2, "cd")
    run_sql(connection, "DELETE FROM instances WHERE id = :instance", instance=story.instance)
    # Without the row nobody knows what is attached to it, nor its counter.
    assert table(connection, story) == [
        ("10:00:00", "+a", 0, 1, None, None, None, "unknown"),
        ("10:00:01", "+b", 1, 2, 2, 0, None, "ok"),
        ("10:00:04", "-a", 2, 1, 1, 0, None, "ok"),
    ]
    assert table(connection, again) == [
        ("10:00:02", "+c", 0, 1, None, None, 1, "unknown"),
        ("10:00:03", "+d", 1, 2, 2, 0, 2, "ok"),
        (None, "counter now", 2, 2, 2, 0, 2, "ok"),
    ]


# Steps that are all at the same time, between +z, which leaves 5 busy, and +y; each of several blocks.
EQUAL_TIMES: dict[str, tuple[list[tuple[str, int, int]], int, list[tuple[int, int | None, str]]]] = {
    "a chain of decrements": (
        [("-c", 1, 1), ("-a", 1, 4), ("-b", 2, 2)],
        2,
        [(4, 0, "ok"), (2, 0, "ok"), (1, 0, "ok"), (2, 0, "ok")],
    ),
    "a chain of increments": (
        [("+c", 1, 8), ("+a", 1, 6), ("+b", 1, 7)],
        9,
        [(6, 0, "ok"), (7, 0, "ok"), (8, 0, "ok"), (9, 0, "ok")],
    ),
    "three from the same number": (
        [("-a", 1, 4), ("-b", 1, 4), ("-c", 1, 4)],
        5,
        [(4, 0, "ok"), (4, 1, "collision"), (4, 1, "collision"), (5, 0, "ok")],
    ),
    "two from the same number, by different blocks: which was last?": (
        [("-a", 3, 2), ("-b", 1, 4)],
        5,
        [(4, 0, "ok"), (2, None, "collision"), (5, None, "unknown")],
    ),
    "up, then down, which may be the other way round": (
        [("+a", 1, 6), ("-b", 1, 5)],
        6,
        [(5, None, "unknown"), (6, 0, "ok"), (6, None, "unknown")],
    ),
    "up and down from the same number: one of both is stale, or neither": (
        [("+a", 1, 6), ("-b", 1, 4)],
        7,
        [(4, 0, "ok"), (6, None, "unknown"), (7, 0, "ok")],
    ),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", EQUAL_TIMES)
def test_equal_times(connection: Connection, story: Story, case: str, reverse: bool) -> None:
    """Whatever the order of rows and ids: nothing is a collision that some order of the steps explains."""
    steps, last, expected = EQUAL_TIMES[case]
    story.log(("10:00:00", "+z", 5))
    for step, blocks, busy in reversed(steps) if reverse else steps:
        story.job(step[1:], blocks)
        story.log(("10:00:01", step, busy))
    story.log(("10:00:02", "+y", last))
    found = [(row.busy, row.off_by, row.verdict) for row in report(connection)]
    assert found[1:-1] == expected


def test_equal_times_of_deleted_jobs(connection: Connection, story: Story) -> None:
    """Decrements at one time that reach the same number are too few, whatever the blocks."""
    story.log(("10:00:00", "+z", 5))
    for step, busy in (("-a", 3), ("-b", 4), ("-c", 3)):
        story.log(("10:00:01", step, busy))
        story.delete_job(step[1:])
    assert [(row.busy, row.off_by, row.verdict) for row in report(connection)][1:-1] == [
        (4, None, "unknown"),
        (3, None, "unknown"),
        (3, None, "collision"),
    ]


def test_order_is_that_of_the_times(connection: Connection, story: Story) -> None:
    """Neither that of the rows nor that of the ids; a microsecond is enough."""
    for name in "dcba":
        story.job(name)
    story.log(
        ("10:00:00.000003", "-d", 0),
        ("10:00:00.000001", "+b", 2),
        ("10:00:00.000002", "-c", 1),
        ("10:00:00", "+a", 1),
    )
    story.end(0)
    assert [row.job for row in report(connection)] == ["a", "b", "c", "d", None]
    assert notes(connection) == [("10:00:00", 1, None, "unknown", BEGINS)]


def test_totals_per_day(connection: Connection, story: Story) -> None:
    story.log(
        ("2026-08-09 23:59:50", "+a", 4),
        ("2026-08-09 23:59:57", "-b", 3),
        ("2026-08-09 23:59:58", "-c", 3),
        ("2026-08-09 23:59:59", "-d", 3),
        ("2026-08-10 00:00:00", "-e", 3),
        ("2026-08-10 00:00:01", "-f", 2),
    )
    other = Story(connection, story.owner, name="other")
    other.log(("2026-08-10 00:00:00", "+g", 1))
    assert totals(connection) == {
        ("instance", "2026-08-09", 2, 2, 1),
        ("instance", "2026-08-10", 1, 1, 0),
        ("other", "2026-08-10", 0, 0, 1),
    }


def test_other_events_are_no_steps(connection: Connection, story: Story) -> None:
    story.log(("10:00:00", "+a", 1))
    for message in (
        "Instance status changed IDLE -> BUSY",
        "Job assigned to instance. Instance status: BUSY (1/1 blocks busy)",  # As older releases wrote.
        "Job assigned to instance. Instance blocks: many/8 busy",
        "Not Job assigned to instance. Instance blocks: 7/8 busy",
    ):
        story.event("10:00:01", message, job=story.jobs["a"])
    story.job("b", 3)
    story.event("10:00:02", "Job unassigned from instance. Instance blocks: -2/None busy", story.jobs["b"])
    story.end(-2)
    assert [row.busy for row in report(connection)] == [1, -2, -2]
    assert notes(connection) == [("10:00:00", 1, None, "unknown", BEGINS)]


def test_number_that_was_not_stored(connection: Connection, story: Story) -> None:
    """An UPDATE that matched no row is logged all the same; the row of the counter shows it."""
    story.log(("10:00:00", "+a", 1), ("10:00:01", "+b", 2), ("10:00:02", "-a", 1))
    story.end(2, "b")
    assert table(connection)[-1] == (None, "counter now", 2, 2, 1, 1, 1, "unknown")
    assert notes(connection)[-1] == (None, 2, 1, "unknown", NOT_STORED)


def test_with_triggers(protected: Database) -> None:
    """The server believes its own arithmetic; the counter and the truth are beside it."""
    with protected.engine.connect() as connection:
        story = Story(connection, add_project(connection))
        for name in "abcd":
            story.job(name)

        def step(time: str, step: str, busy: int) -> None:
            """Write and log `busy` as dstack does."""
            story.log((time, step, busy))
            attach = "UPDATE jobs SET instance_id = :instance WHERE id = :job"
            store = "UPDATE instances SET busy_blocks = :busy WHERE id = :instance"
            instance = story.instance if step[0] == "+" else None
            run_sql(connection, attach, instance=instance, job=story.jobs[step[1:]])
            run_sql(connection, store, busy=busy, instance=story.instance)
            connection.commit()

        step("10:00:00", "+a", 1)
        step("10:00:01", "+b", 2)
        step("10:00:02", "+c", 3)
        step("10:00:03", "+d", 4)
        step("10:03:04", "-a", 3)
        step("10:03:05", "-b", 3)  # from 4, as the other server had read it
        step("10:03:06", "-c", 1)  # from 2, which is right
        assert table(connection) == [
            ("10:00:00", "+a", 0, 1, None, None, 1, "unknown"),
            ("10:00:01", "+b", 1, 2, 2, 0, 2, "ok"),
            ("10:00:02", "+c", 2, 3, 3, 0, 3, "ok"),
            ("10:00:03", "+d", 3, 4, 4, 0, 4, "ok"),
            ("10:03:04", "-a", 4, 3, 3, 0, 3, "ok"),
            ("10:03:05", "-b", 4, 3, 2, 1, 2, "collision"),
            ("10:03:06", "-c", 2, 1, 2, -1, 1, "unknown"),
            (None, "counter now", 1, 1, 1, 0, 1, "ok"),
        ]
        assert support.counters(connection) == {story.instance: 1}


@pytest.mark.releases
def test_teardown_storm(databases: Databases) -> None:
    """A real one, of dstack 0.20.29 on SQLite: the losses found are the drift, on each instance."""
    python = python_of("0.20.29")
    database = databases.make("sqlite", "empty")
    migrate(database.url, python)
    drift: dict[str, int] = {}
    for _ in range(MAX_STORMS):
        subprocess.run(
            [python, str(ROOT / "tests" / "storm.py"), "teardown", "2", "1"],
            env={**os.environ, "DSTACK_DATABASE_URL": database.url},
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=600,
        )
        with database.begin() as connection:
            rows = report(connection)
            counters, truth = support.counters(connection), support.truth(connection)
        drift = {instance: counters[instance] - truth[instance] for instance in counters}
        if any(drift.values()):
            break
    assert any(drift.values()), "the storm did no harm: there is nothing to find"
    steps = [row for row in rows if row.step != "counter now"]
    found = dict.fromkeys(drift, 0)
    for row in rows:
        found[row.instance_id] += row.off_by or 0
    collisions = [row for row in steps if row.verdict == "collision"]
    print(
        f"\n{len(steps)} steps on {len(drift)} instances: {len(collisions)} collisions,"
        f" off by {sum(row.off_by for row in collisions):+d}; drift {sum(drift.values()):+d}"
    )
    assert found == drift
    # Nothing is unknown but the number before the first step; that of a lost lock was never stored.
    assert {row.note for row in steps if row.verdict == "unknown"} == {BEGINS}
    assert {row.note for row in rows if row.step == "counter now"} <= {None, NOT_STORED}
    assert {row.instance_id: row.truth for row in rows if row.step == "counter now"} == truth
