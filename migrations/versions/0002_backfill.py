"""One-shot backfill: corrects the counters that were wrong before the triggers came.

Revision ID: 0002
Revises: 0001
"""

from alembic import context, op
from busy_blocks import counters, objects

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if context.is_offline_mode():
        op.execute(objects.read(op.get_context().dialect.name, "backfill"))
        return
    # Outside of one long transaction, so that a server waits for a batch and not for the whole.
    with op.get_context().autocommit_block():
        counters.correct(op.get_bind(), "busy_blocks", commit=lambda: None)


def downgrade() -> None:
    """Right counters do no harm: there is nothing to undo."""
