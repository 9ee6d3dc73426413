"""The order of work: for the hook, for the command line, and offline."""

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, MetaData, inspect, text
from sqlalchemy.exc import DBAPIError

from busy_blocks import counters, database, dstack, objects, urls
from busy_blocks.errors import Refused, explain, first_line

log = logging.getLogger("dstack.busy_blocks")

# A table of its own: dstack does not start where alembic_version names a revision it does not know.
VERSION_TABLE = "busy_blocks_alembic_version"
# The setting of who wants the counter kept and the status left to dstack: 0002.
REVISION = "DSTACK_BUSY_BLOCKS_REVISION"
WAIT = 60.0  # seconds to try again, on the command line, while somebody else holds a lock
HOOK_WAIT = 15.0  # the same where a server waits to start; dstack waits as long for its own migrations


class Options(NamedTuple):
    """What `-x` can say: whether to run dstack's migrations, and the seconds to wait for locks."""

    dstack: bool = True
    wait: float = WAIT


def offline() -> None:
    """Print the SQL of `--sql`. Connects to nothing.

    From or to base, the script starts with taking everything of ours off, so it can be run twice, and on
    a database where only a part of ours is there.
    """
    with _one_sentence():
        _options()
        dialect = urls.server_url().get_backend_name()
        if _command() == "upgrade" and _is_to_head():
            # Before anything is printed.
            _target()
    context.configure(
        dialect_name=dialect,
        version_table=VERSION_TABLE,
        literal_binds=True,
        # Without it alembic prints no BEGIN for SQLite.
        transactional_ddl=True,
        fn=_migrations(),
    )
    with context.begin_transaction():
        if not context.get_starting_revision_argument() or not context.get_revision_argument():
            objects.begin(dialect, context.execute)
            objects.remove_all(dialect, context.execute)
            context.execute(f"DROP TABLE IF EXISTS {VERSION_TABLE}")
        if context.get_revision_argument():
            context.run_migrations()


def hook(connection: Connection) -> None:
    """Run by a dstack server at its start, on its connection and under its advisory lock.

    What goes wrong with ours is logged as an error, and the server starts without the triggers. What
    goes wrong in dstack's own migrations is raised, as it is without us.
    """
    if _command() != "upgrade" or not _is_to_head():
        _run_revisions(connection, HOOK_WAIT)
        return
    script = dstack.scripts()
    if script is None:
        raise Refused(
            "This dstack has its migrations elsewhere than the releases up to 0.22, so its schema cannot be"
            " brought up to date from here. Nothing was changed. Unset DSTACK_ALEMBIC_MIGRATIONS_LOCATION"
            " to start it without this hook, after `alembic downgrade base`."
        )
    revisions = dstack.current(connection)
    if revisions != set(script.get_heads()) and not dstack.is_ahead(script, revisions):
        _or_log(connection, lambda: dstack.clear_leftovers(connection))
        _or_log(connection, lambda: _take_off(connection, HOOK_WAIT))
    # Also where nothing is pending: dstack's env.py sets up the connection, and it is dstack's to say what
    # becomes of a database that is ahead, whose triggers the replicas of the newer release live on.
    try:
        dstack.upgrade(connection, script)
    finally:
        # Also where they failed: servers of the release before may be running on.
        _or_log(connection, lambda: _repair(connection, HOOK_WAIT))


def _or_log(connection: Connection, work: Callable[[], None]) -> None:
    # As wide as the promise: a server starts, whatever happens here.
    try:
        connection.rollback()
        work()
    except Exception as error:
        with suppress(Exception):
            connection.rollback()
        log.error(
            "busy_blocks is NOT kept right by triggers; the server goes on. %s",
            error if isinstance(error, Refused) else repr(error),
        )


def command_line() -> None:
    """Run by `alembic` on the command line. An error is one sentence, and exit status 1."""
    with _one_sentence():
        options = _options()
        url = urls.server_url()
        command = _command()
        to_head = command == "upgrade" and _is_to_head()
        script = dstack.scripts() if to_head and options.dstack else None
        if command in ("upgrade", "downgrade"):
            log.info("Database %s", database.describe(url))
        database.check_exists(url, creates=script is not None)
        with database.connect(url, options.wait) as connection:
            if command == "retrieve_migrations":
                _check(connection)
            elif command == "display_version":
                _run_revisions(connection, options.wait)
            else:
                database.check_rights(connection)
                with database.as_owner(connection), database.migrations_lock(connection, options.wait):
                    if to_head:
                        _upgrade_to_head(connection, script, options.wait)
                    else:
                        _run_revisions(connection, options.wait)


@contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        sys.exit(f"FAILED: {refused}")
    except DBAPIError as error:
        sys.exit(f"FAILED: {explain(error, database.describe(urls.server_url()))}")


def _options() -> Options:
    arguments = context.get_x_argument(as_dictionary=True)
    try:
        options = Options(
            dstack={"run": True, "skip": False}[arguments.pop("dstack", "run")],
            wait=float(arguments.pop("wait", WAIT)),
        )
    except (KeyError, ValueError):
        options = None
    if options is None or arguments:
        raise Refused(
            f"Unknown argument or value -x {' -x '.join(context.get_x_argument())}. Nothing was changed. There are"
            " -x dstack=skip, which leaves dstack's own schema alone, and -x wait=SECONDS, for locks."
        )
    return options


def _command() -> str:
    # The work function that alembic's command gives to EnvironmentContext has the command's name for
    # upgrade and downgrade; `check` runs retrieve_migrations, `current` display_version.
    context.configure(dialect_name="sqlite")
    return str(context.get_context().opts["fn"].__name__)


def _is_to_head() -> bool:
    try:
        destination = context.get_revision_argument()
    except CommandError:
        # A relative one, such as +1.
        return False
    heads = set(context.script.get_heads())
    return set([destination] if isinstance(destination, str) else destination or ()) == heads


def _target() -> str:
    """The revision that stands for head: the one that REVISION names, where the newest is not wanted."""
    wanted = os.environ.get(REVISION, "head")
    try:
        script = context.script.get_revision(wanted)
    except CommandError:
        script = None
    if script is None:
        raise Refused(
            f"{REVISION} is {wanted}, which is no revision of this package. Nothing was changed. Set it to"
            " 0002 for the counter alone, or unset it."
        )
    return script.revision


def _upgrade_to_head(connection: Connection, script: ScriptDirectory | None, wait: float) -> None:
    revisions = dstack.current(connection)
    if script is not None and dstack.is_ahead(script, revisions):
        log.warning(
            "The database is from a newer dstack than the one installed here (%s): dstack's own schema"
            " is left as it is",
            ", ".join(sorted(revisions)),
        )
        script = None
    if script is None or revisions == set(script.get_heads()):
        _repair(connection, wait)
        return
    dstack.check_is_dstack(connection, revisions)
    dstack.clear_leftovers(connection)
    _take_off(connection, wait)
    try:
        dstack.upgrade(connection, script)
    except Exception as error:
        # A migration can raise anything. The triggers go on again: servers of the release before may be
        # running on.
        connection.rollback()
        _repair(connection, wait)
        reason = first_line(error) if isinstance(error, DBAPIError) else repr(error)
        revision = ", ".join(sorted(dstack.current(connection))) or "none"
        raise Refused(
            f"dstack's own migrations failed: {reason}. Its schema is at revision {revision}, the triggers"
            " are on. When the cause is mended, run `alembic upgrade head` again."
        ) from error
    _put_on(connection, wait)


def _repair(connection: Connection, wait: float) -> None:
    dstack.check_schema(connection)
    target = _target()
    current = _current(connection)
    if dstack.is_ahead(context.script, current):
        log.warning(
            "The triggers are from a newer release of this package, revision %s: they are left as they are."
            " Install that release here, too",
            ", ".join(current),
        )
        return
    broken = _broken(connection, target)
    is_at_target = current == {target}
    if is_at_target and connection.dialect.name == "postgresql" and set(broken) == {objects.INDEX}:
        database.retry(connection, wait, lambda: _build_index(connection))
        broken = {}
    if is_at_target and not broken:
        nothing = database.retry(connection, wait, lambda: _correct(connection, target)) == 0
        log.info("The triggers are installed and every counter is right%s", ": nothing to do" * nothing)
        return
    if is_at_target:
        for name, state in broken.items():
            log.warning("%s is %s: installing all objects anew", name, state)
    _take_off(connection, wait)
    _put_on(connection, wait)


def _broken(connection: Connection, target: str) -> dict[str, str]:
    states = objects.states(connection, target)
    return {name: state for name, state in states.items() if state != "installed"}


def _correct(connection: Connection, target: str) -> int:
    columns = counters.kept(target)
    return sum(counters.correct(connection, column, commit=connection.commit) for column in columns)


def _build_index(connection: Connection) -> None:
    with database.autocommit(connection):
        objects.build_index(connection)


def _take_off(connection: Connection, wait: float, drops_version_table: bool = False) -> None:
    head = context.script.get_current_head() or ""
    states = objects.states(connection, head)
    has_version_table = inspect(connection).has_table(VERSION_TABLE, schema=objects.schema(connection))
    connection.commit()
    dialect = connection.dialect.name

    def execute(statement: str) -> None:
        connection.execute(text(statement))

    def work() -> None:
        objects.begin(dialect, execute)
        for statement in objects.strays(connection, head).values():
            execute(statement)
        objects.remove_all(dialect, execute)
        if has_version_table:
            execute(f"{'DROP TABLE' if drops_version_table else 'DELETE FROM'} {VERSION_TABLE}")
        connection.commit()

    if has_version_table or set(states.values()) != {"missing"}:
        database.retry(connection, wait, work)


def _put_on(connection: Connection, wait: float) -> None:
    dstack.check_schema(connection)
    database.check_rights(connection)
    _run_revisions(connection, wait)
    log.info("The triggers are installed and every counter is right")


def _current(connection: Connection) -> set[str]:
    options = {"version_table": VERSION_TABLE, "version_table_schema": objects.schema(connection)}
    migration_context = MigrationContext.configure(connection, opts=options)
    return set(migration_context.get_current_heads())


def _migrations() -> Callable[..., Any]:
    """What alembic's command runs, with the revision of _target() in the place of the newest."""
    given = context.get_context().opts["fn"]

    def upgrade(revision: Any, _: MigrationContext) -> Any:
        return context.script._upgrade_revs(_target(), revision)

    def retrieve_migrations(_: Any, migration_context: MigrationContext) -> Any:
        # `alembic check` wants the newest; _check() has seen to the one that is wanted.
        return given(tuple(context.script.get_heads()), migration_context)

    if given.__name__ == "retrieve_migrations":
        return retrieve_migrations
    return upgrade if given.__name__ == "upgrade" and _is_to_head() else given


def _run_revisions(connection: Connection, wait: float) -> None:
    migrations = _migrations()

    def work() -> None:
        schema = objects.schema(connection)
        connection.commit()
        context.configure(
            connection=connection,
            version_table=VERSION_TABLE,
            version_table_schema=schema,
            transaction_per_migration=True,
            # For `alembic check`, which compares tables: there is none of ours to compare.
            target_metadata=MetaData(),
            include_name=lambda *_: False,
            on_version_apply=_log_revision,
            fn=migrations,
        )
        with context.begin_transaction():
            context.run_migrations()

    database.retry(connection, wait, work)
    connection.commit()
    if _command() == "downgrade" and not _current(connection):
        # What a version table that was lost, or is at base by hand, no longer accounts for.
        _take_off(connection, wait, drops_version_table=True)
        log.info("The triggers are removed")


def _log_revision(
    ctx: MigrationContext, step: MigrationInfo, heads: Collection[Any], run_args: Mapping[str, Any]
) -> None:
    script = context.script.get_revision(step.up_revision_id or "")
    if script is not None:
        log.info("Revision %s %s: %s", script.revision, "on" if step.is_upgrade else "off", script.doc)


def _check(connection: Connection) -> None:
    dstack.check_schema(connection)
    target = _target()
    broken = _broken(connection, target)
    problems = [f"{name} is {state}" for name, state in broken.items()]
    if _current(connection) != {target}:
        problems.append(f"revision is {', '.join(_current(connection)) or 'base'}, not {target}")
    # What drift.sql needs.
    if any(
        "missing" in broken.get(name, "")
        for name in ("function/busy_blocks_of_job", "view/busy_blocks_derived")
    ):
        problems.append("the counters cannot be compared without it")
    else:
        problems += [
            f"instance {row.name} ({row.id}): {column} is {row.is_now}, should be {row.should_be}"
            for column in counters.kept(target)
            for row in counters.drift(connection, column)
        ]
    if problems:
        raise Refused("; ".join(problems) + ". Nothing was changed. Run `alembic upgrade head`.")
    _run_revisions(connection, WAIT)
