"""Progress of MCP tools' calls, from a worker's table to the subscribers of a run."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

from pydantic_core import from_json

from bottega.clock import monotonic
from bottega.db.pool import Database
from bottega.engine.journal import Journal
from bottega.engine.live_text import LiveText, TextTable
from bottega.engine.mcp import LONGEST_MESSAGE, CallProgress
from bottega.events.frames import Filter, Frame
from bottega.events.log import StepWriter
from bottega.events.stream import Subscriber
from bottega.services import background
from bottega.settings import Settings
from tests.claims import claim_of
from tests.growing import growing
from tests.service import running
from tests.stores.test_run_streams import streaming
from tests.waiting import until


def call_of(database: Database, run_id: UUID, **fields: Any) -> CallProgress:
    run = claim_of(run_id, last_seq=5)
    journal = Journal(StepWriter(database.pool), run, wake=lambda run_id: None)
    known: dict[str, Any] = {
        "tool_call_id": "c",
        "name": "s__crawl",
        "clean": str,
        "started": monotonic(),
    }
    return CallProgress(journal, None, None, "a", 1, **(known | fields))


async def test_a_chatty_server_leaves_few_reports(database: Database) -> None:
    call = call_of(database, uuid4(), clean=lambda text: text.replace("secret", "…"))
    assert call.take(0.0) is None
    for number in range(100_000):
        call.report(number, None, "x" * 2000)
    call.report(float("nan"), None, None)
    taken = call.take(monotonic())
    assert taken is not None
    assert from_json(taken[1])["progress"] == 99_999
    assert len(from_json(taken[1])["message"]) == LONGEST_MESSAGE
    call.report(1, float("inf"), "a secret \x00")
    assert call.take(monotonic()) is None  # too soon
    again = call.take(monotonic() + 1)
    assert again is not None
    said = from_json(again[1])
    assert said | {"total": None, "name": "s__crawl", "tool_call_id": "c"} == said
    assert "secret" not in said["message"]


async def test_subscribers_see_the_newest_progress_of_open_calls(
    settings: Settings, database_url: str
) -> None:
    def started(call_id: str, name: str) -> dict[str, Any]:
        data = {"call": 1, "tool_call_id": call_id, "name": name, "arguments": {}}
        return {"type": "tool.started", "data": data}

    async with (
        running(settings, database_url) as server,
        growing(server) as run,
        streaming(run.database) as streams,
    ):
        await run.append(started("c", "s__crawl"), started("over", "s__crawl"))
        ended = {"call": 1, "tool_call_id": "over", "name": "s__crawl", "status": "success"}
        await run.append({"type": "tool.completed", "data": ended})
        live = LiveText(TextTable(run.database.pool, run.notifier.wrote), keep_s=0)
        call = call_of(run.database, run.run_id)
        over = call_of(run.database, run.run_id, tool_call_id="over")
        cursor = await streams.cursor_of(call.journal.tenant_id, run.run_id)
        seen: dict[int, list[Frame]] = {0: [], run.seq: []}
        async with background(live.run):
            with streams.watching(cursor, 0) as early, streams.watching(cursor, run.seq) as late:
                following = [
                    asyncio.ensure_future(follow(Subscriber(tail, after, Filter()), seen[after]))
                    for tail, after in ((early, 0), (late, run.seq))
                ]
                for each in (call, over):
                    live.begin(each)
                    each.report(1, 4, "one")
                await until(lambda: all(progress(frames) for frames in seen.values()))
                for number in (2, 3, 4):
                    call.report(number, 4, None)
                newest = lambda: [progress(frames)[-1]["progress"] for frames in seen.values()]  # noqa: E731
                await until(newest, lambda found: found == [4, 4])
                for each in (call, over):
                    live.end(each)
                for task in following:
                    task.cancel()
        for frames in seen.values():
            found = progress(frames)
            assert found[0] == {
                "tool_call_id": "c", "name": "s__crawl",
                "progress": 1, "total": 4, "message": "one",
            }  # fmt: skip
            assert [each["progress"] for each in found] == [1, 4]


async def follow(subscriber: Subscriber, into: list[Frame]) -> None:
    while (frames := await subscriber.next()) is not None:
        into += frames


def progress(frames: list[Frame]) -> list[dict[str, Any]]:
    return [from_json(each.body)["data"] for each in frames if each.type == "tool.progress"]
