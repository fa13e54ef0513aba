"""Routes of lessons."""

from datetime import datetime
from typing import Annotated, Any, Self
from uuid import UUID

import asyncpg
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.auth import Principal, acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Body, Page
from bottega.api.schemas.episodes import Label
from bottega.api.schemas.runs import SessionName
from bottega.api.shared.deps import Actor, PrincipalDep, Tenant, Transaction
from bottega.api.shared.pages import LINK, OwnerNamed, PageQuery, QueriedUser, storable
from bottega.memory.learning import lessons
from bottega.tenants import audit

router = APIRouter(prefix="/v1/lessons", tags=["memory"])

LessonId = Annotated[UUID, Path(description="The lesson's id.")]
Known = Annotated[Label, AfterValidator(storable)]


class LessonSource(Answer):
    """The source of a lesson."""

    run_id: UUID | None
    """The run from which the lesson was learned; null: the lesson is from an imported episode."""
    episode_id: UUID
    by: str
    """Author: `rules`, a model, `check`, `judge`, `feedback`, `approval` (a person denied or edited
    a tool call), or the caller that edited the text."""


class LessonItem(Answer):
    """A sentence that later runs of a user or a session get."""

    id: UUID
    text: str
    state: lessons.LessonState
    """`removed`: no run gets it."""
    pinned: bool
    """True if runs get the lesson whatever their task is."""
    for_all: bool
    """True if all runs that begin with the lesson's agent get the lesson, also runs of other users
    and runs without a user."""
    user: str | None
    """End user of the run; null: the run has no user."""
    session_id: str | None
    agent: str | None
    """Agent with which the run began; null: unknown."""
    source: LessonSource
    created_at: datetime


class LessonChanges(Body):
    """Changes of a lesson; a field that is absent does not change."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"text": "Every answer names the VAT.", "pinned": True}],
        }
    )

    text: Annotated[str, StringConstraints(min_length=1, max_length=2000)] | None = None
    """The sentence that runs get, on one line."""
    for_all: bool | None = None
    """True: all runs that begin with the lesson's agent get the lesson, also runs of other users.
    This change needs the scope `define`, as does a new text for such a lesson."""
    pinned: bool | None = None
    """True: runs get the lesson whatever their task is. A user has at most 10 pinned lessons."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.text is None and self.pinned is None and self.for_all is None:
            raise PydanticCustomError("missing", "send `text`, `pinned` or `for_all`")
        if self.text is not None and not self.text.strip():
            raise PydanticCustomError("blank", "the text has no visible character")
        return self


class LessonQuery(PageQuery):
    user: QueriedUser = None
    session_id: SessionName | None = None
    agent: Annotated[
        Known | None, Field(description="Only lessons of runs that began with this agent.")
    ] = None
    state: lessons.LessonState | None = None


def _to_response(row: lessons.Lesson) -> dict[str, Any]:
    return {**row, "source": {name: row[name] for name in ("run_id", "episode_id", "by")}}


@router.get(
    "",
    operation_id="list_lessons",
    summary="List lessons by age",
    description=(
        "Lessons are cures that rules found in a finished run, insights that a model found in the "
        "run, and reasons of the run's judgements. Without `user` and `session_id`: lessons "
        "without user and session, and lessons for all runs of their agent."
    ),
    response_model=Page[LessonItem],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    query: Annotated[LessonQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    filters = query.model_dump(include={"session_id", "agent", "state"})
    filters["user_id"] = acts_for(principal, query.user, None).user
    rows = await lessons.page(tx.driver, tenant, filters, **query.window(UUID))
    items = type(rows)(map(_to_response, rows), more=rows.more)
    return query.page(request, response, items, lambda item: item["id"])


@router.get(
    "/{lesson_id}",
    operation_id="get_lesson",
    summary="Read a lesson",
    description="A removed lesson can be read, too; no run gets it.",
    response_model=LessonItem,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: Tenant, lesson_id: LessonId) -> Any:
    return _to_response(await lessons.get(tx.driver, tenant, lesson_id))


async def _owned(
    driver: asyncpg.Connection, principal: Principal, lesson_id: UUID, user: str | None
) -> lessons.Lesson:
    """Return a lesson, and lock its row.

    Raises:
        ConflictError: ``session_user``: the lesson belongs to another user.
    """
    acting = acts_for(principal, user, None)
    lesson = await lessons.get(driver, acting.tenant_id, lesson_id, lock=True)
    acting.refuse_other(lesson["user"], f"lesson {lesson_id}")
    return lesson


@router.patch(
    "/{lesson_id}",
    operation_id="change_lesson",
    summary="Edit or pin a lesson",
    description=(
        "Runs get the new text from now on. 409 `removed`: the lesson is removed; "
        "`too_many_pinned`: 10 lessons of its user, or of its session without a user, are pinned."
    ),
    response_model=LessonItem,
    responses=problems(400, 404, 409, 413, 415),
)
async def change(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    lesson_id: LessonId,
    body: LessonChanges,
    user: OwnerNamed = None,
) -> Any:
    driver = tx.driver
    lesson = await _owned(driver, principal, lesson_id, user)
    if body.for_all is not None or (lesson["for_all"] and body.text is not None):
        principal.need("define")
    changed = await lessons.change(driver, tenant, lesson_id, actor, **body.model_dump())
    details = {"fields": sorted(body.model_dump(exclude_none=True))}
    await audit.note(tx, tenant, actor, "lesson.change", str(lesson_id), details)
    return _to_response(changed)


@router.delete(
    "/{lesson_id}",
    operation_id="delete_lesson",
    summary="Remove a lesson",
    description="No run gets it any more. It stays in the list, with the state `removed`.",
    status_code=204,
    responses=problems(404, 409),
)
async def delete(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    lesson_id: LessonId,
    user: OwnerNamed = None,
) -> None:
    driver = tx.driver
    await _owned(driver, principal, lesson_id, user)
    if await lessons.remove(driver, tenant, lesson_id):
        await audit.note(tx, tenant, actor, "lesson.delete", str(lesson_id))
