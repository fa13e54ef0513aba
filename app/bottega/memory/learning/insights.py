"""Insights of earlier runs, for the prompts of later runs.

An insight is a sentence of an episode's reflection. Only runs that may see the episode get it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid5

from bottega.memory.episodes.episode import READ_OUTSIDE, Episode
from bottega.memory.text.identities import without_identities
from bottega.memory.text.injection import suspicious
from bottega.memory.text.summaries import cut

INSIGHT = "insight:"
"""Prefix of an insight's source in events; the insight's id follows."""
MOST = 3
"""Most insights in the prompts of a run."""
LONGEST = 2000
"""Most characters of an insight, which is the bound of what a person may write."""


_NEGATIONS = frozenset(
    (
        *("always", "do", "does", "don't", "doesn't", "never", "no", "non", "not"),
        *("immer", "kein", "keine", "nicht", "nie", "ne", "jamais", "pas", "toujours"),
        *("jamás", "nunca", "siempre", "mai", "sempre", "não", "nao"),
    )
)
"""Words with which a sentence says the opposite of another, in six languages."""


@dataclass(frozen=True, slots=True)
class FoundInsight:
    """An insight, and the relevant episodes whose reflections have it, best first."""

    id: UUID
    text: str
    episodes: tuple[Episode, ...]
    score: float


def insights_in(found: Sequence[tuple[Episode, float]], salt: UUID) -> list[FoundInsight]:
    """Return the insights of relevant episodes, most frequent first, then by score.

    The result omits texts that look like instructions to a model. Of insights that differ in a
    negation only, it has that of the newest episode.

    Args:
        found: relevant episodes and their scores, best first.
        salt: the tenant's salt for ids; equal sentences of a tenant are one insight.
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
    by_age = sorted(known, key=lambda each: max(one.at for one in each.episodes))
    latest = {_without_negations(each.text): each for each in by_age}
    return sorted(latest.values(), key=lambda each: (-len(each.episodes), -each.score, each.text))


def _without_negations(text: str) -> tuple[str, ...]:
    words = text.casefold().replace("\u2019", "'").split()
    return tuple(word for word in words if word not in _NEGATIONS) or (text,)


def _sentences(episode: Episode) -> Iterable[str]:
    said = (episode.reflection or {}).get("insights") or ()
    texts = (" ".join(each.split()) for each in said[:20])
    return [cut(text, LONGEST) for text in texts if text]


def rendered(insight: FoundInsight) -> str:
    """Render an insight for a prompt: a line about its source, then the sentence.

    The first line is trusted. The sentence is indented, so that it cannot imitate the first line.
    """
    newest = max(each.at for each in insight.episodes)
    imported = all(each.trust < READ_OUTSIDE for each in insight.episodes)
    authors = {str((each.reflection or {}).get("by")) for each in insight.episodes}
    by = "rules" if authors == {"rules"} else "a model or a person"
    source = "imported" if imported else "from own runs"
    head = f"insight by {by}, {source}, {len(insight.episodes)} of them, newest {newest:%Y-%m-%d}"
    return f"[{head}]\n  {without_identities(insight.text)}"
