"""Triggers that keep instances.busy_blocks equal to the blocks of the attached jobs.

Revision ID: 0001
Revises:
"""

from alembic import context, op
from busy_blocks import objects

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    needs_index = context.is_offline_mode() or objects.needs_index(op.get_bind())
    if dialect == "postgresql" and needs_index:
        _create_postgresql_index()
    objects.begin(dialect, op.execute)
    if dialect == "sqlite" and needs_index:
        op.execute(objects.read(dialect, objects.INDEX))
    objects.create(dialect, revision, op.execute)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    objects.begin(dialect, op.execute)
    objects.remove(dialect, revision, op.execute)


def _create_postgresql_index() -> None:
    if context.is_offline_mode():
        op.execute(objects.read("postgresql", "index/busy_blocks_jobs_offline"))
    else:
        with op.get_context().autocommit_block():
            objects.build_index(op.get_bind())
