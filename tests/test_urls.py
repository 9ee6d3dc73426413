"""The server's URL, for a synchronous driver: every form that dstack accepts."""

import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.dialects import registry
from support import ROOT

sys.path.append(str(ROOT / "migrations"))

from busy_blocks import database, urls
from busy_blocks.errors import Refused


def libpq_arguments(monkeypatch: pytest.MonkeyPatch, given: str) -> dict[str, Any]:
    monkeypatch.setenv("DSTACK_DATABASE_URL", given)
    url = urls.synchronous(urls.server_url())
    dialect = url.get_dialect()()
    return dialect.create_connect_args(url)[1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postgresql+asyncpg://u@h/d", {"user": "u", "host": "h", "dbname": "d"}),
        ("postgresql+asyncpg://u:p%25%40%3Aw@h:6432/d", {"password": "p%@:w", "port": 6432}),
        ("postgresql+asyncpg://u:a%2Fb@h/d?ssl=require", {"password": "a/b", "sslmode": "require"}),
        ("postgresql+asyncpg://u@h/d?ssl=verify-full", {"sslmode": "verify-full"}),
        ("postgresql+asyncpg://u@h/d?timeout=2.6", {"connect_timeout": "3"}),
        ("postgresql+asyncpg://u@[::1]:5433/d", {"host": "::1", "port": 5433}),
        ("postgresql+asyncpg://u@/d?host=/var/run/postgresql", {"host": "/var/run/postgresql"}),
        ("postgresql+asyncpg:///d?user=u&host=/tmp&port=5433", {"host": "/tmp", "port": "5433", "user": "u"}),
        ("postgresql+asyncpg://u@/d?host=a:1&host=b:2", {"host": "a,b", "port": "1,2"}),
        (
            "postgresql+asyncpg://u@h/d?target_session_attrs=read-write",
            {"target_session_attrs": "read-write"},
        ),
    ],
)
def test_postgresql(monkeypatch: pytest.MonkeyPatch, given: str, expected: dict[str, Any]) -> None:
    arguments = libpq_arguments(monkeypatch, given)
    assert {name: arguments.get(name) for name in expected} == expected


def test_arguments_of_asyncpg_alone_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = libpq_arguments(
        monkeypatch,
        "postgresql+asyncpg://u@h/d?prepared_statement_cache_size=0&statement_cache_size=0&command_timeout=60",
    )
    assert arguments.keys() == {"user", "host", "dbname"} | (arguments.keys() & {"context"})


@pytest.mark.parametrize(
    "given", ["sqlite+aiosqlite:///x/y.db", "sqlite+aiosqlite:////x/y.db", "sqlite+aiosqlite:///~/y.db"]
)
def test_sqlite_is_the_file_that_the_server_opens(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Compared with what SQLAlchemy's aiosqlite dialect, which the server uses, makes of the URL."""
    monkeypatch.setenv("DSTACK_DATABASE_URL", given)
    url = urls.server_url()
    servers = registry.load("sqlite.aiosqlite")().create_connect_args(url)[0]
    ours = registry.load("sqlite")().create_connect_args(urls.synchronous(url))[0]
    assert ours == servers


def test_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DSTACK_DATABASE_URL", raising=False)
    monkeypatch.delenv("DSTACK_SERVER_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert urls.server_url().database == f"{tmp_path}/.dstack/server/data/sqlite.db"
    monkeypatch.setenv("DSTACK_SERVER_DIR", str(tmp_path / "elsewhere"))
    assert urls.server_url().database == f"{tmp_path}/elsewhere/data/sqlite.db"


@pytest.mark.parametrize(
    "given",
    [
        "mysql://u:secret@h/d",
        "postgres secret",
        "",
        "://secret",
        "postgresql+asyncpg://u:p@secret@h/d",
        "postgresql+asyncpg://u:secret@h/d?timeout=soon",
        "postgresql+asyncpg://u:secret@h/d?timeout=inf",
    ],
)
def test_a_bad_url_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("DSTACK_DATABASE_URL", given)
    with pytest.raises(Refused) as refused:
        urls.synchronous(urls.server_url())
    assert "secret" not in str(refused.value)
    assert "Nothing was changed" in str(refused.value)


def test_described_without_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTACK_DATABASE_URL", "postgresql+asyncpg://u:secret@h/d?password=secret")
    assert "secret" not in database.describe(urls.server_url())
