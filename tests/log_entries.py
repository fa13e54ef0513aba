"""Entries of the service's log, for tests."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bottega.logger import FIELDS


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Collect the entries of the block, which go nowhere else."""
    entries: list[dict[str, Any]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = getattr(record, FIELDS, {})
            level = record.levelname.lower()
            entries.append({**fields, "event": record.getMessage(), "log_level": level})

    logger = logging.getLogger("bottega")
    before = logger.level, logger.propagate
    collector = Collector()
    logger.addHandler(collector)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield entries
    finally:
        logger.removeHandler(collector)
        logger.setLevel(before[0])
        logger.propagate = before[1]
