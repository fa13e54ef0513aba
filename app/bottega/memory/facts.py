"""Facts about end users: short sentences that a person sets, or that an agent sets by a tool.

No rule derives a fact from other data. If a run begins with an agent that reads facts, the run's
prompts contain the facts about the run's user, as data in a fenced block. A fact that a run sets
after the run has read outside content is unconfirmed: no model gets the fact before a person
confirms it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

import asyncpg
from pydantic import Field

from bottega.agents.messages import ToolMessage
from bottega.agents.parts import tokens_in
from bottega.agents.query import Query, current_call
from bottega.agents.tools import ToolBase, tool
from bottega.db.pages import PageItems, fetch_rows
from bottega.db.pool import acting_as
from bottega.errors import ConflictError, InvalidInputError, NotFoundError, UserErasingError
from bottega.events.data import ContextRecalledData, context_recalled
from bottega.memory.prompts import RunMemory
from bottega.memory.text.injection import suspicious

FactsMode = Literal["off", "read", "write"]
"""Use of facts by runs that begin with the agent: none, in prompts, or in prompts and by tools."""
FACTS = "facts"
"""Source of a ``context.recalled`` event that has facts."""
MOST_FACTS, LONGEST_FACT = 50, 200
_MOST_TOKENS = 500
_TITLE = "## Facts about the user, which people or earlier tasks have set"
REMEMBER_FACT, FORGET_FACT = "remember_fact", "forget_fact"
FACT_TOOLS = (REMEMBER_FACT, FORGET_FACT)

_READ = """
SELECT id, text FROM user_facts
WHERE tenant_id = $1 AND user_id = $2 AND confirmed ORDER BY id DESC
"""
_PAGE = """
SELECT * FROM user_facts
WHERE tenant_id = $1 AND user_id = $2 AND ($3::uuid IS NULL OR id {than} $3)
ORDER BY id {order} LIMIT $4
"""
_ADD = "SELECT add_user_fact($1, $2, $3, $4, $5, $6, $7)"
_GET = "SELECT * FROM user_facts WHERE tenant_id = $1 AND user_id = $2 AND id = $3"
_CHANGE = """
UPDATE user_facts SET text = $4, kind = 'person', source_run = NULL, confirmed = true
WHERE tenant_id = $1 AND user_id = $2 AND id = $3 RETURNING *
"""
_REMOVE = "DELETE FROM user_facts WHERE tenant_id = $1 AND user_id = $2 AND id = $3 RETURNING id"
_FORGET = """
DELETE FROM user_facts
WHERE tenant_id = $1 AND user_id = $2 AND id = $3 AND (kind <> 'person' OR $4) RETURNING id
"""
_HARMLESS = frozenset(
    ("set_plan", "calculator", "current_time", "ask_user", REMEMBER_FACT, FORGET_FACT)
)
"""Tools whose results contain no words except those of the user or of this service."""


def fact_text(text: str) -> str:
    """Return a fact's text as one line, without spaces around it.

    Raises:
        InvalidInputError: the text is empty or longer than :data:`LONGEST_FACT` characters.
    """
    line = " ".join(text.replace("\x00", " ").split())
    if not 0 < len(line) <= LONGEST_FACT:
        raise InvalidInputError(
            f"a fact is one sentence of 1 to {LONGEST_FACT} characters: shorten it",
            pointer="/text",
        )
    return line


async def page(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    user: str,
    *,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[Any]:
    """Return a page of a user's facts, sorted by age, including unconfirmed facts."""
    of = tenant_id, user, after
    return await fetch_rows(connection, _PAGE, *of, limit=limit, descending=descending)


async def add(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    user: str,
    text: str,
    *,
    run_id: UUID | None = None,
    confirmed: bool = True,
) -> asyncpg.Record:
    """Store a fact, unless the user has a fact with the same text; return the stored fact.

    Args:
        run_id: the run that sets the fact; ``None``: a person sets the fact.

    Raises:
        ConflictError: the user has too many facts (``too_many_facts``).
        UserErasingError: the user's data is being erased.
    """
    kind = "person" if run_id is None else "run"
    result = await connection.fetchval(
        _ADD, tenant_id, user, fact_text(text), kind, run_id, confirmed, MOST_FACTS
    )
    if result is None:
        raise UserErasingError
    if result == UUID(int=0):
        raise ConflictError(
            f"a user has at most {MOST_FACTS} facts: remove a fact first", code="too_many_facts"
        )
    row: asyncpg.Record = await connection.fetchrow(_GET, tenant_id, user, result)
    return row


async def change(
    connection: asyncpg.Connection, tenant_id: UUID, user: str, fact_id: UUID, text: str
) -> asyncpg.Record:
    """Replace the text of a fact; the fact is then confirmed, because a person wrote the text.

    Raises:
        NotFoundError: the user has no such fact.
        ConflictError: a different fact of the user already has this text (``exists``).
    """
    try:
        row = await connection.fetchrow(_CHANGE, tenant_id, user, fact_id, fact_text(text))
    except asyncpg.UniqueViolationError:
        raise ConflictError("the user has another fact with this text", code="exists") from None
    if row is None:
        raise NotFoundError("this user has no such fact")
    changed: asyncpg.Record = row
    return changed


async def remove(connection: asyncpg.Connection, tenant_id: UUID, user: str, fact_id: UUID) -> None:
    """Delete a fact.

    Raises:
        NotFoundError: the user has no such fact.
    """
    if await connection.fetchval(_REMOVE, tenant_id, user, fact_id) is None:
        raise NotFoundError("this user has no such fact")


class UserFacts:
    """The facts about one run's user, for the run's prompts and tools.

    Attributes:
        shown: ids of the facts in the run's prompts, in order; the first fact has the number 1.

    Args:
        user: the integrator's name for the end user.
    """

    def __init__(self, pool: asyncpg.Pool, tenant_id: UUID, user: str, run_id: UUID) -> None:
        self._pool = pool
        self._tenant_id = tenant_id
        self._user = user
        self._run_id = run_id
        self.listed_ids: Sequence[str] = ()

    async def recalled(self) -> ContextRecalledData | None:
        """Return the confirmed facts as data of a ``context.recalled`` event; ``None``: no facts.

        The text has a numbered line for each fact, newest first. If the facts have more than
        :data:`_MOST_TOKENS` tokens, the text omits the oldest facts.
        """
        async with acting_as(self._pool, self._tenant_id) as connection:
            rows = await connection.fetch(_READ, self._tenant_id, self._user)
        lines, tokens_left = [_TITLE], _MOST_TOKENS
        for number, row in enumerate(rows, start=1):
            line = f"{number}. {row['text']}"
            tokens_left -= tokens_in(len(line)) + 1
            if tokens_left < 0:
                break
            lines.append(line)
        ids = [str(row["id"]) for row in rows[: len(lines) - 1]]
        if not ids:
            return None
        data = context_recalled(FACTS, "\n".join(lines))
        data["facts"] = ids
        return data

    async def store(self, text: str, *, confirmed: bool) -> bool:
        """Store a fact of this run, as :func:`add` does; return true if the fact is confirmed."""
        async with acting_as(self._pool, self._tenant_id) as connection:
            who = self._tenant_id, self._user
            fact = await add(connection, *who, text, run_id=self._run_id, confirmed=confirmed)
        return bool(fact["confirmed"])

    async def forget(self, number: int, *, of_people: bool) -> bool:
        """Delete the fact that has this number in the prompts; return false if there is none.

        Args:
            of_people: true: a fact that a person has set may be deleted, too.
        """
        if not 0 < number <= len(self.listed_ids):
            return False
        fact = UUID(self.listed_ids[number - 1])
        async with acting_as(self._pool, self._tenant_id) as connection:
            gone = await connection.fetchval(_FORGET, self._tenant_id, self._user, fact, of_people)
        return gone is not None


def fact_tools(facts: UserFacts) -> Sequence[ToolBase]:
    """Return the tools with which an agent changes the facts about its run's user."""

    def is_trusted() -> bool:
        asking = current_call.get()
        return asking is not None and not _has_read_outside(asking.query)

    @tool(
        REMEMBER_FACT,
        "Stores one lasting fact about the user, such as a preference that the user has told you, "
        "for later conversations. Only what the user has said; one short sentence.",
        idempotent=True,
    )
    async def store_fact(text: Annotated[str, Field(min_length=1, max_length=LONGEST_FACT)]) -> str:
        confirmed = is_trusted() and suspicious(text) is None
        if await facts.store(text, confirmed=confirmed):
            return "Stored."
        return "Stored; a person must confirm it before it is used."

    @tool(
        FORGET_FACT,
        "Deletes a fact about the user. Give its number in the list of facts.",
        idempotent=True,
    )
    async def forget_fact(number: Annotated[int, Field(ge=1)]) -> str:
        if await facts.forget(number, of_people=is_trusted()):
            return "Deleted."
        raise InvalidInputError(f"there is no fact with the number {number} that you may delete")

    return store_fact, forget_fact


def _has_read_outside(query: Query) -> bool:
    """Return true if a query may have read words that neither its user nor its agent wrote.

    These words are in memory of other runs, and in results of tools that are not in _HARMLESS.
    """
    agent = query.agent
    memory = agent.memory
    if isinstance(memory, RunMemory) and memory.working.has_retrieved:
        return True
    return any(
        result.tool_name not in _HARMLESS
        for message in agent.conversation_history
        if isinstance(message, ToolMessage)
        for result in message.tool_results
    )
