"""Diagram source of a graph: Mermaid and Graphviz DOT."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

Edge = tuple[str, str, str]
"""(source, target, policy)."""

_DEFAULT_POLICY = "final_response_only"


def mermaid(nodes: Sequence[str], edges: Sequence[Edge], published: AbstractSet[str]) -> str:
    """Return a Mermaid flowchart; ``published`` agents have the class ``published``."""
    number = {name: f"n{index}" for index, name in enumerate(nodes)}
    lines = ["flowchart LR"]
    for name, short in number.items():
        # Mermaid has no backslash escapes: use entities for characters that would end the label.
        label = name.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;")
        label = " ".join(label.split())
        lines.append(f'  {short}["{label}"]' + (":::published" if name in published else ""))
    for source, target, policy in edges:
        arrow = "-->" if policy == _DEFAULT_POLICY else f"-->|{policy}|"
        lines.append(f"  {number[source]} {arrow} {number[target]}")
    lines.append("  classDef published fill:#d6f5d6,stroke:#2e7d32")
    return "\n".join(lines) + "\n"


def dot(nodes: Sequence[str], edges: Sequence[Edge], published: AbstractSet[str]) -> str:
    """Return a Graphviz digraph; ``published`` agents are filled."""
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
