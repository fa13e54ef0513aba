"""Logs: readable lines if stderr is a terminal, otherwise JSON. Logs go to stderr."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from stamina.instrumentation import (
    LoggingOnRetryHook,
    PrometheusOnRetryHook,
    set_on_retry_hooks,
)

from bottega.clock import stamp
from bottega.logger import FIELDS, context
from bottega.redaction import Redactor

Entry = dict[str, Any]
_DEEPEST = 20
_COLORS = {"warning": "33", "error": "31", "critical": "31"}

_of_tenant: list[Callable[[str], Redactor | None]] = []


def clean_of_tenants(find: Callable[[str], Redactor | None]) -> None:
    """Apply the tenant's redactor from now on to each log entry that has a field ``tenant``."""
    _of_tenant[:] = [find]


def is_json(form: str) -> bool:
    """Return true if the log's lines are JSON; ``form`` is ``auto``, ``json`` or ``text``."""
    return form == "json" or (form == "auto" and not sys.stderr.isatty())


def configure_logging(
    level: str, known: Redactor = Redactor(), form: str = "auto", file: TextIO | None = None
) -> None:
    """Route all loggers and warnings to one handler.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        known: the redactor that removes secrets from all entries.
        form: see :func:`is_json`.
        file: the file for the lines; ``None``: standard error.
    """
    logging.captureWarnings(True)
    # Without hooks, stamina would log to structlog if structlog is installed.
    set_on_retry_hooks([PrometheusOnRetryHook, LoggingOnRetryHook])
    handler = logging.StreamHandler(file or sys.stderr)
    has_colors = file is None and sys.stderr.isatty()
    handler.setFormatter(_Formatter(known, is_json(form), has_colors))
    root = logging.getLogger()
    root.handlers = [handler]
    # At our level "info", libraries log only warnings and errors.
    root.setLevel("WARNING" if level == "info" else level.upper())
    logging.getLogger("bottega").setLevel(level.upper())
    # Never DEBUG: at this level, the library logs response headers, which may contain secrets.
    logging.getLogger("httpcore2").setLevel(max(root.level, logging.INFO))


class _Formatter(logging.Formatter):
    def __init__(self, known: Redactor, is_json: bool, has_colors: bool) -> None:
        super().__init__()
        self._known = known
        self._is_json = is_json
        self._has_colors = has_colors

    def format(self, record: logging.LogRecord) -> str:
        entry = {**getattr(record, FIELDS, context())}
        entry |= {"event": record.getMessage(), "level": record.levelname.lower()}
        entry["timestamp"] = stamp()
        if record.exc_info and record.exc_info[0]:
            entry["exception"] = self.formatException(record.exc_info)
        entry = _in_order(_clean(entry, self._known))
        return json.dumps(entry) if self._is_json else _as_text(entry, self._has_colors)


def _as_text(entry: Entry, has_colors: bool) -> str:
    event, level, at = entry.pop("event"), entry.pop("level"), entry.pop("timestamp")
    exception = entry.pop("exception", None)
    said, event = f"[{level:<8}]", f"{event:<30}"
    if has_colors:
        said, event = f"\x1b[{_COLORS.get(level, '32')}m{said}\x1b[0m", f"\x1b[1m{event}\x1b[0m"
    pairs = (f"{name}={_shown(value)}" for name, value in entry.items())
    line = " ".join((at, said, event, *pairs)).rstrip()
    return line if exception is None else f"{line}\n{exception}"


def _shown(value: Any) -> str:
    """Return a field's value as text, in quotes unless the text is one word."""
    is_word = isinstance(value, str) and value.isprintable() and not {*" ='\""} & {*value}
    return value if is_word and value else repr(value)


def _clean(entry: Entry, known: Redactor) -> Entry:
    tenant = entry.get("tenant")
    found = _of_tenant[0](tenant) if _of_tenant and isinstance(tenant, str) else None
    plain = {name: _plain(value) for name, value in entry.items()}
    cleaned: Entry = known.record(plain)
    return cleaned if found is None else found.record(cleaned)


def _in_order(entry: Entry) -> Entry:
    """Return an entry whose first fields are event, level and time; the others are sorted."""
    first = [name for name in ("event", "level", "timestamp") if name in entry]
    return {name: entry[name] for name in (*first, *sorted(entry.keys() - {*first}))}


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping) and depth < _DEEPEST:
        return {str(key): _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth < _DEEPEST:
        return [_plain(each, depth + 1) for each in value]
    return repr(value)
