"""Plugins: Python that an operator installs beside the service, found by its entry points.

A distribution registers an object in the group ``bottega.plugins``; what it defines of the known
functions is called. Now that is ``configure_agent(agent, definition)``, called in the worker for
every agent that the factory made, so that hooks written in Python reach agents of the service.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import structlog

from app.agents import BaseAgent

GROUP = "bottega.plugins"

log = structlog.get_logger(__name__)


def configure_agent() -> tuple[Callable[[BaseAgent, Mapping[str, Any]], None], ...]:
    """The ``configure_agent`` functions of all plugins, by name of their entry point.

    A plugin that cannot be loaded is an error at start, not a run that misses its hooks.
    """
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        configure = getattr(entry.load(), "configure_agent", None)
        if configure is not None:
            log.info("plugin.loaded", name=entry.name, place=entry.value)
            found.append(configure)
    return tuple(found)
