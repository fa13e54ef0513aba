"""Conversations: a run is a turn, and the run's agents read the messages of earlier turns.

The messages of a turn are read from the log of the turn's run. The row of the turn's run has the
size of the turn, so a run can skip turns that do not fit into a prompt.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json

from bottega.agents import BaseAgent
from bottega.agents.approval import Resolution, as_edited
from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    AssistantResponse,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolMessage,
    ToolResult,
    query_of,
    user_message,
    with_distinct_ids,
    without_calls,
)
from bottega.agents.parts import BYTES_PER_TOKEN, estimated_tokens
from bottega.db.failures import persist
from bottega.db.pool import acting_as
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import End
from bottega.engine.memory import run_facts
from bottega.engine.replay import RunReplay, TaskReplay, ToolCallReplay, replay_run, result_of
from bottega.errors import BottegaError
from bottega.events.data import Failure
from bottega.events.log import event_of
from bottega.events.types import Event, RunStatus
from bottega.graph.publication import as_text, message_lines
from bottega.logger import Logger
from bottega.memory.prompts import RECALL, RunMemory, TurnReader, tokens_of
from bottega.memory.text.summaries import cut, summary_of

logger = Logger(__name__)


def end_of(response: AssistantResponse, answer_seq: int | None) -> End:
    """Return the end of a run, derived from the response of the run's root agent. Pure."""
    if not response.is_answer:
        code = response.error_code or "agent_failed"
        error = Failure(code=code, message=response.error or "")
        return End(
            RunStatus.FAILED,
            output=response.content or None,
            error=error,
            stop_reason=response.stop_reason,
            usage=response.usage,
        )
    return End(
        RunStatus.COMPLETED,
        output=response.content,
        output_json=response.output_json,
        stop_reason=response.stop_reason,
        usage=response.usage,
        answer_seq=answer_seq,
    )


def broken(
    error: Exception, run_id: UUID, usage: AgentUsage, *, timeout_s: float | None = None
) -> End:
    """Return the end of a run that raised an error.

    Args:
        timeout_s: the run's timeout in seconds; ``None``: the timeout has not expired.
    """
    if timeout_s is not None and isinstance(error, TimeoutError):
        detail = f"the run took longer than its timeout_s of {timeout_s:g} s"
        return End(RunStatus.TIMEOUT, error=Failure(code="timeout", message=detail), usage=usage)
    if isinstance(error, BottegaError):
        failure = Failure(code=error.code, message=error.detail)
        return End(RunStatus.FAILED, error=failure, usage=usage)
    logger.error("run.broken", run_id=str(run_id), exc_info=error)
    detail = "an internal error ended the run: see the worker's log for the cause"
    return End(RunStatus.FAILED, error=Failure(code="internal", message=detail), usage=usage)


def said(answer: str | None) -> list[StandardMessage]:
    return [] if answer is None else [AssistantMessage(content=answer)]


def turn_messages(turn: TaskReplay, answer: str | None) -> list[StandardMessage]:
    """Return the messages that follow the question in an agent's turn. Pure.

    The messages are the model's messages with tool calls, the results of these calls, the user's
    messages between the calls, and the final answer. Rejected answers are left out.

    Args:
        answer: the final answer; ``None``: use the model's last message without tool calls.
    """
    drafts = {
        number: with_distinct_ids(call.answer)
        for number, call in turn.calls.items()
        if call.answer is not None
    }
    messages: list[StandardMessage] = []
    for number, message in drafts.items():
        messages += (user_message(each["content"]) for each in turn.delivered[number])
        calls = [turn.tools.get((number, tool_call.id)) for tool_call in message.tool_calls]
        results = [result for call in calls if (result := _turn_result(call)) is not None]
        if calls and len(results) == len(calls):
            messages += [message, *map(ToolMessage.answering, results)]
        elif any(each.get("answered") for each in turn.delivered[number + 1]):
            messages.append(without_calls(message))
    last = next(reversed(drafts.values()), None)
    if last is not None and not last.tool_calls and answer in (None, last.content):
        messages.append(last)
    elif answer is not None:
        messages += said(answer)
    return messages


def _turn_result(call: ToolCallReplay | None) -> ToolResult | None:
    if call is None or call.ended is None:
        return None
    result = result_of(call.ended, call.answer or "")
    decisions = (Resolution(resolution) for _, resolution in call.decisions.values())
    is_edited = any(decision.arguments is not None for decision in decisions)
    return as_edited(result) if is_edited else result


GISTS = 12
"""Number of older turns that a prompt summarises in one line each."""
_GIST_BYTES = 150
_LEAST = 50
"""A smaller turn counts as this number of tokens, so a prompt has a limited number of turns."""
_MOST_EVENTS = 1000  # the logs of longer runs are not read
_SPOKEN = ("final_answer", "hook_stop", "length", "max_iterations")
_TURNS = "SELECT * FROM earlier_turns($1, $2, $3, $4, $5)"
_LINES = r"""
SELECT s.run_id, l.line FROM run_steps s
CROSS JOIN LATERAL string_to_table(s.events, E'\n') WITH ORDINALITY AS l(line, n)
WHERE s.tenant_id = $1 AND s.run_id = ANY ($2) AND l.line ~ $3
ORDER BY s.run_id, s.last_seq, l.n
"""
_TYPES = '^{"type":"(llm.completed|tool.(completed|failed)|message.delivered|interrupt.resolved)"'
_OF_AGENT, _OF_NODES = f'{_TYPES},"agent"', f'{_TYPES},"task_id":"[^"]+","agent"'
"""Patterns for the log lines that have answers of the run's agent (or of a graph's agents), results
of tools, messages of users, or decisions of people.
"""
_ANSWERS = "SELECT * FROM answers_in_logs($1, $2, $3)"


@dataclass(frozen=True, slots=True)
class PastTurns:
    """The newest earlier turns of a conversation that fit into a prompt.

    Attributes:
        number: number of the run's turn, counted from 1.
        first: number of the first turn in the prompt.
        tokens: size of the turns that are in the prompt, in tokens.
        histories: messages of the prompt's turns by agent, sorted from old to new.
        gists: summaries of the turns before turn ``first``, by turn number, sorted from old to new.
        read: returns the text of a turn before turn ``first``; its argument is the turn's number.
    """

    number: int
    first: int
    tokens: int
    histories: Mapping[str, Sequence[StandardMessage]]
    gists: Mapping[int, str]
    read: TurnReader | None = None

    def begin(self, agents: Mapping[str, BaseAgent]) -> None:
        for agent in agents.values():
            agent.conversation_history += self.histories.get(agent.agent_name, ())
            if self.gists and self.read and isinstance(agent.memory, RunMemory):
                agent.memory.go_on(self.opening(), self.first - 1, self.read)

    def opening(self) -> str:
        """Return a summary of the turns that are not in the prompt."""
        turns_left = self.first - 1
        lines = [
            f"## Earlier turns of this conversation: 1 to {turns_left}",
            f'{RECALL}("t{turns_left}") returns turn {turns_left}, and so on.',
        ]
        lines += [f"{number}. {gist}" for number, gist in self.gists.items()]
        return "\n".join(lines)

    def ended(self, end: End, agents: Mapping[str, BaseAgent], run: ClaimedRun) -> End:
        """Return a run's end. The end of a completed run gets the data of the run's turn."""
        if end.status is not RunStatus.COMPLETED:
            return end
        tokens = max(_LEAST, *map(self._own_tokens, agents.values()))
        question = run_facts(run).question
        answer = end.output if isinstance(end.output, str) else as_text(end.output)
        turn = {
            "number": self.number,
            "first": self.first,
            "window": self.tokens + tokens,
            "tokens": tokens,
            "gist": f"{_gist(question)} → {_gist(answer)}",
        }
        return replace(end, turn=turn)

    def _own_tokens(self, agent: BaseAgent) -> int:
        earlier = set(map(id, self.histories.get(agent.agent_name, ())))
        return sum(
            tokens_of(message, estimated_tokens)
            for message in agent.conversation_history
            if id(message) not in earlier and not isinstance(message, SystemMessage)
        )


def _gist(text: str) -> str:
    return cut(" ".join(text[: 4 * _GIST_BYTES].split()), _GIST_BYTES)


async def conversation_of(pool: asyncpg.Pool, run: ClaimedRun, most: int) -> PastTurns:
    """Return the earlier turns of a run's conversation.

    Wait while the database is away.

    Args:
        most: maximum size in tokens of all earlier turns in a prompt.
    """
    if run.base is None:
        return PastTurns(1, 1, 0, {}, {})
    return await persist(lambda: _before(pool, run, most))


async def _before(pool: asyncpg.Pool, run: ClaimedRun, most: int) -> PastTurns:
    rows = await pool.fetch(_TURNS, run.tenant_id, run.base, None, most, GISTS)
    conversation = [row for row in reversed(rows) if not row["is_left"]]
    if not conversation:  # the turns were deleted together with the user's data
        return PastTurns(1, 1, 0, {}, {})
    whole = [row for row in conversation if _is_read(row, most)]
    replays = await _replays(pool, run, [row["run_id"] for row in whole]) if whole else {}
    histories: defaultdict[str, list[StandardMessage]] = defaultdict(list)
    for row in conversation:
        for name, messages in _messages(run, row, replays.get(row["run_id"]), most).items():
            histories[name] += messages
    return PastTurns(
        number=conversation[-1]["number"] + 1,
        first=conversation[0]["number"],
        tokens=sum(row["tokens"] for row in conversation),
        histories=histories,
        gists={row["number"]: row["gist"] for row in reversed(rows) if row["is_left"]},
        read=partial(_text_of_turn, pool, run, most),
    )


async def _text_of_turn(pool: asyncpg.Pool, run: ClaimedRun, most: int, number: int) -> str | None:
    """Return the text of turn ``number``, cut to ``most`` / 2 tokens; ``None``: no such turn."""
    # With these limits (0 tokens, 1 gist), the first row is turn ``number``, which is not cut.
    row = await persist(lambda: pool.fetchrow(_TURNS, run.tenant_id, run.base, number, 0, 1))
    if row is None or row["number"] != number:
        return None
    run_id = row["run_id"]
    whole = [run_id] if _is_read(row, most) else []
    replays = await persist(lambda: _replays(pool, run, whole)) if whole else {}
    messages = _messages(run, row, replays.get(run_id), most)
    own_messages = (each for own in messages.values() for each in own)
    return cut("\n".join(message_lines(own_messages)), most // 2 * BYTES_PER_TOKEN)


def _is_read(row: Mapping[str, Any], most: int) -> bool:
    return bool(row["tokens"] <= most // 2 and row["events"] <= _MOST_EVENTS)


async def _replays(
    pool: asyncpg.Pool, run: ClaimedRun, runs: Sequence[UUID]
) -> dict[UUID, RunReplay]:
    """Replay the logs of runs, with the texts of answers. Return the replays by run."""
    events: dict[UUID, list[Event]] = {run_id: [] for run_id in runs}
    asked: list[tuple[UUID, int]] = []
    texts: dict[UUID, dict[int, str | None]] = {run_id: {} for run_id in runs}
    pattern = _OF_NODES if run.mode == "dag" else _OF_AGENT
    async with acting_as(pool, run.tenant_id) as connection:
        lines = await connection.fetch(_LINES, run.tenant_id, runs, pattern)
        for number, row in enumerate(lines):
            run_id = row["run_id"]
            # The query returns no seq. Each event gets a negative seq, which no ``answer_seq`` has.
            event = event_of(run_id, -1 - number, run.started_at, row["line"])
            events[run_id].append(event)
            if (seq := event.data.get("answer_seq")) is not None:
                asked.append((run_id, seq))
        if asked:
            keys = [run_id for run_id, _ in asked], [seq for _, seq in asked]
            for row in await connection.fetch(_ANSWERS, run.tenant_id, *keys):
                texts[row["run_id"]][row["seq"]] = row["output"]
    return {run_id: replay_run(events[run_id], texts=texts[run_id]) for run_id in runs}


def _messages(
    run: ClaimedRun, row: Mapping[str, Any], turn: RunReplay | None, most: int
) -> dict[str, list[StandardMessage]]:
    """Return a turn's messages by agent; if ``turn`` is ``None``, only question and answer."""
    query = query_of(from_json(row["asked"]))
    question = [HumanMessage(content=query)] if isinstance(query, str) else query
    answer = from_json(row["answer"]) if row["answer"] else None
    if run.mode != "dag":
        assert run.agent is not None
        final = answer if isinstance(answer, str) and row["ending"] in _SPOKEN else None
        if turn is None:
            return {run.agent: _shortened([*question, *said(final)], most)}
        return {run.agent: [*question, *turn_messages(turn.task(None), final)]}
    nodes = {} if turn is None else turn.tasks
    return {node.agent or "": [*question, *turn_messages(node, None)] for node in nodes.values()}


def _shortened(messages: Iterable[StandardMessage], most: int) -> list[StandardMessage]:
    return [
        type(message)(content=summary_of(message.content, most // 4, estimated_tokens))
        for message in messages
    ]
