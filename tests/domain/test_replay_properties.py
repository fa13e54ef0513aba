"""Reading a run's log: in one piece or event by event, whole or in part, it says the same."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.agents.messages import AssistantMessage, Usage
from bottega.engine.replay import RunReplay, key_of, replay_run, replay_tasks
from bottega.events.types import Event, EventType
from tests.examples import examples

NOW = datetime(2026, 11, 28, tzinfo=UTC)
RUN, TASKS = UUID(int=7), [None, UUID(int=1), UUID(int=2)]
USAGE = {"input": 3, "output": 2}

calls, ids = st.integers(1, 3), st.sampled_from(["a", "b"])
texts = st.sampled_from(["one", "two"])


def data_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(fields)


def always(value: Any) -> st.SearchStrategy[Any]:
    return st.just(value)


ERROR = {"code": "model_unavailable", "message": "away"}
KINDS: dict[EventType, st.SearchStrategy[dict[str, Any]]] = {
    EventType.LLM_STARTED: data_of(call=calls, attempt=st.integers(1, 2)),
    EventType.LLM_COMPLETED: data_of(
        call=calls, message=data_of(content=texts), usage=always(USAGE)
    ),
    EventType.LLM_FAILED: st.one_of(
        data_of(call=calls, attempt=always(1), error=always(ERROR)),
        data_of(
            call=calls,
            attempt=always(1),
            error=always(ERROR),
            retry_in_ms=st.sampled_from([0, 5]),
            usage=always(USAGE),
            **{"try": st.integers(1, 3)},
        ),
    ),
    EventType.TOOL_STARTED: data_of(
        call=calls,
        tool_call_id=ids,
        name=st.sampled_from(["write_file", "await_subagent"]),
        arguments=always({"path": "p", "content": "c", "task_ids": [str(TASKS[1])]}),
    ),
    EventType.TOOL_COMPLETED: data_of(
        call=calls,
        tool_call_id=ids,
        name=always("write_file"),
        status=always("success"),
        result=st.sampled_from([{"written_chars": 1}, "text"]),
        error=always(None),
    ),
    EventType.CONTEXT_RECALLED: data_of(
        source=st.sampled_from(["episode:1", "designer"]), version=always(1), content=texts
    ),
    EventType.MESSAGE_DELIVERED: data_of(message_id=ids, call=calls, content=texts),
    EventType.MEMORY_PUBLISHED: data_of(version=st.integers(1, 3), content=texts),
    EventType.RUN_WAITING: data_of(reason=always("person")),
    EventType.RUN_RESUMED: data_of(reason=always("person")),
    EventType.SUBAGENT_RETRIED: data_of(attempt=always(1)),
}


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Draw a log of any events, in an order that no run need have."""
    events = []
    for seq in range(1, draw(st.integers(0, 15)) + 1):
        kind = draw(st.sampled_from(list(KINDS)))
        task_id = draw(st.sampled_from(TASKS))
        at = NOW + timedelta(seconds=seq)
        parent = TASKS[1] if task_id == TASKS[2] else None
        events.append(Event(RUN, seq, kind, at, task_id, parent, "agent", draw(KINDS[kind])))
    return events


def replay_state(replay: RunReplay) -> dict[str, Any]:
    """Return all that a replay says, without the times at which messages were built."""
    return {
        "seen": replay.seen,
        "tasks": {
            task_id: {
                "calls": {number: _call(call) for number, call in task.calls.items()},
                "tools": dict(task.tools),
                "said": [(event.seq, _said(said)) for event, said in task.said],
                "sources": task.sources,
                "delivered": dict(task.delivered),
                "published": task.published,
                "usage": task.usage.to_dict(),
                "paid": task.paid.to_dict(),
            }
            for task_id, task in replay.tasks.items()
        },
        "versions": replay.versions,
        "recalled": replay.recalled,
        "asked": replay.asked,
        "messages_read": replay.messages_read,
        "writes": replay.writes,
        "waits": replay.clocks.waits(NOW + timedelta(minutes=1)),
    }


def _call(call: Any) -> Any:
    failure = None if call.failure is None else call.failure.code
    lost = None if call.lost is None else call.lost.to_dict()
    return call.starts, _said(call.answer), call.seq, call.is_carried, failure, call.failing, lost


def _said(said: Any) -> Any:
    return said.content if isinstance(said, AssistantMessage) else said


@given(logs(), st.integers(0, 15))
@settings(max_examples=examples(200), deadline=None)
def test_event_by_event_a_log_says_what_it_says_in_one_piece(
    log: Sequence[Event], cut: int
) -> None:
    replay = replay_run(log[:cut])
    for event in log[cut:]:
        replay.observe(event)
    assert replay_state(replay) == replay_state(replay_run(log))


@given(logs())
@settings(max_examples=examples(200), deadline=None)
def test_the_log_is_only_read(log: Sequence[Event]) -> None:
    before = repr(log)
    replay_tasks(replay_run(log), NOW)
    assert repr(log) == before


@given(logs(), st.integers(0, 15))
@settings(max_examples=examples(200), deadline=None)
def test_what_another_run_paid_changes_nothing_but_payment(
    log: Sequence[Event], carried_seq: int
) -> None:
    own, carried = replay_run(log), replay_run(log, carried_seq)
    for task_id, task in own.tasks.items():
        other = carried.tasks[task_id]
        assert task.usage == other.usage
        assert task.paid.total_tokens >= other.paid.total_tokens
        later = [event for event in log if event.seq > carried_seq and event.task_id == task_id]
        assert other.paid.total_tokens == 5 * sum("usage" in event.data for event in later)
    assert own.seen == carried.seen


@given(logs(), st.sampled_from(TASKS))
@settings(max_examples=examples(200), deadline=None)
def test_a_task_reads_the_same_without_the_events_of_others(
    log: Sequence[Event], task_id: UUID | None
) -> None:
    alone = [event for event in log if event.task_id == task_id]
    found, whole = replay_state(replay_run(alone))["tasks"], replay_state(replay_run(log))["tasks"]
    assert found.get(task_id) == whole.get(task_id)


@given(logs())
@settings(max_examples=examples(200), deadline=None)
def test_each_event_is_known_by_its_key_unless_a_message_reopened_the_root(
    log: Sequence[Event],
) -> None:
    seen = replay_run(log).seen
    for event in log:
        key = key_of(event.type, event.task_id, event.data)
        is_reopened = event.type == EventType.MEMORY_PUBLISHED and event.task_id is None
        assert is_reopened or key in seen
    assert set(seen.values()) <= {event.seq for event in log}


def test_usage_of_answers_that_broke_off_adds_up() -> None:
    data = {"call": 1, "attempt": 1, "error": ERROR, "usage": USAGE, "try": 1, "retry_in_ms": 0}
    events = [Event(RUN, seq, EventType.LLM_FAILED, NOW, None, None, "a", data) for seq in (1, 2)]
    lost = replay_run(events).model_call(None, 1).lost
    assert isinstance(lost, Usage)
    assert lost.total_tokens == 10
    assert replay_run(events, carried_seq=1).model_call(None, 1).lost == Usage.from_dict(USAGE)
