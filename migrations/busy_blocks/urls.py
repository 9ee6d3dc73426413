"""The database that the dstack server uses, for a synchronous driver."""

import os
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from busy_blocks.errors import Refused

# Arguments of asyncpg.connect() and of SQLAlchemy's asyncpg dialect that a URL can carry, and what
# libpq calls them (PostgreSQL documentation, "Parameter Key Words"). None: there is nothing to tell
# libpq, it has no such cache, or no such time-out. All others have the same name in both.
ASYNCPG_TO_LIBPQ: dict[str, str | None] = {
    "ssl": "sslmode",
    "timeout": "connect_timeout",
    "command_timeout": None,
    "direct_tls": None,
    "statement_cache_size": None,
    "max_cached_statement_lifetime": None,
    "max_cacheable_statement_size": None,
    "prepared_statement_cache_size": None,
    "prepared_statement_name_func": None,
    "async_fallback": None,
}


def default_url() -> URL:
    """The SQLite file that a dstack server uses where DSTACK_DATABASE_URL is not set."""
    server_dir = Path(os.getenv("DSTACK_SERVER_DIR", Path("~/.dstack/server").expanduser())).resolve()
    return URL.create("sqlite+aiosqlite", database=f"{server_dir}/data/sqlite.db")


def server_url() -> URL:
    """The URL that the dstack server reads (its `server/settings.py`, 0.18.41 to 0.22.5).

    Raises:
        Refused: DSTACK_DATABASE_URL is no URL, or one of another kind of database.
    """
    given = os.getenv("DSTACK_DATABASE_URL")
    try:
        url = default_url() if given is None else make_url(given)
        # What SQLAlchemy takes for the host then has a part of the password.
        is_url = "@" not in (url.host or "")
    except (ArgumentError, ValueError):
        is_url = False
    if not is_url:
        raise Refused(
            "DSTACK_DATABASE_URL cannot be read as a database URL. Nothing was changed. Set it as the"
            " dstack server has it, for example postgresql+asyncpg://user:password@host/dbname, with %40 for"
            " an @ in the password."
        )
    if url.get_backend_name() not in ("postgresql", "sqlite"):
        raise Refused(
            f"DSTACK_DATABASE_URL names a {url.get_backend_name()} database. Nothing was changed."
            " dstack runs on PostgreSQL and SQLite only."
        )
    return url


def synchronous(url: URL) -> URL:
    """The same database for sqlite3 or psycopg.

    Raises:
        Refused: its time-out is no number.
    """
    if url.get_backend_name() == "sqlite":
        return url.set(drivername="sqlite")
    query = {}
    for name, value in url.query.items():
        libpq_name = ASYNCPG_TO_LIBPQ.get(name, name)
        if libpq_name == "connect_timeout" and isinstance(value, str):
            try:
                value = str(round(float(value)))
            except (ValueError, OverflowError):
                raise Refused(
                    f"DSTACK_DATABASE_URL says timeout={value}, which is no number of seconds. Nothing was"
                    " changed. Set it as the dstack server has it."
                ) from None
        if libpq_name is not None:
            query[libpq_name] = value
    return url.set(drivername="postgresql+psycopg", query=query)
