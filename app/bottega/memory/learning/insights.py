"""Insights of earlier runs that a run is given: choice, assignment and evidence.

An insight is a sentence of an episode's reflection. Runs within the scope of that episode may be
given it, unless a random share has it withheld. Both leave a note in their own episode, and these
notes are the evidence: nothing else is stored, so that erasing an episode erases its part.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid5

import asyncpg

from bottega.memory.episodes.episode import READ_OUTSIDE, Episode
from bottega.memory.episodes.scope import LearningOptions, Scope
from bottega.memory.patterns.evidence import Tally, arm_of, worse
from bottega.memory.patterns.pattern import Arm, PatternState
from bottega.memory.text.identities import without_identities
from bottega.memory.text.injection import suspicious
from bottega.memory.text.summaries import cut

INSIGHT = "insight:"
"""Prefix of the event source for an insight; its id follows."""
MOST = 3
"""Most insights that a run is given, or has withheld."""
_EVIDENCE = "SELECT * FROM insight_outcomes($1::jsonb, $2, set_config('bottega.tenant', $3, true))"

Tallies = Mapping[UUID, tuple[Tally, Tally]]
"""Outcomes of the runs that were given an insight, and of those that had it withheld."""


@dataclass(frozen=True, slots=True)
class FoundInsight:
    """An insight, and the relevant episodes whose reflection has it, the best first."""

    id: UUID
    text: str
    episodes: tuple[Episode, ...]
    score: float


def insights_in(found: Sequence[tuple[Episode, float]], salt: UUID) -> list[FoundInsight]:
    """Return the insights of relevant episodes: most frequent first, then by the score.

    Texts that read like instructions to a model are left out.

    Args:
        found: episodes and their scores, the best first.
        salt: of the tenant; equal sentences of a tenant are one insight.
    """
    having: dict[str, list[tuple[Episode, float]]] = defaultdict(list)
    for episode, score in found:
        for text in dict.fromkeys(_sentences(episode)):
            having[text].append((episode, score))
    known = [
        FoundInsight(uuid5(salt, text), text, tuple(each for each, _ in some), some[0][1])
        for text, some in having.items()
        if suspicious(text) is None
    ]
    return sorted(known, key=lambda each: (-len(each.episodes), -each.score, each.text))


def _sentences(episode: Episode) -> Iterable[str]:
    """Return a reflection's sentences that may help; of those by rules, the ones on failures."""
    reflection = episode.reflection or {}
    said = reflection.get("insights")
    if not isinstance(said, list):
        return []
    most = len(reflection.get("failures") or ()) if reflection.get("by") == "rules" else 20
    texts = [" ".join(each.split()) for each in said[:most] if isinstance(each, str)]
    return [cut(text, 300) for text in texts if text]


async def insight_outcomes(
    pool: asyncpg.Pool, tenant_id: UUID, scope: Scope, ids: Sequence[UUID]
) -> Tallies:
    """Count how the scope's judged runs ended that were given an insight or had it withheld."""
    rows = await pool.fetch(_EVIDENCE, scope.document, [*map(str, ids)], str(tenant_id))
    found: defaultdict[UUID, list[Tally]] = defaultdict(lambda: [Tally(), Tally()])
    for row in rows:
        found[UUID(row["insight_id"])][row["arm"] == Arm.WITHHELD] = Tally(row["good"], row["n"])
    return {key: (given, withheld) for key, (given, withheld) in found.items()}


def assigned(
    found: Sequence[FoundInsight],
    tallies: Tallies,
    salt: UUID,
    run: UUID,
    options: LearningOptions,
) -> list[tuple[FoundInsight, Arm]]:
    """Choose insights for a run, and draw its arm for each. Pure.

    Leaves out those with which the scope's runs ended significantly worse than without.

    Args:
        run: the first of the runs that this one repeats, or itself.
    """
    none = Tally(), Tally()
    kept = [each for each in found if not worse(*tallies.get(each.id, none), options)]
    used = PatternState.VALIDATED
    return [(each, arm_of(used, salt, run, each.id, 1, options)) for each in kept[:MOST]]


def rendered(insight: FoundInsight) -> str:
    """Render an insight for a prompt: its source, then the sentence.

    The first line is trusted. The sentence is indented, so that it cannot imitate it.
    """
    newest = max(each.at for each in insight.episodes)
    imported = all(each.trust < READ_OUTSIDE for each in insight.episodes)
    authors = {str((each.reflection or {}).get("by")) for each in insight.episodes}
    by = "rules" if authors == {"rules"} else "a model or a person"
    source = "imported" if imported else "from own runs"
    head = f"insight by {by}, {source}, {len(insight.episodes)} of them, newest {newest:%Y-%m-%d}"
    return f"[{head}]\n  {without_identities(insight.text)}"


def noted(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the note for the run's episode about ``context.recalled``; ``None``: no insight."""
    source = str(data["source"])
    if not source.startswith(INSIGHT) or data.get("arm") is None:
        return None
    return {"id": source.removeprefix(INSIGHT), "arm": data["arm"]}
