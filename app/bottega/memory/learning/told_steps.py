"""Steps of a run as a model reads them. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from bottega.memory.text.summaries import cut

_CURE = re.compile(r"\d+\. .*?: (?P<done>.+) \(worked after (?P<failed>.+) failed\)")
_SHORT = 72  # bytes of arguments, and of a result or an error
_TELLING = 160  # of the arguments of a call that failed, or that worked after one


def told_steps(trace: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each step, in order: who called what, with which result.

    The call of the same task that worked after failed ones names them. Lines about failures have
    the word "failed", which :func:`bottega.memory.text.summaries.summary_of` keeps first.
    """
    lines: list[str] = []
    failed: dict[Any, dict[str, None]] = {}  # per task: the tools that failed, and no cure yet
    for step in trace:
        tool, task = step.get("tool"), step.get("task_id")
        tells = "error" in step or task in failed
        given = _arguments(step.get("arguments"), _TELLING if tells else _SHORT)
        line = f"{step.get('step')}. {step.get('agent')}: {f'{tool}{given}' if tool else 'answer'}"
        if "error" in step:
            line += f" failed: {_line(_message(step['error']))}"
            if tool:
                failed.setdefault(task, {})[str(tool)] = None
        else:
            said = _line(step.get("answer") or step.get("result") or "")
            line += f" → {said}" if said else ""
            if tool and (before := failed.pop(task, None)):
                line += f" (worked after {', '.join(before)} failed)"
        lines.append(line)
    return lines


def cure_in(steps: str, tool: str) -> str:
    """Return the first call that worked after ``tool`` failed, with its arguments and result.

    Args:
        steps: lines of :func:`told_steps`.

    Returns:
        one line; empty if no call did.
    """
    for line in steps.splitlines():
        found = _CURE.fullmatch(line)
        if found and tool in found["failed"].split(", "):
            return found["done"]
    return ""


def _arguments(given: Any, most: int) -> str:
    text = _line(given or "", most)
    return "" if text in ("", "{}") else f" {text}"


def _message(error: Any) -> Any:
    return error.get("message") or error.get("code") if isinstance(error, Mapping) else error


def _line(text: Any, most: int = _SHORT) -> str:
    return cut(" ".join(str(text).split()), most)
