"""The form of a run's log in the database: rows of consecutive events, one JSON object a line.

A line has no ``seq``, ``at`` and ``run_id``: its row gives them. ``type`` comes first, ``data``
last, and what is ``None`` is left out. So a reader can take a line apart without parsing ``data``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self
from uuid import UUID

from pydantic_core import from_json, to_json

from bottega.events.types import Event
from bottega.redaction import Redactor

STEP_EVENTS = 100
"""Most events in a row; SQL has the same number."""

_KEYS = ("type", "task_id", "parent_task_id", "agent", "depth", "data")
_DATA = ',"data":'
"""The place in a line where its data begin: in a string before it, the quotes are escaped."""
_MAX_DEPTH = 100
_TOO_DEEP = "(nested too deeply to be stored)"


class Step(NamedTuple):
    """A step of a run, in the order of the arguments of SQL's ``append_steps``.

    Attributes:
        attempt: the fence.
        after: ``seq`` of the last event before it.
        length: number of its events.
        events: their lines.
        tasks, interrupts, publications, outcome: JSON.
        session: of the run.
    """

    tenant_id: UUID
    run_id: UUID
    attempt: int
    after: int
    length: int
    events: str
    tasks: str | None
    interrupts: str | None
    session: str | None
    publications: str | None
    outcome: str | None

    @classmethod
    def of(
        cls,
        tenant_id: UUID,
        run_id: UUID,
        *,
        attempt: int,
        after: int,
        events: Sequence[Mapping[str, Any]],
        tasks: Sequence[Mapping[str, Any]] = (),
        interrupts: Sequence[Mapping[str, Any]] = (),
        session: str | None = None,
        publications: Sequence[Mapping[str, Any]] = (),
        outcome: Mapping[str, Any] | None = None,
        known: Redactor = Redactor(()),
    ) -> Self:
        """Encode a step.

        Args:
            known: redacts secrets. External text is clean already; this is for other text, such as
                a model server's error that quotes its key.
        """
        return cls(
            tenant_id,
            run_id,
            attempt,
            after,
            len(events),
            "\n".join([_line_of(event, known) for event in events]),
            encoded(tasks, known) if tasks else None,
            encoded(interrupts, known) if interrupts else None,
            session,
            encoded(publications, known) if publications else None,
            None if outcome is None else encoded(outcome, known),
        )


def _line_of(event: Mapping[str, Any], known: Redactor) -> str:
    return encoded({key: value for key in _KEYS if (value := event[key]) is not None}, known)


def events_of(run_id: UUID, rows: Sequence[Any]) -> Iterator[Event]:
    """Yield the events of rows with ``first_seq``, ``at`` and ``events``."""
    for row in rows:
        for seq, line in enumerate(row["events"].split("\n"), row["first_seq"]):
            event = from_json(line)
            yield Event(
                run_id=run_id,
                seq=seq,
                type=event["type"],
                at=row["at"],
                task_id=_id(event.get("task_id")),
                parent_task_id=_id(event.get("parent_task_id")),
                agent=event.get("agent"),
                data=event["data"],
            )


def split_step(step: Mapping[str, Any], after: int) -> Iterator[dict[str, Any]]:
    """Yield a row's events after a ``seq``, with ``data`` as JSON that is not parsed."""
    for seq, line in enumerate(step["events"].split("\n"), step["first_seq"]):
        if seq > after:
            head, _, data = line.partition(_DATA)
            event = from_json(head + "}")
            yield {
                "seq": seq,
                "type": event["type"],
                "at": step["at"],
                "task_id": _id(event.get("task_id")),
                "parent_task_id": _id(event.get("parent_task_id")),
                "agent": event.get("agent"),
                "depth": event.get("depth"),
                "data": data[:-1],
            }


def _id(value: str | None) -> UUID | None:
    return None if value is None else UUID(value)


def encoded(value: Any, known: Redactor) -> str:
    """Encode as JSON, replacing what ``jsonb`` or our decoder cannot hold, and secrets.

    ``jsonb`` holds neither NUL nor lone surrogates, and our decoder refuses deep nesting. The API
    refuses them in users' input. Here they can only come from a model or a tool, and must not fail
    the run.
    """
    encoded = _storable_json(value) or _json(storable(value))
    text = encoded.decode()
    return _json(known.record(from_json(text))).decode() if known.finds(text) else text


def as_stored(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of an event as it is stored; the same object if nothing is replaced."""
    if _storable_json({"data": data}) is not None:
        return data
    return {name: storable(value, 2) for name, value in data.items()}


def _storable_json(value: Any) -> bytes | None:
    """Encode a value; ``None``: it cannot be stored as it is."""
    try:
        encoded = _json(value)
    except (UnicodeEncodeError, ValueError):
        return None
    return None if b"\\u0000" in encoded or not _readable(encoded) else encoded


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="strings", serialize_unknown=True)


def _readable(encoded: bytes) -> bool:
    if encoded.count(b"[") + encoded.count(b"{") <= _MAX_DEPTH:
        return True
    try:
        from_json(encoded)
    except ValueError:
        return False
    return True


def storable(value: Any, depth: int = 0) -> Any:
    """Return ``value`` with characters and nesting that cannot be stored replaced."""
    if depth > _MAX_DEPTH:
        return _TOO_DEEP
    if isinstance(value, str):
        clean = value.encode("utf-8", "replace").decode() if not value.isascii() else value
        return clean.replace("\x00", "\ufffd")
    if isinstance(value, dict):
        return {storable(key): storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item, depth + 1) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
