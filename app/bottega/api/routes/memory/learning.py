"""Routes that find memory for a task, and that learn from episodes."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Response

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problems
from bottega.api.routes.memory.episodes import to_response, within
from bottega.api.routes.memory.imports import imported
from bottega.api.schemas.memory.found import ContextFound, ContextQuery, Learnt, NewLearning
from bottega.api.shared.deps import PrincipalDep, ReadTenant, ServiceDep, Tenant, Turn
from bottega.api.shared.idempotency import OnceDep
from bottega.db.driver import driver_of
from bottega.memory.episodes import rows
from bottega.memory.episodes.episode import Episode
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.learning.context import (
    Lesson,
    ReportedOutcome,
    context_for_task,
    learn_from_episode,
)
from bottega.memory.learning.insights import FoundInsight
from bottega.memory.patterns.matcher import Match
from bottega.memory.patterns.pattern import Category, Pattern
from bottega.memory.text.signature import failure_signature
from bottega.runs.sessions import hold_owner
from bottega.tenants import audit

router = APIRouter(prefix="/v1/memory", tags=["memory"])


def _known(pattern: Pattern) -> dict[str, Any]:
    """Return the parts of a pattern that are needed to apply it."""
    evidence = pattern.evidence
    same = ("id", "version", "name", "category", "state", "trust", "summary")
    return {name: getattr(pattern, name) for name in same} | {
        "uses": pattern.content.uses,
        "confidence": evidence.confidence,
        "success_rate": evidence.success_rate,
        "applications": evidence.applications,
    }


def _matched(found: Sequence[Match]) -> list[dict[str, Any]]:
    return [
        {"pattern": _known(each.pattern), "score": each.score, "quality": each.quality}
        for each in found
    ]


@router.post(
    "/context",
    operation_id="find_context",
    summary="Find memory for a task",
    description=(
        "Patterns that apply, similar episodes, and knowledge of the task's domain. There is no "
        "experiment here: candidates are left out, and no validated pattern is withheld."
    ),
    response_model=ContextFound,
    responses=problems(400, 413, 415),
    dependencies=[Turn],
)
async def context(
    service: ServiceDep, principal: PrincipalDep, tenant: ReadTenant, body: ContextQuery
) -> Any:
    known: dict[str, Any] = {
        name: value
        for name in ("complexity", "tools_required")
        if (value := getattr(body, name)) is not None
    }
    signature = None
    if (error := body.error) is not None:
        signature = failure_signature(error.type, error.message, error.tool)
        known |= {"error_type": error.type} | ({"tool": error.tool} if error.tool else {})
    found = await context_for_task(
        service.memory,
        service.patterns,
        tenant,
        within(principal, body.user, body.session_id, body.scope),
        body.task,
        domain=body.domain,
        task_type=body.task_type,
        capabilities=body.capabilities,
        known=known,
        failure_signature=signature,
        k=body.k,
    )
    goals = found.goals
    return {
        "goals": goals.goals,
        "constraints": goals.constraints,
        "criteria": goals.criteria,
        "features": found.features,
        "patterns": _matched(found.patterns),
        "episodes": [
            {"episode": to_response(hit.episode), "score": hit.score, "why": hit.why}
            for hit in found.episodes.hits
            if hit.relevant
        ],
        "by_meaning": found.episodes.by_meaning,
        "by_spelling": found.episodes.by_spelling,
        "knowledge": {
            "patterns": _matched(found.knowledge),
            "insights": [_insight(each) for each in found.insights],
        },
    }


def _insight(found: FoundInsight) -> dict[str, Any]:
    """Return an insight, and the episodes found that have it."""
    episodes = found.episodes
    return {
        "text": found.text,
        "times": len(episodes),
        "trust": max(each.trust for each in episodes),
        "episodes": [each.id for each in episodes],
        "at": max(each.at for each in episodes),
    }


@router.post(
    "/learn",
    operation_id="learn_from_episode",
    summary="Learn from an episode",
    description=(
        "From a stored episode, or from one of another system, which is stored too. Its insights "
        "become candidates of the lowest trust, which runs get on trial. If the episode names a "
        "user or a session, its insights stay with it, since runs of all users share patterns. "
        "A repetition changes nothing, except that an `episode` in the body is stored again."
    ),
    response_model=Learnt,
    responses={
        **problems(400, 404, 409, 413, 415),
        200: headers(Location="Path of the episode."),
    },
)
async def learn(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    body: NewLearning,
    response: Response,
) -> Any:
    actor, episode = principal.actor, None
    if (new := body.episode) is None:
        acting = acts_for(principal, body.user)
    else:
        acting = acts_for(principal, new.user, "/episode/user")
        now = service.memory.clock()
        episode = imported(new, principal=actor, now=now, pointer="/episode/at")
    lessons = [
        Lesson(each.text, each.name, Category(each.category), tuple(each.uses))
        for each in body.insights
    ]
    outcomes = [ReportedOutcome(**each.model_dump()) for each in body.outcomes]
    async with service.database.begin(tenant) as tx:
        driver = await driver_of(tx)
        if (stored := body.episode_id) is not None:
            for each in (await rows.load(driver, EVERYTHING, [stored])).values():
                acting.refuse_other(each.user_id, f"episode {stored}")

        async def create() -> dict[str, Any]:
            known: Episode | UUID | None = body.episode_id
            if episode is not None:
                await hold_owner(tx, tenant, episode.session_id, episode.user_id)
                known = episode
            assert known is not None, "the body has one of them"
            learned = await learn_from_episode(
                service.memory,
                service.patterns,
                driver,
                tenant,
                known,
                lessons,
                outcomes,
                principal=actor,
            )
            response.headers["Location"] = f"/v1/episodes/{learned.episode_id}"
            details = {
                "candidates": [str(each.key) for each in learned.candidates],
                "outcomes": {str(each.pattern_id): each.good for each in outcomes},
            }
            where = str(learned.episode_id)
            await audit.note(tx, tenant, actor, "memory.learn", where, details)
            return {
                "episode_id": learned.episode_id,
                "reflection": learned.reflection,
                "candidates": [_known(each) for each in learned.candidates],
                "applications": learned.applications,
            }

        return await once(tx, response, Learnt, create)
