"""Export of spans with OpenTelemetry's SDK; the ``OTEL_*`` environment variables control it."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bottega.logger import Logger
from bottega.tracing import spans

log = Logger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_TEXTS = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"

_lock = threading.Lock()
_users = 0


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return true if the environment variables set an exporter or an endpoint for spans."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get(_EXPORTER, "").strip().lower()
    return exporter != "none" and bool(exporter or any(map(environment.get, _ENDPOINTS)))


@contextmanager
def exporting() -> Iterator[None]:
    """Export spans of this process until the end of the block, if :func:`is_wanted` is true."""
    global _users
    if not is_wanted(os.environ):
        yield
        return
    with _lock:
        _users += 1
        provider = _open() if spans.tracer is None else None
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                spans.tracer = None
        if provider is not None:
            _close(provider)


def _open() -> Any:
    try:
        from bottega.tracing import otlp
    except ImportError as error:
        hint = "install the extra otel (in the checkout: .[otel]), or unset the variables OTEL_*"
        log.warning("traces.off", error=str(error), hint=hint)
        return None
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
    exporter = os.environ.get(_EXPORTER, "otlp").strip().lower() or "otlp"
    if exporter != "otlp" or protocol != "http/protobuf":
        hint = "only OTEL_TRACES_EXPORTER=otlp by http/protobuf is supported"
        log.warning("traces.off", exporter=exporter, protocol=protocol, hint=hint)
        return None
    takes_texts = os.environ.get(_TEXTS, "").strip().lower() == "true"
    provider, spans.tracer = otlp.opened(takes_texts)
    return provider


def _close(provider: Any) -> None:
    closing = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
    closing.start()
    closing.join(5.0)  # wait at most 5 s for the last spans
