"""Parser of PostgreSQL addresses in libpq's forms: URLs, ``key=value``, services and ``PG…``.

If this module does not support an option of libpq, it raises an error. No error contains a value
that may contain a password.
"""

import getpass
import os
import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlencode

from bottega.errors import InvalidInputError

_VARIABLES = {
    "host": "PGHOST",
    "port": "PGPORT",
    "dbname": "PGDATABASE",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "options": "PGOPTIONS",
    "application_name": "PGAPPNAME",
    "connect_timeout": "PGCONNECT_TIMEOUT",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
    "service": "PGSERVICE",
    "servicefile": "PGSERVICEFILE",
}
"""Options that this module reads, with their environment variables.

The driver reads the variables of all other options.
"""
_FILES = ("sslcert", "sslkey", "sslrootcert", "sslcrl")
_OF_DRIVER = frozenset(
    (
        *_FILES,
        *("sslmode", "sslnegotiation", "sslpassword"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version"),
        *("passfile", "krbsrvname", "gsslib"),
    )
)
_LACKED = {
    "channel_binding": ("disable", "prefer"),
    "client_encoding": ("auto", "utf8", "utf-8", "unicode"),
    "gssencmode": ("disable", "prefer"),
    "load_balance_hosts": ("disable",),
    "replication": ("false", "off", "no", "0"),
    "requiressl": ("0",),
    "sslcertmode": ("allow",),
    "sslcompression": ("0",),
    "sslsni": ("1",),
}
"""Options that are not supported. Their accepted values have no effect."""
_SYNONYMS = {"database": "dbname", "fallback_application_name": "application_name"}
_PAIR = re.compile(r"\s*(\w+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|((?:[^\s'\\]|\\.)*))(?=\s|$)", re.DOTALL)
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::([^:]*))?")


@dataclass(frozen=True, slots=True)
class Server:
    """One server of an address.

    Attributes:
        host: name, address, or folder of a socket; ``None``: sockets in the usual folders, then
            ``localhost``.
        patience_s: timeout for connecting, in seconds; ``None``: not set.
        target: required kind of server (``target_session_attrs``); ``None``: not set.
        settings: start-up parameters.
        rest: options for TLS and Kerberos.
    """

    host: str | None
    port: int
    user: str
    password: str | None = field(repr=False)
    database: str
    patience_s: float | None
    target: str | None
    settings: dict[str, str]
    rest: Mapping[str, str] = field(repr=False)

    def arguments(self) -> dict[str, object]:
        """Return the arguments for the driver, without start-up parameters."""
        rest = dict(self.rest)
        found: dict[str, object] = {}
        if rest.get("sslrootcert") == "system":
            del rest["sslrootcert"]
            found["ssl"] = True  # verify-full, with the system's certificates
        if rest:
            found["dsn"] = f"postgresql://?{urlencode(rest, quote_via=quote)}"
        if self.host is not None:
            found["host"] = [self.host]
        return found | {
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "database": self.database,
        }


def servers(conninfo: str) -> list[Server]:
    """Return the servers of an address, such as a primary and its standbys, in order.

    Raises:
        InvalidInputError: the text is no address, or has an unsupported option.
    """
    options = _from_url(conninfo) if "://" in conninfo else _from_pairs(conninfo)
    options = {name: value for name, value in options.items() if value}
    options = _of_service(options) | options
    variables = {name: os.environ.get(key, "") for name, key in _VARIABLES.items()}
    options = {name: value for name, value in variables.items() if value} | options
    _check(options)
    user = options.get("user") or _login()
    hosts = options.get("host", "").split(",")
    return [
        Server(
            host or None,
            port,
            user,
            options.get("password"),
            options.get("dbname", user),
            _patience(options),
            options.get("target_session_attrs"),
            {name: options[name] for name in ("options", "application_name") if name in options},
            {name: value for name, value in options.items() if name in _OF_DRIVER},
        )
        for host, port in zip(hosts, _ports(options, len(hosts)), strict=True)
    ]


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
        raise _invalid("names no user: add the user's name") from None


def _invalid(problem: str) -> InvalidInputError:
    return InvalidInputError(f"DATABASE_URL {problem}")


def _from_url(url: str) -> dict[str, str]:
    """Read ``postgresql://user:password@host:port,host:port/dbname?option=value&…``."""
    scheme, rest = url.split("://", 1)
    if scheme.split("+")[0] not in ("postgresql", "postgres"):
        raise _invalid(f"must be a postgresql:// URL, not {scheme}://")
    # As in libpq, a login ends at the first @ before the first slash, and may have question marks.
    login, at, address = rest.partition("@")
    if not at or "/" in login:
        login, address = "", rest
    before, _, query = address.partition("?")
    listed, _, name = before.partition("/")
    user, _, password = login.partition(":")
    hosts, ports = [], []
    for each in listed.split(","):
        if (match := _HOST.fullmatch(each)) is None or "@" in each:
            raise _invalid(
                "has a host that is not valid: write @, :, / and % in a user or password as %40, "
                "%3A, %2F and %25, and an IPv6 address in brackets"
            )
        hosts.append(_decoded(match[1].strip("[]"), "a host"))
        ports.append(match[2] or "")
    options = {
        "user": _decoded(user, "the user"),
        "password": _decoded(password, "the password"),
        "host": ",".join(hosts) if any(hosts) else "",
        "port": ",".join(ports) if any(ports) else "",
        "dbname": _decoded(name, "the name of the database"),
    }
    for pair in query.split("&") if query else ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise _invalid("has an option without a value: write ?option=value&option=value")
        key = _decoded(key, "an option")
        options[key] = _decoded(value, f"the option {key}")
    if options.pop("ssl", None) == "true":  # JDBC's way to request TLS
        options["sslmode"] = "require"
    return _renamed(options)


def _decoded(text: str, part: str) -> str:
    if re.search(r"%(?![0-9A-Fa-f]{2})|%00", text):
        raise _invalid(f"has %00 or a % without two hex digits in {part}: write % itself as %25")
    return unquote(text)


def _from_pairs(conninfo: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    position = 0
    while position < len(conninfo.rstrip()):
        match = _PAIR.match(conninfo, position)
        if match is None:
            raise _invalid(
                "must be a postgresql:// URL or key=value pairs: no pair begins at character "
                f"{position + 1}"
            )
        quoted, plain = match.group(2), match.group(3)
        value = plain if quoted is None else quoted
        pairs[match.group(1)] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
        position = match.end()
    return _renamed(pairs)


def _renamed(options: Mapping[str, str]) -> dict[str, str]:
    synonyms = {_SYNONYMS[name]: value for name, value in options.items() if name in _SYNONYMS}
    return synonyms | {name: value for name, value in options.items() if name not in _SYNONYMS}


def _of_service(options: Mapping[str, str]) -> dict[str, str]:
    name = options.get("service") or os.environ.get("PGSERVICE")
    if not name:
        return {}
    chosen = options.get("servicefile") or os.environ.get("PGSERVICEFILE")
    system = Path(os.environ.get("PGSYSCONFDIR", "/etc/postgresql-common"), "pg_service.conf")
    paths = [Path(chosen)] if chosen else [Path("~/.pg_service.conf").expanduser(), system]
    services = ConfigParser(
        delimiters="=", comment_prefixes="#", interpolation=None, strict=False, default_section=""
    )
    services.optionxform = str  # type: ignore[assignment,method-assign]
    for path in paths:
        try:
            services.read_string(path.read_text(encoding="utf-8"))
        except OSError:
            continue
        except (ConfigError, UnicodeDecodeError):
            raise _invalid(f"names a service, but {path} is no valid service file") from None
        if services.has_section(name):
            return _renamed({key: value for key, value in services.items(name) if value})
    places = " or ".join(map(str, paths))
    raise _invalid(f"names the service {name!r}, which is not in {places}")


def _check(options: Mapping[str, str]) -> None:
    for name, value in options.items():
        if name in _VARIABLES or name in _OF_DRIVER:
            continue
        if name not in _LACKED:
            raise _invalid(
                f"has the option {name!r}, which Bottega does not support: remove it (write a "
                "setting of the server as options=-c%20NAME=VALUE)"
            )
        if value.lower() not in _LACKED[name]:
            raise _invalid(
                f"has {name}={value}, which Bottega does not support: remove it, or write "
                f"{name}={_LACKED[name][-1]}"
            )
    system = options.get("sslrootcert") == "system"
    for name in _FILES:
        if (path := options.get(name)) and not (system or Path(path).is_file()):
            raise _invalid(f"names a file in {name} that does not exist: {path}")
    more = [name for name in options if name.startswith("ssl") and name not in _WITH_SYSTEM]
    if system and more:
        raise _invalid(
            f"has both {more[0]} and sslrootcert=system: remove {more[0]}, or set sslrootcert to "
            "a file of certificates"
        )
    if system and options.get("sslmode", "verify-full") != "verify-full":
        raise _invalid("has sslrootcert=system, which needs sslmode=verify-full: set this sslmode")


_WITH_SYSTEM = frozenset(("sslrootcert", "sslmode", "sslnegotiation", *_LACKED))


def _ports(options: Mapping[str, str], hosts: int) -> list[int]:
    ports = [_number(port or "5432", "port", range(1, 65536)) for port in _each(options, "port")]
    if len(ports) not in (1, hosts):
        raise _invalid(
            f"lists {hosts} servers and {len(ports)} ports: give one port for all, or one for each"
        )
    return ports * hosts if len(ports) == 1 else ports


def _each(options: Mapping[str, str], name: str) -> list[str]:
    return options.get(name, "").split(",")


def _patience(options: Mapping[str, str]) -> float | None:
    """Return the timeout for connecting in seconds. As in libpq, 0 means no limit, 1 means 2 s."""
    seconds = _number(options.get("connect_timeout", "0"), "connect_timeout", range(-1, 1_000_000))
    return max(2, seconds) if seconds > 0 else None


def _number(text: str, name: str, allowed: range) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -2
    if number not in allowed:
        raise _invalid(
            f"has a wrong {name}: it must be a number from {allowed[0]} to {allowed[-1]}"
        )
    return number
