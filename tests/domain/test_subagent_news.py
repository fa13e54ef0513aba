"""Reports on tasks to their parents: each text once, and files of its own tasks only."""

from typing import Any

from bottega.agents import BaseAgent
from tests.domain.scripted import call
from tests.domain.subagents import (
    Model,
    after,
    await_all,
    coordinator,
    dispatch,
    ids,
    poll_all,
    registry,
    results,
)
from tests.domain.test_subagent_tools import Streaming
from tests.domain.virtual import run_virtual

LONG = "0123456789" * 4_000


def test_polls_send_new_text_and_what_was_awaited_is_not_sent_again() -> None:
    async def run() -> None:
        model = Streaming(
            go=[
                dispatch("talks"), after(2.5, poll_all), after(1, poll_all), poll_all,
                await_all, poll_all, "end",
            ],
            talks=["one two three four"],
        )  # fmt: skip
        async with registry() as where:
            lead = coordinator(model, where)
            await lead.execute_query_async("go")
            reports = [each["tasks"][0] for each in results(lead.conversation_history)[1:]]
        first, second, third, awaited, last = reports
        assert [each.get("partial_output") for each in (first, second, third)] == [
            "one two ", "three ", None,
        ]  # fmt: skip
        assert awaited["final_output"] == "one two three four"
        assert "partial_output" not in awaited
        assert last["sent_before"]
        assert not {"final_output", "partial_output"} & last.keys()

    run_virtual(run())


def nested(model: Model, where: Any, **about: Any) -> BaseAgent:
    """Build a coordinator above another one."""
    middle = coordinator(model, where, description="nests")
    middle.agent_name = "middle"
    return coordinator(model, where, middle, **about)


def test_a_grandparent_reads_the_ends_of_a_long_answer_and_gets_no_file() -> None:
    async def run() -> None:
        below: list[str] = []

        def awaits(messages: Any) -> Any:
            below.extend(ids(messages))
            return await_all(messages)

        def file(messages: Any) -> Any:
            path = f"/subagent/{below[0]}/final_output.md"
            return [call("poll_subagent", task_ids=below), call("read_file", path=path)]

        model = Model(
            go=[dispatch("mid", agent="middle"), after(5, file), "end"],
            mid=[dispatch("low"), awaits, after(9, "done")],
            low=[LONG],
        )
        async with registry() as where:
            lead = nested(model, where)
            await lead.execute_query_async("go")
            _, polled, read = results(lead.conversation_history)
        shown = polled["tasks"][0]["final_output"]
        assert (shown["head"], shown["tail"]) == (LONG[:4096], LONG[-4096:])
        assert "file" not in shown
        assert "there is no file" in read

    run_virtual(run())


def test_a_task_writes_to_the_input_of_its_own_task_later() -> None:
    async def run() -> None:
        def writes(messages: Any) -> Any:
            path = f"/subagent/{ids(messages)[0]}/input/late.md"
            return call("write_file", path=path, content="known now")

        def reads(messages: Any) -> Any:
            folder = messages[1].content.split("Your own folder is ")[1].split("/ ")[0]
            return call("read_file", path=f"{folder}/input/late.md")

        model = Model(
            go=[dispatch("mid", agent="middle"), await_all, "end"],
            mid=[dispatch("low"), writes, await_all,
                 lambda m: results(m)[-1]["tasks"][0]["final_output"]],
            low=[after(3, reads), lambda m: results(m)[-1]["content"]],
        )  # fmt: skip
        async with registry() as where:
            lead = nested(model, where)
            await lead.execute_query_async("go")
            awaited = results(lead.conversation_history)[-1]
        assert awaited["tasks"][0]["final_output"] == "known now"

    run_virtual(run())
