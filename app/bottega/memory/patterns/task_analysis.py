"""Features of a task, read from the task's text, for searches and for matching patterns.

The analysis uses no model and guesses nothing: a constraint or criterion is the text after a label
such as ``Constraints:`` at the start of a line. No prompt contains the analysis.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.memory.patterns.pattern import Features

MOST = 10
"""Maximum number of goals, of constraints and of criteria."""
LONGEST_ITEM = 300
"""Maximum number of characters of a goal, constraint or criterion."""
_MOST_NAMES = 200

_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])")  # noqa: RUF001 (CJK punctuation)
_BULLET = re.compile(r"(?:[-*+•–]|\d{1,3}[.)]|[a-z]\))\s+")  # noqa: RUF001 (en dash)
_WORD = re.compile(r"\w+")
_LABEL = re.compile(
    r"""
    (?: (?P<goals>goals?|obiettiv[oi]|objetivos?|objectifs?|ziele?)
      | (?P<constraints>constraints?|vincol[oi]|restricci(?:ón|ones)|contraintes?
            |einschränkung(?:en)?|restriç(?:ão|ões))
      | (?P<criteria>success\ criteri(?:a|on)|criteri[o]?\ di\ successo|criterios?\ de\ éxito
            |critères?\ de\ (?:succès|réussite)|erfolgskriteri(?:en|um)|critérios?\ de\ sucesso)
    )\s*:\s*(?P<text>.*)""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Goals:
    goals: tuple[str, ...]  # text after the label, list items, or the first sentence
    constraints: tuple[str, ...]  # text after the label
    criteria: tuple[str, ...]  # text after the label
    complexity: float  # 0 to 1; grows with length, sentences and named tools
    features: Features


def analyse(
    task: str,
    *,
    domain: str | None = None,
    task_type: str | None = None,
    capabilities: Sequence[str] = (),
) -> Goals:
    """Analyse a task's text, deterministically and in a time linear in the text's length.

    Args:
        capabilities: names of the available tools and agents.
    """
    text = task[:16_000]
    sentences = [*_sentences(text)]
    listed = [sentence for sentence, is_listed in sentences if is_listed]
    labels = _labelled(text)
    goals, constraints, criteria = (
        tuple(dict.fromkeys(each[:LONGEST_ITEM] for each in some))[:MOST]
        for some in (
            labels["goals"] or listed or [sentence for sentence, _ in sentences[:1]],
            labels["constraints"],
            labels["criteria"],
        )
    )
    names = _named(text, capabilities)
    load = len(task) / 1500 + len(sentences) / 8 + len(names) / 6
    complexity = round(load / (1 + load), 2)
    features: dict[str, Any] = {
        "domain": domain,
        "task_type": task_type,
        "complexity": complexity,
        "capabilities": sorted(set(capabilities))[:_MOST_NAMES],
        "tools_required": names,
    }
    return Goals(
        goals,
        constraints,
        criteria,
        complexity,
        {name: value for name, value in features.items() if value not in (None, [])},
    )


def refined(goals: Goals, answer: Mapping[str, Any]) -> Goals:
    """Replace fields of an analysis by the fields that a person or a model gave."""
    complexity = answer.get("complexity", goals.complexity)
    return Goals(
        lines_of(answer, "goals") or goals.goals,
        lines_of(answer, "constraints") or goals.constraints,
        lines_of(answer, "criteria") or goals.criteria,
        complexity,
        {**goals.features, "complexity": complexity},
    )


def lines_of(said: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the texts of a list in ``said``, each as one line; omit texts over 500 characters."""
    lines = (" ".join(str(each).split()) for each in said.get(name) or ())
    return tuple(dict.fromkeys(each for each in lines if 0 < len(each) <= 500))[:MOST]


def _labelled(text: str) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {"goals": [], "constraints": [], "criteria": []}
    name, is_fenced = None, False
    for line in map(str.strip, text.splitlines()):
        is_fenced ^= line.startswith("```")
        label, bullet = _LABEL.match(line), _BULLET.match(line)
        if label and not is_fenced:
            name = next(each for each in lines if label[each])
        elif is_fenced or not bullet:
            name = None
        value = label["text"] if label else line[bullet.end() :] if bullet else ""
        if name and _WORD.search(value):
            lines[name].append(" ".join(value.split()))
    return lines


def _sentences(text: str) -> Iterator[tuple[str, bool]]:
    for line in text.splitlines():
        line = line.strip()
        bullet = _BULLET.match(line)
        for part in _END.split(line[bullet.end() :] if bullet else line):
            part = " ".join(part.split())
            if _WORD.search(part):
                yield part, bullet is not None


def _named(text: str, capabilities: Sequence[str]) -> list[str]:
    words = _WORD.findall(text.casefold().replace("_", " ").replace("-", " "))
    sentence = f" {' '.join(words)} "
    return sorted(
        name
        for name in set(capabilities[:_MOST_NAMES])
        if len(name) >= 3
        and f" {' '.join(_WORD.findall(name.casefold().replace('_', ' ')))} " in sentence
    )
