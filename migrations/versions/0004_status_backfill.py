"""One-shot backfill: corrects the statuses that were wrong before the triggers came.

Revision ID: 0004
Revises: 0003
"""

from alembic import context, op
from busy_blocks import counters, objects

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if context.is_offline_mode():
        op.execute(objects.read(op.get_context().dialect.name, "status_backfill"))
        return
    # Outside of one long transaction, so that a server waits for a batch and not for the whole.
    with op.get_context().autocommit_block():
        counters.correct(op.get_bind(), "status", commit=lambda: None)


def downgrade() -> None:
    """Right statuses do no harm: there is nothing to undo."""
