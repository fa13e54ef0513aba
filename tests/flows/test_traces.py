"""A caller's trace goes with its run, and the log names it."""

import pytest

from bottega import trace_context
from tests.fake_model import FakeModel
from tests.log_entries import capture_logs
from tests.service import Running
from tests.team import define, start

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
STATE = "rojo=00f067aa0ba902b7,congo@sys=t61rcWkgMzE"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"


async def test_the_trace_of_a_request_goes_on_to_models_and_into_the_log(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest.client)
    guest.client.headers |= {"traceparent": CALLER, "tracestate": STATE}
    seen = len(guest_model.headers)
    with capture_logs() as lines:
        run_id = await start(guest.client)
        await guest.watch(run_id)
    assert {each.get("traceparent") for each in guest_model.headers[seen:]} == {CALLER}
    assert {each.get("tracestate") for each in guest_model.headers[seen:]} == {STATE}
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


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([STATE], STATE),
        (["a=1", " b=2 ,,c=3"], "a=1,b=2,c=3"),
        (["a=1,a=2"], ""),
        (["A=1"], ""),
        (["a"], ""),
        (["a=1\n"], ""),
        (["a=" + "x" * 257], ""),
        ([",".join(f"k{number}=v" for number in range(33))], ""),
        (["x" * 10_000], ""),
        ([f"a={'x' * 200},b=1,c={'y' * 200},d={'z' * 200}"], f"a={'x' * 200},b=1,c={'y' * 200}"),
        (
            [",".join(f"k{number}={'v' * 60}" for number in range(9))],
            ",".join(f"k{number}={'v' * 60}" for number in range(8)),
        ),
    ],
)
def test_a_tracestate_is_bounded_and_a_wrong_one_dropped(given: list[str], kept: str) -> None:
    taken = trace_context.taken([CALLER.encode()], [each.encode() for each in given])
    assert taken == (CALLER, kept, False)
