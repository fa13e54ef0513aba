"""Checks of an answer by its text or by a JSON Schema, without a model or a service. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from bottega.agents.threads import run_in_thread

Check = Mapping[str, Any]
"""A check as it is written in an agent's definition."""
ALONE = frozenset(("equals", "contains", "json_schema"))
"""Types of the checks that :func:`decide_alone` decides."""


async def decide_alone(check: Check, text: str) -> tuple[bool, str]:
    """Return whether an answer passes a check, and the reason if it fails.

    Args:
        check: of a type in :data:`ALONE`.
    """
    match check["type"]:
        case "equals" if isinstance(check["value"], str):
            equal = text.strip() == check["value"].strip()
            return equal, "" if equal else f"the answer was not {quoted(check['value'])}"
        case "equals":
            return await _fits({"const": check["value"]}, text)
        case "contains":
            found = check["value"] in text
            return found, "" if found else f"the answer did not contain {quoted(check['value'])}"
    return await _fits(check["schema"], text)


async def unmet_check(checks: Sequence[Check], text: str) -> str | None:
    """Return the reason of the first check that an answer fails; ``None``: it passes all checks."""
    for check in checks:
        passed, reason = await decide_alone(check, text)
        if not passed:
            return reason
    return None


def quoted(text: str) -> str:
    """Return a text in quotes, cut to 100 characters."""
    return f'"{text if len(text) <= 100 else f"{text[:100]}…"}"'


async def _fits(schema: Mapping[str, Any], text: str) -> tuple[bool, str]:
    # Imported here, because the library takes long to load.
    from bottega.json_schema.output import output_schema

    problems = await run_in_thread(lambda: output_schema(schema).read(text)[1])
    return not problems, "; ".join(map(str, problems))
