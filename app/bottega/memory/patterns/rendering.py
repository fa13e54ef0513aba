"""Patterns as text for a prompt. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bottega.memory.patterns.pattern import Condition, Pattern
from bottega.memory.text.identities import without_identities
from bottega.memory.text.summaries import cut

_MOST = 1_100
_LONGEST = 300
_LONGEST_STEPS = 500
_LONGEST_NAME = 120  # all in bytes
_ADVICE = ("Approach", "Action", "Steps")
_SOURCES = {1: "given by a person", 2: "from own runs that read outside sources"}
_OPERATORS = {
    "eq": "is",
    "ne": "is not",
    "in": "is one of",
    "not_in": "is none of",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "contains": "contains",
}


def pattern_text(pattern: Pattern, alternatives: Sequence[str] = ()) -> str:
    """Render all of a pattern that helps to act, at most about 1,200 bytes, the advice first.

    The first line is trusted. The pattern's own lines are indented, so that none can imitate it.
    What an earlier line says already is left out; the advice itself only if a line, or the end of
    one behind a colon, is just the advice.

    Args:
        alternatives: names of the patterns to use instead.
    """
    known = pattern.evidence
    head = f"pattern, {pattern.category.replace('_', ' ')}, {pattern.state.lower()}"
    if known.success_rate is not None and known.applications:
        head += f", {known.success_rate:.0%} of {known.applications} went well"
    lines = [f"[{head}, {_SOURCES.get(pattern.trust, 'from own runs')}]"]
    said, left = "", _MOST
    for label, longest, text in _parts(pattern, alternatives):
        flat = " ".join(without_identities(text).split())
        words = flat.rstrip(".").casefold()
        if not flat or (f": {words}\n" if label in _ADVICE else words) in said:
            continue
        line = cut(f"{label}: {flat}" if label else flat, min(longest, left))
        if line:
            lines.append(line)
            left -= len(line.encode())
            said += f": {line.rstrip('.').casefold()}\n"
    return "\n  ".join(lines)


def _parts(pattern: Pattern, alternatives: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Yield label, limit and text of each part, the most helpful first."""
    fields, guide, when = pattern.content.fields, pattern.guide, pattern.applicability
    if "mined" not in pattern.origin:  # that name repeats the summary
        yield "", _LONGEST_NAME, pattern.name
    yield "", _LONGEST, pattern.summary or pattern.description
    yield "Approach", _LONGEST_STEPS, fields.get("approach", "")
    yield "Action", _LONGEST_STEPS, fields.get("action", "")
    yield "Steps", _LONGEST_STEPS, " → ".join(map(_step, fields.get("steps", ())))
    yield "If", _LONGEST, fields.get("condition", "")
    for each in fields.get("branches", ()):
        yield "If", _LONGEST, f"{each['when']}: {each['then']}"
    yield "Stop when", _LONGEST, fields.get("stop_when", "")
    yield "When", _LONGEST, guide.when
    yield "Where", _LONGEST, "; ".join(map(condition_text, when.conditions))
    yield "Not where", _LONGEST, "; ".join(map(condition_text, when.anti_conditions))
    for name in ("rules", "principles", "parameters"):
        yield name.capitalize(), _LONGEST, "; ".join(fields.get(name, ()))
    yield "How", _LONGEST, guide.how
    yield "Risks", _LONGEST, "; ".join(guide.risks)
    yield "Or instead", _LONGEST, "; ".join(name[:_LONGEST_NAME] for name in alternatives)
    yield "Why", _LONGEST, fields.get("rationale", "")
    yield "Trade-offs", _LONGEST, "; ".join(fields.get("trade_offs", ()))
    yield "Benefits", _LONGEST, "; ".join(guide.benefits)


def condition_text(condition: Condition) -> str:
    """Render a checked condition in words."""
    for group, word in (("all", " and "), ("any", " or ")):
        if group in condition:
            return f"({word.join(map(condition_text, condition[group]))})"
    if "not" in condition:
        return f"not {condition_text(condition['not'])}"
    if condition["op"] == "exists":
        return f"{condition['feature']} is known"
    value = condition["value"]
    values = ", ".join(map(str, value if isinstance(value, list | tuple) else [value]))
    return f"{condition['feature']} {_OPERATORS[condition['op']]} {values}"


def _step(step: Mapping[str, Any]) -> str:
    """Return a step with the tools and agents that its text does not name."""
    do = step["do"]
    others = ", ".join(name for name in step.get("uses", ()) if name not in do)
    return f"{do} ({others})" if others else do
