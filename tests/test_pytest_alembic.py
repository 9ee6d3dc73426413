"""pytest-alembic's own tests, on both engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_alembic.tests import (  # noqa: F401
    test_model_definitions_match_ddl,
    test_single_head_revision,
    test_up_down_consistency,
    test_upgrade,
)
from sqlalchemy import Connection
from support import ROOT, Database


@pytest.fixture
def alembic_config() -> dict[str, str]:
    return {"file": str(ROOT / "alembic.ini"), "script_location": str(Path(ROOT, "migrations"))}


@pytest.fixture
def alembic_engine(bare: Database) -> Iterator[Connection]:
    """A connection, as a dstack server hands one over."""
    with bare.engine.connect() as connection:
        yield connection
