"""Checks of everything that the service needs (``bottega doctor``). A failed check has a hint."""

import asyncio
import platform
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated
from uuid import UUID, uuid4

import typer
from pydantic import SecretStr, ValidationError
from pydantic_core import to_json

from bottega.cli.terminal import database, one_line, run, safe, start
from bottega.clock import Clock, utcnow
from bottega.errors import BottegaError

if TYPE_CHECKING:
    import asyncpg

    from bottega.settings import Settings

_PATIENCE_S = 5.0
_LEAST_ROOM = 1 << 30
_CLOCKS_DIFFER_S = 5.0
_OF_DATABASE = (
    *("encoding", "extension", "schema", "roles", "rights"),
    *("search_path", "isolation", "clock", "disk", "secrets_key"),
)
"""Names of checks that need a connection to the database."""
_ROLES = """
SELECT r.name, p.oid IS NOT NULL AS is_there,
       p.oid IS NOT NULL AND pg_has_role(p.oid, 'SET') AS is_ours
FROM unnest(ARRAY[
    'bottega_app', 'bottega_user', 'bottega_maintenance', 'bottega_system']) AS r(name)
LEFT JOIN pg_roles p ON p.rolname = r.name
"""
_SESSION = """
SELECT current_setting('search_path') AS search_path, clock_timestamp() AS now,
       current_setting('transaction_isolation') AS isolation,
       current_setting('transaction_read_only') = 'on' AS is_read_only,
       pg_size_pretty(pg_database_size(current_database())) AS size
"""
_OBJECTS = """
SELECT pg_size_pretty(o.size) AS size,
       round(100.0 * o.size / pg_database_size(current_database())) AS share
FROM (SELECT coalesce(pg_total_relation_size(to_regclass('object_pieces')), 0) AS size) AS o
"""
_KEYS = "SELECT DISTINCT substr(value, 1, 8) FROM secrets WHERE value IS NOT NULL"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a check; ``hint`` says what the operator can do if the check failed."""

    name: str
    ok: bool
    detail: str
    hint: str | None = None


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Check everything that the service needs, and give hints; exit with 1 if a check fails."""
    checks = list(_checks())
    if as_json:
        print(to_json({"checks": [asdict(check) for check in checks]}).decode())  # noqa: T201
    else:
        for check in checks:
            state = "ok  " if check.ok else "FAIL"
            print(f"{state} {check.name}: {safe(check.detail)}")  # noqa: T201
            if check.hint:
                print(f"     -> {safe(check.hint)}")  # noqa: T201
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


def explain(error: BaseException) -> tuple[str, str | None]:
    """Return an error as a sentence, and a hint; ``None``: the sentence contains the hint."""
    import asyncpg

    from bottega.db.failures import is_outage

    text = one_line(str(error).splitlines()[0] if str(error) else type(error).__name__)
    match error:
        case BottegaError():
            return error.detail, None
        case ValidationError():
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "settings"
            return (
                f"{name}: {first['msg']}",
                "correct this setting; `bottega settings` lists all settings",
            )
        case asyncpg.RaiseError():  # an error that our SQL raised, whose text contains the hint
            return one_line(error.args[0], 500), None
        case asyncpg.InsufficientPrivilegeError():
            return text, "use the login that owns the database; `bottega doctor` shows its rights"
        case asyncpg.ReadOnlySQLTransactionError():
            return text, "the database is read-only: allow writes first"
        case asyncpg.PostgresError() | asyncpg.InterfaceError():
            passes = is_outage(error)
            return f"the database failed: {text}", (
                "try again; if the error stays, run `bottega doctor`"
                if passes
                else "run `bottega migrate`, then `bottega doctor`; if `bottega migrate` fails "
                "itself, it has changed nothing: report its error"
            )
        case OSError():
            file_name = "" if error.filename is None else f": {error.filename}"
            return f"{error.strerror or text}{file_name}", (
                "check the network and try again; `bottega doctor` shows what can be reached"
                if error.filename is None
                else "check this path and the rights of this user there"
            )
        case _:
            return (
                f"an internal error ({type(error).__name__}: {text})",
                "run `bottega --debug COMMAND` for its traceback, and report it",
            )


def _checks() -> Iterator[Check]:
    yield Check(
        "python", sys.version_info >= (3, 11), f"{platform.python_version()} on {sys.platform}"
    )
    try:
        settings = start()
    except (ValidationError, BottegaError, UnicodeDecodeError, OSError) as error:
        yield _failed("settings", error)
        return
    yield Check("settings", True, "valid")
    with ExitStack() as stack:
        try:
            url = stack.enter_context(database(settings))
        except Exception as error:
            yield _failed("database", error)
            yield from _unchecked(_OF_DATABASE)
        else:
            yield from run(_collected(_of_database(settings, url)))
    yield from run(_collected(_of_surroundings(settings)))


async def _nats(url: str) -> Check:
    from bottega.events.nats import NatsSignals

    try:
        reason = await NatsSignals(url).refusal()
    except BottegaError as error:
        return _failed("nats", error)
    if reason is None:
        return Check("nats", True, "a server answers")
    hint = "check BOTTEGA_NATS_URL: its host, port, login and certificate; until then, readers poll"
    return Check("nats", False, f"no connection: {reason}", hint)


async def _collected(checks: AsyncIterator[Check]) -> list[Check]:
    return [check async for check in checks]


def _failed(name: str, error: BaseException) -> Check:
    detail, hint = explain(error)
    if hint is None:  # our own error texts end with a hint
        problem, _, hint = detail.rpartition(": ")
        detail = problem or detail
    return Check(name, False, detail, hint)


def _unchecked(names: tuple[str, ...]) -> Iterator[Check]:
    for name in names:
        yield Check(
            name,
            False,
            "not checked, because there is no database",
            "first repair the check `database`",
        )


async def _of_database(settings: "Settings", url: str) -> AsyncIterator[Check]:
    from bottega.db.connect import check_same, connect
    from bottega.db.migrate import SERVER, roles_script, server_problems

    try:
        if settings.pooler_url is not None:
            await check_same(url, settings.pooler_url)
        session = await connect(url, role=None)
    except Exception as error:
        yield _failed("database", error)
        for check in _unchecked(_OF_DATABASE):
            yield check
        return
    try:
        server = dict(await session.fetchrow(SERVER))
        problems = server_problems(server)

        def found(name: str, detail: str) -> Check:
            problem, hint = problems.get(name, (None, None))
            return Check(name, problem is None, problem or detail, hint)

        yield found(
            "database",
            f"PostgreSQL {server['version']}, {server['database']}, as {server['login']}",
        )
        yield found("encoding", server["encoding"])
        if server["vector"] is None:
            yield await _missing_extension(session, server["database"])
        else:
            yield found("extension", f"vector {server['vector']}")
        schema = await _schema(url)
        yield schema
        yield await _roles(session, server["login"])
        # The service's login needs no rights to migrate if the schema is current.
        rights = found("rights", f"{server['login']} may migrate")
        if not rights.ok and schema.ok:
            served = f"{server['login']} may serve; `bottega migrate` needs the database's owner"
            rights = Check("rights", True, served)
        if rights.ok and not schema.ok and (refusal := await _refusal(session, roles_script())):
            rights = _failed("rights", refusal)
        yield rights
        async for check in _of_session(settings, session):
            yield check
    finally:
        await session.close()
    yield await _secrets_key(settings, url)


async def _missing_extension(session: "asyncpg.Connection", database: str) -> Check:
    hint = "run `bottega migrate`, which creates it"
    if error := await _refusal(session, "CREATE EXTENSION vector SCHEMA public"):
        hint = (
            f"install pgvector on the server ({str(error).splitlines()[0]}), and let an "
            f"administrator run CREATE EXTENSION vector SCHEMA public in the database {database!r}"
        )
    return Check("extension", False, "the extension vector is missing", hint)


async def _refusal(session: "asyncpg.Connection", script: str) -> "asyncpg.PostgresError | None":
    """Run a part of `bottega migrate`, and roll back all changes; return the error, or ``None``."""
    import asyncpg

    attempt = session.transaction()
    await attempt.start()
    try:
        await session.execute(script)
    except asyncpg.PostgresError as error:
        return error
    finally:
        await attempt.rollback()
    return None


async def _schema(url: str) -> Check:
    from bottega.db.connect import connect
    from bottega.db.migrate import head, require_intact

    try:
        session = await connect(url)
    except BottegaError as error:
        return _failed("schema", error)
    try:
        await require_intact(session)
    except BottegaError as error:
        return _failed("schema", error)
    finally:
        await session.close()
    return Check("schema", True, f"migrated to {head()}")


async def _roles(session: "asyncpg.Connection", login: str) -> Check:
    roles = await session.fetch(_ROLES)
    if missing := [role["name"] for role in roles if not role["is_there"]]:
        return Check("roles", False, f"{', '.join(missing)} missing", "run `bottega migrate`")
    ours = [role["name"] for role in roles if role["is_ours"]]
    if lacking := {"bottega_app", "bottega_user", "bottega_maintenance"} - {*ours}:
        names = ", ".join(sorted(lacking))
        hint = f'run GRANT {names} TO "{login}" WITH INHERIT FALSE, SET TRUE'
        return Check("roles", False, f"{login} may not act as {names}", hint)
    return Check("roles", True, f"{login} may act as {', '.join(ours)}")


async def _of_session(
    settings: "Settings", session: "asyncpg.Connection", clock: Clock = utcnow
) -> AsyncIterator[Check]:
    asked_at = clock()
    row = await session.fetchrow(_SESSION)
    yield Check("search_path", row["search_path"] == "public", row["search_path"])
    yield Check("isolation", row["isolation"] == "read committed", row["isolation"])
    apart_s = (row["now"] - asked_at).total_seconds()
    hint = "let both machines follow a time server (NTP)"
    differs = abs(apart_s) > _CLOCKS_DIFFER_S
    detail = f"the database's clock is {apart_s:+.1f} s from this machine's"
    yield Check("clock", not differs, detail, hint if differs else None)
    if row["is_read_only"]:
        hint = "set default_transaction_read_only to off, or promote the standby"
        yield Check("disk", False, "the database is read-only", hint)
    elif settings.server_url is None:
        yield _room(settings, row["size"])
    else:
        yield await _writes(session, row["size"])


def _room(settings: "Settings", size: str) -> Check:
    from bottega.db.embedded import data_folder

    folder = data_folder(settings.data_dir)
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.1f} GB free in {folder}; the database has {size}"
    hint = None if free > _LEAST_ROOM else "free some space, or move BOTTEGA_DATA_DIR"
    return Check("disk", hint is None, detail, hint)


async def _writes(session: "asyncpg.Connection", size: str) -> Check:
    import asyncpg

    from bottega.db.pool import TRY_TO_WRITE

    try:
        async with session.transaction():
            await session.execute(TRY_TO_WRITE)
    except asyncpg.InsufficientPrivilegeError:
        return Check("disk", True, f"the database has {size}; this login may not test writing")
    except asyncpg.PostgresError as error:
        return Check("disk", False, f"the database cannot store: {error}", "free space on its disk")
    return Check("disk", True, f"the database has {size}, and writing works")


async def _secrets_key(settings: "Settings", url: str) -> Check:
    from bottega.db.embedded import folder_of
    from bottega.settings import keyring
    from bottega.tenants import operator

    keys = keyring(settings, folder_of(url, settings.data_dir))
    try:
        async with operator.transaction(url) as tx:
            used = {bytes(row[0]) for row in await tx.driver.fetch(_KEYS)}
    except Exception:  # the service's login has no right to read the table
        used = set()
    if keys is None:
        if used:
            hint = "set it to the key that sealed the secrets"
            return Check(
                "secrets_key", False, "BOTTEGA_SECRETS_KEY is not set, and there are secrets", hint
            )
        detail = "not set, so tenants can store no secrets; make one with: openssl rand -base64 32"
        return Check("secrets_key", True, detail)
    if unknown := [key for key in used if not keys.opens(key)]:
        hint = "add the old key after the new key, and run `bottega secrets reencrypt`"
        detail = f"secrets are sealed with {len(unknown)} keys that are not in BOTTEGA_SECRETS_KEY"
        return Check("secrets_key", False, detail, hint)
    return Check("secrets_key", True, "set")


async def _of_surroundings(settings: "Settings") -> AsyncIterator[Check]:
    from bottega.memory_services import embedder_of
    from bottega.settings import BUILTIN, OPENAI_URL

    yield await _object_store(settings)
    if settings.nats_url is not None:
        yield await _nats(settings.nats_url.get_secret_value())
    base = settings.openai_base_url or OPENAI_URL
    hosted = settings.embedding_model not in (None, BUILTIN)
    embedding = settings.embedding_base_url or base
    outside = ([] if settings.uses_demo_model else [base]) + ([embedding] if hosted else [])
    yield await _egress(settings, outside)
    if settings.uses_demo_model:
        detail = "only the demo model; connect a model, or set OPENAI_API_KEY"
        yield Check("model", True, detail)
    else:
        yield await _model_server("model", base, settings.openai_api_key)
    if hosted:
        key = settings.embedding_api_key or settings.openai_api_key
        yield await _model_server("embedder", embedding, key)
    else:
        yield Check("embedder", True, embedder_of(settings))


async def _object_store(settings: "Settings") -> Check:
    from bottega.memory_services import object_store_of
    from bottega.objects import Bucket, new_key

    try:
        if (store := object_store_of(settings)) is None:
            return await _objects_in_database(settings)
        key = new_key(UUID(int=0), uuid4(), "check")
        bucket = Bucket(store)
        async with asyncio.timeout(2 * _PATIENCE_S):
            await bucket.put(key, b"doctor")
            await bucket.get(key)
            await bucket.delete([key])
    except Exception as error:
        return _failed("object_store", error)
    return Check("object_store", True, f"{store} stores, reads and deletes")


async def _objects_in_database(settings: "Settings") -> Check:
    """Report the share of the database that files and episodes take without an object store."""
    from bottega.db.connect import connect

    assert settings.database_url is not None
    session = await connect(settings.database_url.get_secret_value(), role=None)
    try:
        row = await session.fetchrow(_OBJECTS)
    finally:
        await session.close()
    detail = (
        f"the database: {row['size']} of bodies, {row['share']} % of it; "
        "from 10 GB on set BOTTEGA_OBJECTS_URL"
    )
    return Check("object_store", True, detail)


async def _egress(settings: "Settings", addresses: list[str]) -> Check:
    allowed = ", ".join(settings.egress_allow) or "none"
    for address in addresses:
        host = _host_of(address)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.get_running_loop().getaddrinfo(host, None)
        except OSError:
            hint = "check this machine's DNS and network, or the address in the settings"
            return Check("egress", False, f"the name {host} cannot be resolved", hint)
    detail = f"names are resolved; private addresses that tools may reach: {allowed}"
    return Check("egress", True, detail)


def _host_of(address: str) -> str:
    import httpx2

    return httpx2.URL(address).host


async def _model_server(name: str, base_url: str, key: SecretStr | None) -> Check:
    """Request a server's list of models (at no cost); fail if the server refuses or is silent."""
    import httpx2

    headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
    where = f"{base_url.rstrip('/')}/models"
    try:
        async with httpx2.AsyncClient(timeout=_PATIENCE_S) as client:
            status = (await client.get(where, headers=headers)).status_code
    except httpx2.HTTPError as error:
        hint = "check the server's address in the settings, and the network"
        return Check(name, False, f"{base_url} does not answer ({type(error).__name__})", hint)
    if status in (401, 403):
        hint = "set the key that you have for this server"
        return Check(name, False, f"{base_url} refuses the key ({status})", hint)
    return Check(name, True, f"{base_url} answers")
