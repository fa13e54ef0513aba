"""Plugins: Python code that an operator installs with the service. Entry points name the plugins.

A distribution registers an object in the group ``bottega.plugins``. The object may define

- ``configure_agent(agent, definition)``: called for every agent that a worker has built, so that
  the service's agents can have hooks in Python,
- ``check_success``: called for agents whose ``success_check`` names the plugin,
- ``before_dispatch``: called before each task and each synchronous call of a sub-agent,
- ``after_subagent_complete``: called after each task (:mod:`bottega.subagents.plugins`).
"""

import functools
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from bottega.agents import BaseAgent
from bottega.errors import InvalidInputError, PluginError
from bottega.logger import Logger
from bottega.subagents.plugins import SubagentPlugin, is_guard

GROUP = "bottega.plugins"

logger = Logger(__name__)


Configure = Callable[[BaseAgent, Mapping[str, Any]], None]


def configure_agent() -> tuple[Configure, ...]:
    """Return the ``configure_agent`` functions of all plugins, in the order of entry point names.

    Raises:
        InvalidInputError: a plugin cannot be loaded. The service then must not start.
    """
    plugins = _defining("configure_agent")
    return tuple(_named(name, plugin.configure_agent) for name, plugin in plugins)


def _named(name: str, configure: Configure) -> Configure:
    """Wrap ``configure``, so that errors of its code and its hooks contain the plugin's name."""

    def configured(agent: BaseAgent, definition: Mapping[str, Any]) -> None:
        before = {id(hook) for hooks in agent.hooks.values() for hook in hooks}
        try:
            configure(agent, definition)
        except Exception as error:
            logger.warning("plugin.failed", name=name, agent=agent.agent_name, exc_info=error)
            raise PluginError(
                f"the plugin '{name}' failed to configure the agent '{agent.agent_name}' "
                f"({type(error).__name__}): see the worker's log for the cause"
            ) from error
        for hooks in agent.hooks.values():
            for hook in hooks:
                if id(hook) not in before:
                    hook.plugin = name

    return configured


def subagent_plugins() -> tuple[SubagentPlugin, ...]:
    """Return the plugins that define a function for tasks, sorted by entry point name.

    Raises:
        InvalidInputError: a plugin cannot be loaded, or is a guard without ``before_dispatch``.
    """
    plugins = [
        SubagentPlugin(
            name,
            getattr(plugin, "before_dispatch", None),
            getattr(plugin, "after_subagent_complete", None),
            is_guard(plugin),
        )
        for name, plugin in _defining("before_dispatch", "after_subagent_complete", "guard")
    ]
    for plugin in plugins:
        if plugin.guard and plugin.before_dispatch is None:
            raise InvalidInputError(
                f"the plugin '{plugin.name}' has guard = True, so it must define before_dispatch"
            )
    return tuple(plugins)


def success_checks() -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """Return the ``check_success`` functions of all plugins, by entry point name.

    Raises:
        InvalidInputError: a plugin cannot be loaded.
    """
    return {name: plugin.check_success for name, plugin in _defining("check_success")}


def installed() -> set[str]:
    """Return the entry point names of all plugins. The plugins are not loaded."""
    return {entry.name for entry in _registered(tuple(sys.path))}


def _defining(*names: str) -> list[tuple[str, Any]]:
    """Return (entry point name, plugin) for each plugin that defines one of ``names``."""
    plugins = []
    for entry in _registered(tuple(sys.path)):
        try:
            plugin = entry.load()
        except Exception as error:
            raise InvalidInputError(
                f"the plugin '{entry.name}' ({entry.value}) cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        if defined := [name for name in names if getattr(plugin, name, None) is not None]:
            logger.info("plugin.loaded", name=entry.name, place=entry.value, defines=defined)
            plugins.append((entry.name, plugin))
    return plugins


@functools.cache
def _registered(path: tuple[str, ...]) -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
