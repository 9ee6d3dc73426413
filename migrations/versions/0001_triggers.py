"""Triggers that keep instances.busy_blocks equal to the blocks of the attached jobs.

Revision ID: 0001
Revises:
"""

from alembic import context, op
from busy_blocks import objects
from sqlalchemy import text

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    if dialect == "postgresql":
        _create_postgresql_index()
    objects.begin(dialect, op.execute)
    objects.create(dialect, op.execute)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    objects.begin(dialect, op.execute)
    objects.remove(dialect, op.execute)


def _create_postgresql_index() -> None:
    if context.is_offline_mode():
        op.execute(objects.read("postgresql", "index/busy_blocks_jobs_offline"))
        return
    index = objects.POSTGRESQL_INDEX
    state = objects.states(op.get_bind()).get(index)
    if state not in ("missing", "invalid"):
        return
    before = op.get_bind().scalar(text("SHOW lock_timeout"))
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = '250ms'")
        try:
            # A build that failed leaves an invalid index of the same name.
            op.execute(objects.drop("postgresql", index))
            op.execute(objects.read("postgresql", index))
        finally:
            # The connection may be the server's.
            op.execute(f"SET lock_timeout = '{before}'")
