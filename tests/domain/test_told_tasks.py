"""Prompts of runs: they show of a task what somebody said, or nothing."""

from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from bottega.agents import BaseAgent, HumanMessage, StandardMessage
from bottega.agents.messages import (
    DEMAND_TITLES,
    demands_message,
    query_messages,
    query_of,
    split_turns,
    with_demands,
)
from bottega.engine.memory import use_memory
from bottega.engine.recorder import JournalRecorder
from bottega.engine.replay import RunReplay
from tests.claims import claim_of
from tests.domain.asked import LANGUAGES, TASKS
from tests.domain.scripted import ScriptedModel

SYSTEM = "You are one."


async def prompt(asked: Any, **demands: list[str]) -> list[StandardMessage]:
    """Return the first prompt of a run with full memory, as its agent composes it."""
    run = claim_of(UUID(int=1), input=asked, demands=demands)
    model = ScriptedModel("done")
    agent = BaseAgent(SYSTEM, model)
    journal = SimpleNamespace(replay=RunReplay(), episode=None, observers=[])
    recorder = cast(JournalRecorder, SimpleNamespace(journal=journal, lessons=None))
    await use_memory(agent, run, recorder, None, limit=20_000)
    said = with_demands(query_messages(query_of(run.input)), demands_message(run.demands))
    await agent.execute_query_async(said)
    return model.requests[0]


def test_there_are_two_hundred_tasks_in_six_languages() -> None:
    assert len({task for _, task in TASKS}) >= 200
    assert len(LANGUAGES) == 6


@pytest.mark.parametrize("language", LANGUAGES)
async def test_nothing_but_its_words_is_told_of_a_task(language: str) -> None:
    for _, task in (each for each in TASKS if each[0] == language):
        system, question = await prompt(task)
        assert system.content == SYSTEM
        assert isinstance(question, HumanMessage)
        assert question.content == task


@pytest.mark.parametrize("language", LANGUAGES)
async def test_what_somebody_says_is_told_word_for_word(language: str) -> None:
    tasks = [task for each, task in TASKS if each == language]
    for number, task in enumerate(tasks):
        said = {name: [other[:500] for other in tasks[number::7]][:10] for name in DEMAND_TITLES}
        system, demands, question = await prompt(task, **said)
        assert (system.content, question.content) == (SYSTEM, task)
        assert demands.content == "\n\n".join(
            "\n".join([DEMAND_TITLES[name], *(f"- {text}" for text in texts)])
            for name, texts in said.items()
        )


async def test_demands_come_with_the_question_of_several_turns() -> None:
    turns = [("user", "one"), ("assistant", "two"), ("user", "three")]
    asked = [{"role": role, "content": text} for role, text in turns]
    demands = demands_message({"goals": [str(uuid4())]})
    given, question = split_turns(with_demands(query_messages(query_of(asked)), demands))
    assert [each.content for each in given] == ["one", "two"]
    assert [each.role for each in question] == ["system", "user"]
