"""Triggers that keep the status BUSY or IDLE of an instance in step with the attached jobs.

Revision ID: 0003
Revises: 0002
"""

from alembic import op
from busy_blocks import objects

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    objects.begin(dialect, op.execute)
    objects.create(dialect, revision, op.execute)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    objects.begin(dialect, op.execute)
    objects.remove(dialect, revision, op.execute)
