"""Loggers of the service. An entry has a name, such as ``run.ended``, and fields.

The entries go to the standard library's loggers; :mod:`bottega.logs` formats the entries.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

Fields = Mapping[str, Any]
FIELDS = "fields"
"""Attribute of a log record with the entry's fields."""
_context: ContextVar[Fields] = ContextVar("log_fields", default=MappingProxyType({}))


def context() -> Fields:
    """Return the fields that the current asyncio task adds to each entry."""
    return _context.get()


def bind_context(**fields: Any) -> None:
    """Add fields to all later entries of the current asyncio task."""
    _context.set({**_context.get(), **fields})


@contextmanager
def bound_context(**fields: Any) -> Iterator[None]:
    """Add fields to all entries of the block."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


class Logger:
    """Writer of entries.

    Args:
        name: name of the module.
        fields: fields of each entry.
    """

    def __init__(self, name: str, fields: Mapping[str, Any] = {}) -> None:
        self._logger = logging.getLogger(name)
        self._fields = fields

    def bind(self, **fields: Any) -> "Logger":
        """Return a logger that adds fields to each entry."""
        return Logger(self._logger.name, {**self._fields, **fields})

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, None, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, None, fields)

    def warning(self, event: str, *, exc_info: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.WARNING, event, exc_info, fields)

    def error(self, event: str, *, exc_info: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.ERROR, event, exc_info, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Write an error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, event, True, fields)

    def _write(
        self,
        level: int,
        event: str,
        exc_info: BaseException | bool | None,
        fields: Fields,
    ) -> None:
        if self._logger.isEnabledFor(level):
            entry = {**_context.get(), **self._fields, **fields}
            self._logger.log(level, event, exc_info=exc_info, extra={FIELDS: entry})
