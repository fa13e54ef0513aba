"""Plugins: Python that an operator installs beside the service, found by its entry points.

A distribution registers an object in the group ``bottega.plugins``; what it defines of the known
functions is called: ``configure_agent(agent, definition)``, in the worker, for every agent that
the factory made, so that hooks written in Python reach agents of the service; and
``before_dispatch`` and ``after_subagent_complete`` around the tasks of asynchronous sub-agents
(:mod:`app.subagents.plugins`).
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import structlog

from app.agents import BaseAgent
from app.errors import InvalidInputError
from app.subagents.plugins import is_guard

GROUP = "bottega.plugins"

log = structlog.get_logger(__name__)


def configure_agent() -> tuple[Callable[[BaseAgent, Mapping[str, Any]], None], ...]:
    """The ``configure_agent`` functions of all plugins, by name of their entry point.

    A plugin that cannot be loaded is an error at start, not a run that misses its hooks.
    """
    plugins: tuple[Any, ...] = _defining("configure_agent")
    return tuple(plugin.configure_agent for plugin in plugins)


def subagent_plugins() -> tuple[object, ...]:
    """The plugins that have a say in tasks of sub-agents, by name of their entry point.

    Raises:
        InvalidInputError: one says it is a guard, and looks at nothing.
    """
    plugins = _defining("before_dispatch", "after_subagent_complete", "guard")
    for plugin in plugins:
        if is_guard(plugin) and not hasattr(plugin, "before_dispatch"):
            raise InvalidInputError(f"the plugin {plugin!r} is a guard without before_dispatch")
    return plugins


def _defining(*names: str) -> tuple[object, ...]:
    """The plugins that define one of ``names``."""
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        plugin = entry.load()
        if defined := [name for name in names if getattr(plugin, name, None) is not None]:
            log.info("plugin.loaded", name=entry.name, place=entry.value, defines=defined)
            found.append(plugin)
    return tuple(found)
