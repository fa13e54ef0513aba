"""Spans: records of work for tracing backends, with names of OpenTelemetry's GenAI conventions.

While :data:`tracer` is ``None``, this module makes no spans and does not import OpenTelemetry.
"""

from collections.abc import Mapping
from contextvars import Token
from hashlib import blake2b
from typing import NamedTuple, Protocol
from uuid import UUID

from bottega import trace_context
from bottega.trace_context import Trace

SERVER, CONSUMER, CLIENT, INTERNAL = "SERVER", "CONSUMER", "CLIENT", "INTERNAL"
"""Kinds of spans, as OpenTelemetry names them."""

OPERATION = "gen_ai.operation.name"
AGENT = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
ANSWERED_BY = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOOL = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL = "gen_ai.tool.call.id"
ARGUMENTS = "gen_ai.tool.call.arguments"
RESULT = "gen_ai.tool.call.result"
INSTRUCTIONS = "gen_ai.system_instructions"
INPUT = "gen_ai.input.messages"
OUTPUT = "gen_ai.output.messages"
METHOD = "http.request.method"
ROUTE = "http.route"
STATUS = "http.response.status_code"
ERROR = "error.type"
RUN = "bottega.run.id"
TENANT = "bottega.tenant"
ATTEMPT = "bottega.run.attempt"
RUN_STATUS = "bottega.run.status"
TASK = "bottega.task.id"
TOOL_KIND = "bottega.tool.type"
FAILED_TRY = "bottega.model_try_failed"
"""Name of a span's event: a try of the model call failed, and another try follows."""

CANCELLED = "cancelled"
"""``error.type`` of a span whose work was stopped."""

AttributeValue = str | int | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]


class Ids(NamedTuple):
    """Ids of a span that are known before the span begins.

    Attributes:
        trace: id of the trace; used only if the span has no parent.
    """

    trace: int
    span: int


class Recorded(Protocol):
    """A span, as the tracer records it.

    Attributes:
        trace: trace context of the span, which its child spans need.
        is_recorded: false if the trace is not sampled.
    """

    trace: Trace
    is_recorded: bool

    def name(self, name: str) -> None: ...
    def set(self, attributes: Attributes) -> None: ...
    def event(self, name: str, attributes: Attributes) -> None: ...
    def end(self, error: str | None) -> None: ...


class Tracer(Protocol):
    """Maker of spans.

    Attributes:
        takes_texts: true if prompts, answers, arguments and results are exported, too.
    """

    takes_texts: bool

    def begin(
        self,
        name: str,
        kind: str,
        attributes: Attributes,
        parent: Trace | None,
        ids: Ids | None,
        link: Ids | None,
    ) -> Recorded: ...


tracer: Tracer | None = None
"""The current tracer; ``None``: no spans are exported."""


class Span:
    """The span of the current work; spans that begin during this work become its children.

    Attributes:
        takes_texts: true if the span's texts are exported.
    """

    def __init__(self, recorded: Recorded, takes_texts: bool) -> None:
        self._recorded = recorded
        self._before: Token[Trace | None] = trace_context.current.set(recorded.trace)
        self._ended = False
        self.takes_texts = takes_texts and recorded.is_recorded

    def name(self, name: str) -> None:
        """Replace the span's name."""
        self._recorded.name(name)

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._recorded.set(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        """Add an event that has the current time."""
        self._recorded.event(name, attributes)

    def end(self, error: str | None = None) -> None:
        """End the span. Idempotent.

        Args:
            error: code of the error that ended the work; never an error text.
        """
        if self._ended:
            return
        self._ended = True
        try:  # noqa: SIM105 # `suppress` costs as much time as the rest of this method
            trace_context.current.reset(self._before)
        except ValueError:  # the span began in a different context
            pass
        self._recorded.end(error)


def begin(
    name: str,
    kind: str,
    attributes: Attributes,
    *,
    ids: Ids | None = None,
    link: Ids | None = None,
) -> Span | None:
    """Begin a child of the current span, or return ``None`` if no spans are exported.

    Args:
        link: ids of an earlier span that the new span continues.
    """
    if tracer is None:
        return None
    recorded = tracer.begin(name, kind, attributes, trace_context.current.get(), ids, link)
    return Span(recorded, tracer.takes_texts)


def ids_of(run_id: UUID, attempt: int, traceparent: str | None) -> Ids:
    """Return the ids of the span of an attempt.

    The span of the next attempt links to these ids. The ids are computed from the run's id, because
    an attempt may crash before it stores anything.
    """
    known = trace_context.trace_id(traceparent)
    trace = run_id.int if known is None else int(known, 16)
    digest = blake2b(run_id.bytes + attempt.to_bytes(8, "big"), digest_size=8).digest()
    return Ids(trace, int.from_bytes(digest, "big") or 1)
