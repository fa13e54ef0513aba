"""The base of an agent's tools, and the state that they share."""

from collections.abc import Callable, Collection, Mapping

from bottega.agents.agent import BaseAgent
from bottega.agents.query import CurrentCall, current_call
from bottega.errors import InvalidInputError
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.shared_context import Workspace
from bottega.subagents.swarm import DispatchingTool, QueryScope, scope_of


class AsyncSubagents:
    """State shared by an agent's tools.

    Attributes:
        agents: the agent's sub-agents by name.
        limits: the agent's own limits.
        anonymous: it may dispatch helpers without a definition.
        configure: called with each new helper.
        share_metadata: keys of a dispatch's metadata that its task reads too.
    """

    def __init__(
        self,
        registry: SubagentRegistry,
        agents: Mapping[str, BaseAgent],
        limits: SubagentLimits,
        *,
        anonymous: bool = True,
        configure: Callable[[BaseAgent], object] = lambda helper: None,
        share_metadata: Collection[str] = (),
    ) -> None:
        self.registry = registry
        self.agents = dict(agents)
        self.limits = limits
        self.anonymous = anonymous
        self.configure = configure
        self.share_metadata = tuple(share_metadata)

    def scope(self) -> tuple[CurrentCall, QueryScope]:
        """Return the running tool call and the scope of its query."""
        call = current_call.get()
        if call is None:
            raise InvalidInputError("this tool works only within an agent's query")
        return call, scope_of(call.query, self.registry)

    def workspace(self) -> Workspace:
        return self.scope()[1].workspace

    def ancestors(self) -> Callable[[str], frozenset[str]] | None:
        """See :meth:`DispatchingTool.ancestors`."""
        graphs = (agent.memory_graph for agent in self.agents.values())
        return None if all(graph is None for graph in graphs) else self._ancestors

    def _ancestors(self, name: str) -> frozenset[str]:
        agent = self.agents.get(name)
        graph = None if agent is None else agent.memory_graph
        if agent is None or graph is None or agent.agent_id is None:
            return frozenset()
        ids = graph.ancestors(agent.agent_id)
        return frozenset(
            other
            for other, sibling in self.agents.items()
            if sibling.memory_graph is graph and sibling.agent_id in ids
        )


class SubagentTool(DispatchingTool):
    """Base of the tools."""

    timeout_s = None
    idempotent = True
    local = True

    def __init__(self, shared: AsyncSubagents) -> None:
        self.shared = shared
        self.limits = shared.limits

    def ancestors(self) -> Callable[[str], frozenset[str]] | None:
        return self.shared.ancestors()
