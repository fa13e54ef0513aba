"""Routes of agents."""

import contextlib
from typing import Any

from bottega.api.schemas.agents import Agent, AgentContent, AgentSummary, NewAgent
from bottega.api.shared.definitions import Caller, definition_router
from bottega.api.shared.schemas import check_schema
from bottega.api.shared.secret_hosts import Sending, refuse_foreign
from bottega.definitions.agents import refuse_circle
from bottega.definitions.models import listed, named_by
from bottega.definitions.providers import known_providers, possible_names
from bottega.definitions.store import AGENTS
from bottega.errors import InvalidInputError
from bottega.runs.parameters import Dialects, dialects_of, refuse_unsupported
from bottega.tools.http import HttpToolDefinition


async def _prepare(caller: Caller, name: str, body: AgentContent) -> dict[str, Any]:
    patterns = {
        f"/tools/{index}": {f"/tools/{index}{at}": text for at, text in tool.patterns.items()}
        for index, tool in enumerate(body.tools)
        if isinstance(tool, HttpToolDefinition)
    }
    sent = [
        Sending(f"/tools/{index}/headers/{header}", secret, tool.origin)
        for index, tool in enumerate(body.tools)
        if isinstance(tool, HttpToolDefinition)
        for header, secret in tool.secrets.items()
    ]
    await refuse_foreign(caller, sent)
    await check_schema(body.output_schema, "/output_schema", patterns)
    if body.params is not None:
        dialects = await _dialects(caller, body.model)
        refuse_unsupported(body.params.model_dump(), dialects, "/params", whose=name)
    children = [] if body.subagents is None else body.subagents.names
    await refuse_circle(caller.tx, caller.tenant, name, children)
    return body.model_dump(exclude={"name"})


async def _dialects(caller: Caller, model: str | list[str] | None) -> Dialects:
    """Return the dialects of an agent's models, as far as their providers exist by now."""
    known = dict(caller.service.settings.operator_providers)
    known |= await known_providers(caller.tx, caller.tenant, possible_names(model))
    found = []
    for reference in listed(model):
        with contextlib.suppress(InvalidInputError):
            provider = known[named_by(reference, known).provider]
            found.append((provider.dialect, provider.headers))
    return dialects_of(found)


router = definition_router(
    AGENTS, new=NewAgent, content=AgentContent, output=Agent, summary=AgentSummary, prepare=_prepare
)
