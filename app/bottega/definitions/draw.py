"""Drawing of a graph's definition, as a program: ``python -m bottega.definitions.draw``.

It is a separate process, because a large drawing takes seconds of CPU time, which would block the
event loop even from a thread.
"""

import os
import sys
from datetime import UTC, datetime
from typing import Any

from pydantic_core import from_json, to_json

from bottega.definitions.graphs import to_graph
from bottega.graph.publication import Publication
from bottega.graph.shared_memory import SharedMemoryGraph
from bottega.graph.svg import draw_svg

_DRAW = {
    "svg": draw_svg,
    "mermaid": SharedMemoryGraph.to_mermaid,
    "dot": SharedMemoryGraph.to_dot,
}
_UNSHOWN = datetime.min.replace(tzinfo=UTC)


def draw(plan: dict[str, Any]) -> bytes:
    """Draw a graph.

    Args:
        plan: the graph's ``content`` (see :func:`to_graph`), the published ``versions`` by agent,
            and the ``format``: ``svg``, ``mermaid`` or ``dot``.
    """
    graph = to_graph(plan["content"])
    for agent, version in plan["versions"].items():
        graph.restore(Publication(agent, content="", version=version, timestamp=_UNSHOWN))
    return _DRAW[plan["format"]](graph).encode()


def command() -> tuple[list[str], dict[str, str]]:
    """Return the program's arguments and environment, with this process's import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return [sys.executable, "-P", "-m", "bottega.definitions.draw"], environment


def main() -> None:
    """Read a plan as JSON from standard input; write the drawing to standard output."""
    sys.stdout.buffer.write(draw(from_json(sys.stdin.buffer.read())))


def packed(content: dict[str, Any], versions: dict[str, int], form: str) -> bytes:
    """Encode a plan as JSON; equal drawings have equal bytes."""
    return to_json({"content": content, "versions": versions, "format": form})


if __name__ == "__main__":
    main()
