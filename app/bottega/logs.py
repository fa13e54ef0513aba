"""Logs: readable lines on a terminal, otherwise JSON. Logs go to stderr, not stdout."""

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict

from bottega.redaction import Redactor

_DEEPEST = 20

_of_tenant: list[Callable[[str], Redactor | None]] = []


def clean_of_tenants(find: Callable[[str], Redactor | None]) -> None:
    """Redact each later log entry that has a field ``tenant`` with this tenant's redactor."""
    _of_tenant[:] = [find]


def is_json(form: str) -> bool:
    """Return true if the log's lines are JSON; ``form`` is ``auto``, ``json`` or ``text``."""
    return form == "json" or (form == "auto" and not sys.stderr.isatty())


def configure_logging(
    level: str, known: Redactor = Redactor(), form: str = "auto", file: TextIO | None = None
) -> None:
    """Route structlog, the standard library's loggers and warnings to one handler.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        known: the redactor for the texts of all entries.
        form: see :func:`is_json`.
        file: the file for the lines; ``None``: standard error.
    """
    logging.captureWarnings(True)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if is_json(form)
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty() and file is None,
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(file or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                lambda logger, method, entry: _in_order(_clean(entry, known)),
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # For the log entries of libraries, our level "debug" means "info".
    root.setLevel("WARNING" if level == "info" else level.upper())
    logging.getLogger("bottega").setLevel(level.upper())
    # INFO at least: on lower levels the library logs response headers, which may repeat a secret.
    logging.getLogger("httpcore2").setLevel(max(root.level, logging.INFO))


def _clean(entry: EventDict, known: Redactor) -> EventDict:
    tenant = entry.get("tenant")
    found = _of_tenant[0](tenant) if _of_tenant and isinstance(tenant, str) else None
    plain = {name: _plain(value) for name, value in entry.items()}
    cleaned: EventDict = known.record(plain)
    return cleaned if found is None else found.record(cleaned)


def _in_order(entry: EventDict) -> EventDict:
    """Return an entry with sorted fields: event, level, time, then all other fields by name."""
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
