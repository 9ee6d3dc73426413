"""Alembic environment of dstack-busy-blocks, run in three ways.

- Hook: by a dstack server at its start, which is given this folder in
  DSTACK_ALEMBIC_MIGRATIONS_LOCATION and hands over its connection.
- Command line: `alembic upgrade head`, `check`, `downgrade base`, ...
- Offline: `alembic upgrade head --sql`.
"""

import sys
from logging.config import fileConfig
from pathlib import Path

from alembic import context

# This folder may be mounted anywhere, and nobody else's sys.path has it.
if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from busy_blocks import run

if context.config.config_file_name is not None and context.config.attributes.get("configure_logging", True):
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)

if context.is_offline_mode():
    run.offline()
elif context.config.attributes.get("connection") is not None:
    run.hook(context.config.attributes["connection"])
else:
    run.command_line()
