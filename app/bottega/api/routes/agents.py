"""Routes of agents."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal
from uuid import UUID

from fastapi import Response
from pydantic import ConfigDict

from bottega.api.errors import headers, problems
from bottega.api.routes.providers import known_providers, possible_names
from bottega.api.schemas.agents import (
    Agent,
    AgentContent,
    AgentSummary,
    AnyCheck,
    EqualsCheck,
    NewAgent,
    PythonCheck,
    SchemaCheck,
)
from bottega.api.schemas.base import Body, RunInput
from bottega.api.schemas.runs import NewRun, Run
from bottega.api.shared.definitions import (
    Caller,
    DefinitionName,
    DefinitionRoutes,
    Sending,
    refuse_foreign,
)
from bottega.api.shared.deps import DefineTenant, PrincipalDep, ServiceDep
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.new_runs import start_run
from bottega.api.shared.schemas import check_schemas
from bottega.container import Service
from bottega.definitions import store
from bottega.definitions.agents import listed, named_by, refuse_circle, refuse_stateful
from bottega.definitions.store import AGENTS
from bottega.engine.plugins import installed
from bottega.errors import InvalidInputError
from bottega.runs.pins import Dialects, dialects_of, refuse_unsupported
from bottega.tools.http import HttpToolDefinition


def sent_secrets(body: AgentContent) -> list[Sending]:
    """Return the secrets that an agent's tools send to servers."""
    return [
        Sending(f"/tools/{index}/headers/{header}", secret, tool.origin)
        for index, tool in enumerate(body.tools)
        if isinstance(tool, HttpToolDefinition)
        for header, secret in tool.secrets.items()
    ]


async def prepare(caller: Caller, name: str, body: AgentContent) -> dict[str, Any]:
    """Check an agent's definition from a request, and return the content to store."""
    await refuse_foreign(caller, sent_secrets(body))
    refuse_unknown_plugins(body.success_check)
    if body.params is not None:
        dialects = await _dialects(caller, body.model)
        refuse_unsupported(body.params.model_dump(), dialects, "/params", whose=name)
    _refuse_high_limits(caller.service, body)
    children = [] if body.subagents is None else body.subagents.names
    agents_below = await refuse_circle(caller.tx, caller.tenant, name, children)
    if body.subagents is not None and body.subagents.mode == "async":
        refuse_stateful(name, children, agents_below)
    return body.model_dump(exclude={"name"})


async def check_patterns_of(_: Service, tenant: UUID, body: AgentContent) -> None:
    """Check an agent's schemas, and the regular expressions of its tools."""
    patterns = {
        f"/tools/{index}": {f"/tools/{index}{at}": text for at, text in tool.patterns.items()}
        for index, tool in enumerate(body.tools)
        if isinstance(tool, HttpToolDefinition)
    }
    await check_schemas(tenant, _schemas(body), patterns)


def _schemas(body: AgentContent) -> dict[str, Mapping[str, Any]]:
    of_agent = {"/output_schema": body.output_schema, "/input_schema": body.input_schema}
    found: dict[str, Mapping[str, Any]] = {
        place: schema for place, schema in of_agent.items() if schema is not None
    }
    return found | schemas_of(body.success_check)


def schemas_of(
    checks: Iterable[AnyCheck], pointer: str = "/success_check"
) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of checks by JSON Pointer. ``pointer``: JSON Pointer to the checks."""
    found: dict[str, Mapping[str, Any]] = {}
    for number, check in enumerate(checks):
        if isinstance(check, SchemaCheck):
            found[f"{pointer}/{number}/schema"] = check.schema_
        elif isinstance(check, EqualsCheck) and not isinstance(check.value, str):
            found[f"{pointer}/{number}/value"] = {"const": check.value}
    return found


def _refuse_high_limits(service: Service, body: AgentContent) -> None:
    if body.subagents is None or body.subagents.limits is None:
        return
    limits = body.subagents.limits.model_dump()
    for name, most in service.settings.subagent_limits.above(limits):
        raise InvalidInputError(
            f"{name} is {limits[name]:.15g}, but the operator's limit is {most:.15g}: send at "
            "most this value, or leave the field out",
            code="limit_above_operator",
            pointer=f"/subagents/limits/{name}",
        )


def _with_limits(service: Service, content: Mapping[str, Any]) -> dict[str, Any]:
    return {"effective_limits": service.settings.subagent_limits.of_agent(content["subagents"])}


def refuse_unknown_plugins(checks: Iterable[AnyCheck], pointer: str = "/success_check") -> None:
    """Check that the plugins of checks are installed.

    Args:
        pointer: JSON Pointer to the checks.

    Raises:
        InvalidInputError: ``unknown_plugin``.
    """
    for number, check in enumerate(checks):
        if isinstance(check, PythonCheck) and check.name not in installed():
            raise InvalidInputError(
                f"the plugin '{check.name}' is not installed: install it for the service's Python",
                code="unknown_plugin",
                pointer=f"{pointer}/{number}/name",
            )


async def _dialects(caller: Caller, model: str | list[str] | None) -> Dialects:
    if model is None:
        model = await store.default_model(caller.tx, caller.tenant)
    providers = dict(caller.service.settings.operator_providers)
    providers |= await known_providers(caller.tx, caller.tenant, possible_names(model))
    problems = []
    for reference in listed(model):
        with contextlib.suppress(InvalidInputError):
            provider = providers[named_by(reference, providers).provider]
            problems.append((provider.dialect, provider.headers))
    return dialects_of(problems)


router = DefinitionRoutes(
    kind=AGENTS,
    new=NewAgent,
    content=AgentContent,
    output=Agent,
    summary=AgentSummary,
    prepare=prepare,
    check=check_patterns_of,
    more_fields=_with_limits,
).router()


class NewDraftRun(Body):
    """A run of a definition that is not stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "definition": {"system_message": "You are a clerk. Be brief."},
                    "input": "Where is my parcel?",
                    "model": "demo",
                }
            ]
        }
    )

    definition: AgentContent
    """The agent to try; its name is in the path."""
    input: RunInput
    """The question, or the messages of a conversation, as for a run."""
    model: Literal["demo", "real"] = "demo"
    """`demo`: the demo model answers for all agents. The run asks for no approvals, reads no
    memory, and calls no tools that have effects. `real`: a normal run, which reads memory."""


@router.post(
    "/{name}/draft-runs",
    operation_id="create_draft_run",
    summary="Try a definition of an agent without storing it",
    description=(
        "Starts a run (`draft` is true) of the agent that the body defines, even if an agent of "
        "this name is stored. Its sub-agents are stored agents. The run leaves no episode and does "
        "no success checks. Only lists with `draft=true` show the run; series and sums of usage "
        "leave it out. Its tokens count towards the tenant's limits."
    ),
    status_code=202,
    response_model=Run,
    responses={**problems(400, 404, 409, 413, 415), 202: headers(Location="Path of the run.")},
)
async def create_draft_run(
    once: OnceDep,
    service: ServiceDep,
    tenant: DefineTenant,
    principal: PrincipalDep,
    name: DefinitionName,
    body: NewDraftRun,
    response: Response,
) -> Any:
    new_run = NewRun(agent=name, input=body.input, memory="off" if body.model == "demo" else "read")
    try:
        await check_patterns_of(service, tenant, body.definition)
        async with service.database.begin(tenant) as tx:
            caller = Caller(service, tx, tenant, principal)
            stored = await prepare(caller, name, body.definition)
        definition = stored | {"success_check": []}
        draft = {"agent": name, "definition": definition, "model": body.model}
        run = await start_run(service, principal, new_run, await once.key_with_hash(), draft=draft)
    except InvalidInputError as error:
        if error.pointer is not None and not error.pointer.startswith("/input"):
            error.pointer = f"/definition{error.pointer.removeprefix('/agent')}"
        raise
    response.headers["Location"] = f"/v1/runs/{run['id']}"
    return run
