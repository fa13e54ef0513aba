"""Pins: the versions of agents and graphs that a new run uses, cached in each process.

This module also checks a run before its start: each model must support the agent's parameters,
accept each part of the input, and, if the run has a cost budget, have a known price.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, get_args
from uuid import UUID

import asyncpg
from cachetools import LRUCache
from pydantic_core import from_json, to_json

from bottega import metrics
from bottega.agents.params import merged
from bottega.agents.parts import FileContent, Part
from bottega.agents.provider import DialectName
from bottega.definitions import store
from bottega.definitions.agents import (
    DEFAULT,
    DEMO,
    OF_DEMO,
    TASK_TOOLS,
    KnownProvider,
    ModelName,
    Reached,
    checked,
    listed,
    refuse_stateful,
)
from bottega.definitions.graphs import (
    DEEPEST,
    TOO_MANY_NODES,
    GraphRef,
    GraphSize,
    excess_subgraph,
)
from bottega.errors import InvalidInputError, UnknownAgentError
from bottega.files.inputs import RunInput, parts_of
from bottega.llm.dialects import anthropic, chat, gemini, responses
from bottega.llm.dialects.dialect import Media, WriteMedia, loaded
from bottega.llm.server import VENDORS, reserved_in, supported
from bottega.llm.usage import prices_of
from bottega.memory.episodes.scope import MemoryMode, MemoryScope
from bottega.tools.mcp import model_name, refuse_unfit, refuse_unfit_tools

Dialects = Mapping[DialectName, Collection[str]]
"""Names of the parameters that an agent's models accept, by the models' dialect."""


_MODES = get_args(MemoryMode)


def strictest(*modes: str) -> str:
    """Return the strictest of some memory modes."""
    return min(modes, key=_MODES.index)


def least_strict(modes: Iterable[str]) -> str:
    """Return the least strict of some memory modes."""
    return max(modes, key=_MODES.index)


def dialects_of(servers: Iterable[tuple[DialectName, Mapping[str, Any]]]) -> Dialects:
    """Return, by dialect of an agent's models, the parameters that all these models support.

    Args:
        servers: dialect and headers of each model's server.
    """
    by_dialect: dict[DialectName, frozenset[str]] = {}
    for dialect, headers in servers:
        texts = {name: value for name, value in headers.items() if isinstance(value, str)}
        dialects_known = supported(dialect, texts)
        by_dialect[dialect] = by_dialect.get(dialect, dialects_known) & dialects_known
    return by_dialect


def refuse_unsupported(
    params: Mapping[str, Any] | None, dialects: Dialects, pointer: str, *, whose: str
) -> None:
    """Check that all models of an agent accept the agent's parameters.

    Args:
        pointer: JSON Pointer to the parameters in the request.
        whose: the agent's name.

    Raises:
        InvalidInputError: ``unsupported_param``; ``reserved_field`` in ``extra_body``.
    """
    own_params = merged(params, None)
    for dialect, names in dialects.items():
        if lacking := sorted(own_params.keys() - set(names)):
            raise InvalidInputError(
                f"the agent '{whose}' has a model of the dialect '{dialect}', which has no "
                f"parameter '{lacking[0]}': omit it, or choose another model",
                code="unsupported_param",
                pointer=f"{pointer}/{lacking[0]}",
            )
        if reserved := reserved_in(dialect, own_params.get("extra_body") or {}):
            raise InvalidInputError(
                f"extra_body must not set '{reserved[0]}', which the run sets itself",
                code="reserved_field",
                pointer=f"{pointer}/extra_body/{reserved[0].replace('.', '/')}",
            )


def refuse_overrides(
    overrides: Mapping[str, Mapping[str, Any]],
    own: Mapping[str, Mapping[str, Any] | None],
    tools: Mapping[str, Collection[str]],
    dialects: Mapping[str, Dialects],
) -> None:
    """Check a run's overrides.

    Args:
        own: parameters of the run's agents, by agent.
        tools: names of the run's tools, by agent.
        dialects: dialects of each agent's models.

    Raises:
        UnknownAgentError: the run lacks an agent that the overrides contain.
        InvalidInputError: see :func:`refuse_unsupported`; ``duplicate_tool``: a client tool has the
            name of a tool of the agent; ``unknown_tool``: the ``tool_choice`` does not exist.
    """
    for name, change in overrides.items():
        if name not in own:
            raise UnknownAgentError(
                f"the agent '{name}' is not in this run: its agents are {', '.join(sorted(own))}",
                pointer=f"/overrides/{name}",
            )
        own_params = merged(own[name], change.get("params"))
        pointer = f"/overrides/{name}/params"
        refuse_unsupported(own_params, dialects.get(name, {}), pointer, whose=name)
        names = [tool["name"] for tool in change.get("tools") or ()]
        for number, tool in enumerate(names):
            if tool in tools[name]:
                raise InvalidInputError(
                    f"the agent '{name}' has a tool '{tool}' already: rename the client tool",
                    code="duplicate_tool",
                    pointer=f"/overrides/{name}/tools/{number}/name",
                )
        choice = own_params.get("tool_choice")
        if isinstance(choice, Mapping) and choice["name"] not in {*names, *tools[name]}:
            raise InvalidInputError(
                f"neither the request nor the agent '{name}' has a tool '{choice['name']}'",
                code="unknown_tool",
                pointer=f"{pointer}/tool_choice",
            )


def refuse_parts(run_input: RunInput, dialects: Iterable[DialectName]) -> None:
    """Check that every model's dialect can express each part of a stored input.

    Raises:
        InvalidInputError: ``unsupported_part``, with a pointer to the part.
    """
    for at, part in parts_of(run_input):
        for dialect in dialects:
            if not takes(dialect, Part.from_dict(part)):
                kind = part.get("media_type") or "unknown type"
                raise InvalidInputError(
                    f"a model of the dialect '{dialect}' accepts no part '{part['type']}' of "
                    f"{kind} by {'url' if part.get('url') else 'file'}: choose another model, or "
                    "send the part in another form",
                    code="unsupported_part",
                    pointer=f"/input{at}",
                )


_WRITERS: Mapping[DialectName, WriteMedia] = {
    "chat": chat.write_media,
    "responses": responses.write_media,
    "anthropic": anthropic.write_media,
    "gemini": gemini.write_media,
}


def takes(dialect: DialectName, part: Part, media_type: str | None = None) -> bool:
    """Return true if a dialect can express a part of an input.

    Args:
        media_type: media type of the stored file, if the part refers to a stored file.
    """
    if part.text is not None:
        return True
    kind = media_type or part.media_type or ""
    files = {} if part.file is None else {part.file: FileContent(b"", kind)}
    part_loaded = loaded(part, files)
    return not isinstance(part_loaded, Media) or _WRITERS[dialect](part_loaded) is not None


class UsedModel(NamedTuple):
    """A model that an agent may call.

    Attributes:
        address: URL of the model's server.
        is_priced: true if the provider's definition has a price for the model.
    """

    name: str
    address: str
    is_priced: bool

    @classmethod
    def of(cls, provider: KnownProvider, model: str | None, default: str) -> "UsedModel":
        """Return the model to which a definition refers.

        Args:
            model: a model's name; ``None``: the provider's first model or, without it, ``default``.
        """
        name = model or (provider.models[0] if provider.models else default)
        address = provider.base_url or VENDORS[provider.dialect]
        return cls(name, address, name in (provider.prices or ()))


async def refuse_unpriced(models: Mapping[str, Sequence[UsedModel]]) -> None:
    """Refuse models without a known price.

    Args:
        models: models by agent.

    Raises:
        InvalidInputError: ``unpriced_model``: a model has no known price.
    """
    for agent, candidates in models.items():
        for model in candidates:
            if model.is_priced:
                continue
            # Search in a thread, because the first search loads the public price lists.
            prices = await asyncio.to_thread(prices_of, model.name, model.address)
            if prices is None:
                raise InvalidInputError(
                    f"no price is known for the model '{model.name}' of the agent '{agent}': add "
                    "a price for this model to its provider, or omit cost_budget",
                    code="unpriced_model",
                    pointer="/cost_budget",
                )


_MAX_CHAIN = 20
_MOST_AGENTS = 20_000
_READ = "SELECT read_pins($1, $2, $3, $4)::text"
_READ_DRAFT = "SELECT read_pins($1, $2, NULL, NULL, $3)::text"
_Key = tuple[UUID, str | None, str | None, int | None]
_ANY = MappingProxyType({DEFAULT: KnownProvider(None, "chat")})


@dataclass(frozen=True, slots=True)
class Pins:
    """The versions of definitions that a run uses to its end.

    Attributes:
        epoch: id that each change of the tenant's definitions replaces. The pins are current as
            long as the tenant has this id; ``None``: the tenant has no definitions.
        pinned: ``{"agents": {name: version}, "graph": {"name", "version"} or None, "providers":
            {name: version}, "operators": [name], "mcp_servers": {name: version}}``. ``providers``
            has the tenant's providers that the agents use. ``operators`` has the operator's
            providers that the agents use. If the graph has sub-graphs, ``graph`` also has
            ``below: {name of a sub-graph: [the current version, other versions]}``. If the tenant
            has chosen a model for agents without a model, ``default_model`` is this model.
        first: the agents that start the run. Each of these agents gets the run's input.
        memory: memory mode of the root agent; in a DAG, the least strict mode of the nodes.
        memory_scope: memory scope of the root agent; None: none is set, or the run is a DAG.
        params: the parameters of each agent.
        tools: names of the tools and sub-agents of each agent.
        dialects: dialects of each agent's models.
        models: models of each agent, with their providers.
        expose: the façades (APIs of other products) that offer the root agent; None: all façades.
    """

    epoch: UUID | None
    pinned: dict[str, Any]
    first: Sequence[str]
    memory: str
    memory_scope: MemoryScope | None
    params: Mapping[str, Mapping[str, Any] | None]
    tools: Mapping[str, frozenset[str]]
    dialects: Mapping[str, Dialects]
    models: Mapping[str, Sequence[UsedModel]]
    expose: frozenset[str] | None = None


class PinCache:
    """Cache of pins by tenant, agent and graph. Pins may be stale: callers compare epochs.

    Args:
        operators: the operator's providers. A tenant's provider of the same name has precedence.
        default_model: name of the model for providers that list no models.
        shared: true if the operator lets agents read the memory of all sessions.
    """

    def __init__(
        self,
        operators: Mapping[str, KnownProvider] = _ANY,
        default_model: str = "",
        *,
        shared: bool = False,
    ) -> None:
        self.shared = shared
        self._operators = operators
        self._default_model = default_model
        self._cache: LRUCache[_Key, Pins] = LRUCache(_MOST_AGENTS, _size_of)

    async def find(
        self,
        driver: asyncpg.Pool | asyncpg.Connection,
        tenant_id: UUID,
        agent: str | None,
        graph: str | None,
        version: int | None = None,
    ) -> Pins:
        """Return the pins of a run with this agent and graph. The pins may be stale.

        Args:
            version: version of the agent or, without an agent, of the graph; None: the current
                version.

        Raises:
            UnknownAgentError, InvalidInputError: see :func:`bottega.runs.submit.submit`. Errors are
                not cached, so an error is never stale.
        """
        key = tenant_id, agent, graph, version
        if (pins := self._cache.get(key)) is not None:
            metrics.cache_hits.labels("pins").inc()
            return pins
        row = from_json(await driver.fetchval(_READ, *key))
        _refuse_unknown_version(row, agent, graph, version)
        pins = _pins(row, agent, graph, self._operators, self._default_model)
        self._cache[key] = pins
        return pins

    async def of_draft(
        self, driver: asyncpg.Pool | asyncpg.Connection, tenant_id: UUID, draft: Mapping[str, Any]
    ) -> Pins:
        """Return pins of a run of an unstored definition. The pins contain the definition.

        Args:
            draft: ``agent`` (a name), ``definition`` and ``model`` (``demo`` or ``real``).

        Raises:
            UnknownAgentError, InvalidInputError: as :meth:`find`.
        """
        agent, operators = draft["agent"], self._operators
        definition = to_json(draft["definition"]).decode()
        row = from_json(await driver.fetchval(_READ_DRAFT, tenant_id, agent, definition))
        if draft["model"] == "demo":
            operators = {DEMO: KnownProvider(None, "chat")}
            agents = row["agents"]
            row["agents"] = {name: agents[name] | OF_DEMO | {"judges": []} for name in agents}
        pins = _pins(row, agent, None, operators, self._default_model)
        return replace(pins, pinned=pins.pinned | {"draft": draft})

    def forget(
        self, tenant_id: UUID, agent: str | None, graph: str | None, version: int | None = None
    ) -> None:
        """Remove stale pins from the cache."""
        self._cache.pop((tenant_id, agent, graph, version), None)


def _size_of(pins: Pins) -> int:
    return min(_MOST_AGENTS, 1 + len(pins.pinned["agents"]))


def _pins(
    row: Mapping[str, Any],
    agent: str | None,
    graph: str | None,
    operators: Mapping[str, KnownProvider],
    default_model: str,
) -> Pins:
    """Check the definitions that were read from the database. Return the run's pins."""
    if graph is not None and row["graph"] is None:
        raise InvalidInputError(
            f"there is no graph '{graph}'", code="unknown_graph", pointer="/graph"
        )
    of_graph = row["graph"] or {"nodes": [], "tools": [], "memory": [], "below": [], "judges": []}
    below = _below(of_graph)
    nodes: list[str] = list(dict.fromkeys(of_graph["nodes"]))
    named_by = dict.fromkeys(nodes, "/graph")
    if agent is not None:
        named_by = {agent: "/agent"} | named_by
    agents = _checked_agents(row["agents"], named_by, agent)
    first = [agent] if agent is not None else nodes
    memory = _memory(row["agents"], first if agent is not None else None, of_graph)
    servers = row["mcp_servers"]
    refuse_unfit_tools(of_graph["tools"], servers)
    _refuse_unfit_tools(row["agents"], servers, next(iter(named_by.values()), "/graph"))
    own = {name: KnownProvider(**each) for name, each in row["providers"].items()}
    known = {**operators, **own}
    default = row["default_model"]
    read = row["agents"]
    models = {name: _models(name, each["model"], known, default) for name, each in read.items()}
    judges = [each for name in read for each in _judges(name, read[name], known)]
    judges += _models_of_graph(of_graph["judges"] if agent is None else (), known, default)
    names = sorted({each.provider for of_one in (*models.values(), judges) for each in of_one})
    versions = {name: known[name].version for name in names}
    pinned: dict[str, Any] = {
        "agents": {name: each.version for name, each in agents.items()},
        "graph": graph and {"name": graph, "version": row["graph"]["version"], **below},
        "providers": {name: version for name, version in versions.items() if version is not None},
        "operators": [name for name, version in versions.items() if version is None],
        "mcp_servers": {name: each["version"] for name, each in servers.items()},
    }
    if default is not None:
        pinned["default_model"] = default
    params = {name: each["params"] for name, each in row["agents"].items()}
    tools = {name: frozenset(_tools(each, servers)) for name, each in row["agents"].items()}
    servers_of = {name: [known[each.provider] for each in models[name]] for name in models}
    dialects = {
        name: dialects_of((server.dialect, server.headers) for server in of_agent)
        for name, of_agent in servers_of.items()
    }
    for name in agents:
        refuse_unsupported(params[name], dialects[name], "/params", whose=name)
    used = {
        agent: [UsedModel.of(known[each.provider], each.model, default_model) for each in of_agent]
        for agent, of_agent in models.items()
    }
    root = {} if agent is None else row["agents"][agent]
    ways, scope = root.get("expose"), root.get("memory_scope")
    expose = None if ways is None else frozenset(ways)
    epoch = None if row["epoch"] is None else UUID(row["epoch"])
    return Pins(epoch, pinned, first, memory, scope, params, tools, dialects, used, expose)


def _below(graph: Mapping[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Return the versions of a graph's sub-graphs, by name. The current version is first."""
    versions: dict[str, dict[int, None]] = {}
    sizes: dict[GraphRef, GraphSize] = {}
    for below in graph["below"]:
        if below["version"] is None:
            raise InvalidInputError(
                f"the graph contains a version of the graph '{below['name']}' that does not exist",
                code="unknown_graph",
                pointer="/graph",
            )
        if below["level"] > DEEPEST:
            raise InvalidInputError(
                f"nest graphs at most {DEEPEST} levels deep", code="too_deep", pointer="/graph"
            )
        versions.setdefault(below["name"], {below["current"]: None})[below["version"]] = None
        sizes[below["name"], below["version"]] = _graph_size(below)
        if below["version"] == below["current"]:
            sizes[below["name"], None] = _graph_size(below)
    if versions and excess_subgraph(_graph_size(graph), sizes) is not None:
        raise InvalidInputError(TOO_MANY_NODES, code="too_many_nodes", pointer="/graph")
    return {"below": {name: list(each) for name, each in versions.items()}} if versions else {}


def _graph_size(row: Mapping[str, Any]) -> GraphSize:
    refs = [(node["graph"], node.get("version")) for node in row["subgraphs"]]
    return GraphSize(row["size"], refs)


def _checked_agents(
    rows: Mapping[str, Mapping[str, Any]], named_by: dict[str, str], root: str | None
) -> dict[str, Reached]:
    """Return a run's agents. Refuse unknown agents, and agents that cannot be sub-agents."""
    agents = {name: _reached_agent(each) for name, each in rows.items()}
    _refuse_unknown(named_by, agents)
    _refuse_depth(root, agents)
    _refuse_unfit(rows, agents)
    return agents


def _memory(
    agents: Mapping[str, Mapping[str, Any]],
    first: Sequence[str] | None,
    of_graph: Mapping[str, Any],
) -> str:
    """Return the strictest memory mode of the agents in ``first``.

    If ``first`` is ``None``, return the least strict mode of the graph's nodes.
    """
    if first is not None:
        return strictest("full", *(agents[name]["memory"] for name in first))
    pairs = zip(of_graph["nodes"], of_graph["memory"] or (), strict=False)
    return least_strict([mode or agents[name]["memory"] for name, mode in pairs] or ["full"])


def _refuse_unknown_version(
    row: Mapping[str, Any], agent: str | None, graph: str | None, version: int | None
) -> None:
    if version is None:
        return
    if agent is None and row["graph"] is None:
        raise InvalidInputError(
            f"there is no graph '{graph}' with a version {version}",
            code="unknown_graph",
            pointer="/version",
        )
    if agent is not None and agent not in row["agents"]:
        raise UnknownAgentError(
            f"there is no agent '{agent}' with a version {version}", pointer="/version"
        )


def _reached_agent(row: Mapping[str, Any]) -> Reached:
    children = tuple(row["children"])
    return Reached(row["version"], children, row["undescribed"], row["stateful"])


def _refuse_unfit(rows: Mapping[str, Mapping[str, Any]], agents: Mapping[str, Reached]) -> None:
    """Refuse sub-agents without a description, and asynchronous sub-agents that are stateful."""
    called = {child for each in agents.values() for child in each.children}
    if undescribed := sorted(name for name in called if agents[name].undescribed):
        raise InvalidInputError(
            f"give these sub-agents a description, so that a model knows when to call them: "
            f"{', '.join(undescribed)}",
            code="missing_description",
        )
    for name, row in rows.items():
        if row["beside"]:
            refuse_stateful(name, row["children"], agents)


def _refuse_unfit_tools(
    agents: Mapping[str, Mapping[str, Any]],
    servers: Mapping[str, Mapping[str, Any]],
    pointer: str,
) -> None:
    """Call :func:`bottega.tools.mcp.refuse_unfit` for each agent. Add a pointer to errors."""
    for name, agent in agents.items():
        if any(tool["type"] == "mcp" for tool in agent["tools"]):
            try:
                refuse_unfit(name, agent["tools"], agent["children"], servers)
            except InvalidInputError as error:
                raise InvalidInputError(error.detail, code=error.code, pointer=pointer) from None


def _tools(agent: Mapping[str, Any], servers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of an agent's tools that the model sees."""
    yield from TASK_TOOLS if agent["beside"] else agent["children"]
    for tool in agent["tools"]:
        if tool["type"] == "mcp":
            tools_known = tool["tools"] or servers[tool["server"]]["tools"]
            yield from (model_name(tool["server"], each) for each in tools_known)
        else:
            yield tool["name"]


def _judges(
    agent: str, row: Mapping[str, Any], providers: Mapping[str, KnownProvider]
) -> Sequence[ModelName]:
    """Return the models that judge in an agent's success checks, checked like :func:`_models`."""
    named = [each for each in row["judges"] if each is not None]
    return _models(agent, named, providers) if named else ()


def _models_of_graph(
    judges: Iterable[str | None], providers: Mapping[str, KnownProvider], default: str | None
) -> Iterator[ModelName]:
    """Yield the models of the judges in a graph's success checks; ``None``: the default model."""
    for each in judges:
        yield from _models("of the graph's success_check", each, providers, default)


def _models(
    agent: str,
    model: str | Sequence[str] | None,
    providers: Mapping[str, KnownProvider],
    default: str | None = None,
) -> Sequence[ModelName]:
    """Return an agent's models.

    Args:
        default: the model that the tenant has chosen for agents without a model, if any.

    Raises:
        InvalidInputError: ``unknown_provider``, ``unknown_model``.
    """
    try:
        return [checked(each, providers) for each in listed(model or default)]
    except InvalidInputError as error:
        detail = f"the agent '{agent}': {error.detail}"
        if default is not None and not model:
            detail += ". This is the default model: choose another with PUT /v1/default-model"
        raise InvalidInputError(detail, code=error.code) from None


def _refuse_unknown(named_by: dict[str, str], agents: Mapping[str, Reached]) -> None:
    """Refuse a run if its request names an unknown agent, or an agent has an unknown sub-agent.

    Args:
        named_by: JSON Pointer to the field of ``POST /v1/runs`` that names an agent, by the agent's
            name. The error's text omits the pointer, because other APIs have other fields.
        agents: existing agents, with their sub-agents.
    """
    for name, agent in agents.items():
        named_by |= {
            child: f"sub-agent of {name}" for child in agent.children if child not in named_by
        }
    if unknown := store.missing(list(named_by), list(agents)):
        places = {name: named_by[name] for name in unknown}
        listed = ", ".join(
            f"'{name}'" if place[0] == "/" else f"'{name}' ({place})"
            for name, place in places.items()
        )
        raise UnknownAgentError(
            f"no such agent: {listed}. Create it, or correct the name",
            pointer=next((place for place in places.values() if place[0] == "/"), None),
        )


def _refuse_depth(root: str | None, agents: Mapping[str, Reached]) -> None:
    level = set(agents) if root is None else {root}
    for _ in range(_MAX_CHAIN):
        level = {child for name in level if name in agents for child in agents[name].children}
        if not level:
            return
    raise InvalidInputError(
        f"sub-agents are nested more than {_MAX_CHAIN} levels deep: shorten the chain of agents "
        "that call each other",
        code="too_deep",
    )
