"""A graph as diagram source: Mermaid and Graphviz DOT (spec page 2, G8)."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

Edge = tuple[str, str, str]
"""Source, target, policy."""

_DEFAULT_POLICY = "final_response_only"


def mermaid(nodes: Sequence[str], edges: Sequence[Edge], published: AbstractSet[str]) -> str:
    """A Mermaid flowchart; agents that have published are of class ``published``."""
    number = {name: f"n{index}" for index, name in enumerate(nodes)}
    lines = ["flowchart LR"]
    for name, short in number.items():
        # Mermaid has no backslash escapes: entities stand for what would end the label.
        label = name.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;")
        label = " ".join(label.split())
        lines.append(f'  {short}["{label}"]' + (":::published" if name in published else ""))
    for source, target, policy in edges:
        arrow = "-->" if policy == _DEFAULT_POLICY else f"-->|{policy}|"
        lines.append(f"  {number[source]} {arrow} {number[target]}")
    lines.append("  classDef published fill:#d6f5d6,stroke:#2e7d32")
    return "\n".join(lines) + "\n"


def dot(nodes: Sequence[str], edges: Sequence[Edge], published: AbstractSet[str]) -> str:
    """A Graphviz digraph; agents that have published are filled."""
    lines = ["digraph shared_memory {", "  rankdir=LR;", "  node [shape=box];"]
    for name in nodes:
        style = ' [style=filled, fillcolor="#d6f5d6"]' if name in published else ""
        lines.append(f"  {_quoted(name)}{style};")
    for source, target, policy in edges:
        label = "" if policy == _DEFAULT_POLICY else f" [label={_quoted(policy)}]"
        lines.append(f"  {_quoted(source)} -> {_quoted(target)}{label};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
