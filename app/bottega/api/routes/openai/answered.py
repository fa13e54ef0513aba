"""Runs that wait for results of a client of OpenAI's API."""

from collections.abc import Mapping
from uuid import UUID

from bottega.api.auth import Principal
from bottega.api.routes.openai.requests import graph_of
from bottega.api.schemas.interrupts import NewDecision
from bottega.api.shared.decisions import decide
from bottega.api.shared.followed import FollowedRun
from bottega.container import Service
from bottega.runs import interrupts


async def answered(
    service: Service,
    principal: Principal,
    model: str,
    user: str | None,
    answers: Mapping[UUID, str],
) -> FollowedRun | None:
    """Give a waiting run the answers to its calls; ``None``: they are not of one of the caller's.

    A run is the caller's if it was started with the same key, agent and user.
    """
    tenant = principal.tenant_id
    graph = graph_of(model)
    own = (None if graph else model, graph, principal.actor, user)
    async with service.database.begin(tenant) as tx:
        found = await interrupts.of_client(tx, tenant, list(answers))
        runs = {each["run_id"] for each in found}
        of_caller = all(
            (each["agent"], each["graph"], each["principal"], each["user_id"]) == own
            for each in found
        )
        if len(found) < len(answers) or len(runs) != 1 or not of_caller:
            return None
        for interrupt, text in answers.items():
            await decide(tx, principal, interrupt, NewDecision(result=text))
    return FollowedRun(service, principal, found[0]["run_id"], found[0]["last_seq"])
