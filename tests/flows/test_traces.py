"""A caller's trace goes with its run, and the log names it."""

import pytest
import structlog

from bottega import trace_context
from tests.fake_model import FakeModel
from tests.service import Running
from tests.team import define, start

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"


async def test_the_trace_of_a_request_goes_on_to_models_and_into_the_log(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest.client)
    guest.client.headers["traceparent"] = CALLER
    seen = len(guest_model.headers)
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        run_id = await start(guest.client)
        await guest.watch(run_id)
    assert {each.get("traceparent") for each in guest_model.headers[seen:]} == {CALLER}
    mine = [line for line in lines if line.get("run_id") == run_id]
    assert [line["event"] for line in mine] == ["run.started", "run.ended"]
    for line in mine:
        assert (line["trace_id"], line["task_id"]) == (TRACE, None)
        assert line["tenant"].startswith("tenant-")
    assert (mine[1]["status"], mine[1]["error"]) == ("completed", None)


async def test_a_run_without_a_trace_sends_none(guest: Running, guest_model: FakeModel) -> None:
    await define(guest.client)
    seen = len(guest_model.headers)
    await guest.watch(await start(guest.client))
    guest.client.headers["traceparent"] = "00-wrong"
    await guest.watch(await start(guest.client))
    assert not any("traceparent" in each for each in guest_model.headers[seen:])


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01",
        b"ff-" + TRACE.encode() + b"-00f067aa0ba902b7-01",
        CALLER.upper().encode(),
        CALLER.encode() + b"\n",
        CALLER.encode() + b"-more",
    ],
)
def test_only_a_valid_trace_is_taken(wrong: bytes) -> None:
    assert trace_context.taken([wrong]) is None
    assert trace_context.taken([CALLER.encode()]) == (CALLER, "", False)
    assert trace_context.taken([CALLER.encode()] * 2) is None
