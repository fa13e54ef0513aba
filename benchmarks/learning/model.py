"""A scripted model: it follows memory with a given probability, and guesses otherwise.

It reads memory as the service renders it. The first pattern about a decision counts, or else the
most frequent choice in the steps of the rendered successful runs. It does not notice if a text is
about another task: the benchmark measures if memory provides the right one.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.learning.world import AGENTS, ORDERS, RECOVERIES, TOOLS, guessed

_NAMES = re.compile(rf"\b(?:{'|'.join((*AGENTS, *TOOLS, *RECOVERIES))})\b")
_SAYS = re.compile(r"^\s*(?:Steps|Action|Approach): (.*?)(?: rather than .*)?$", re.MULTILINE)
_STEP = re.compile(r"^\s*earlier run: \d+\. lead: (\w+)", re.MULTILINE)
_CURED = re.compile(
    r"^\s*earlier run: \d+\. lead: (\w+).*\(worked after (\w+) failed\)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of the model.

    Attributes:
        heeded: it follows memory.
        guess: the decision without memory.
    """

    choice: tuple[str, ...]
    heeded: bool
    guess: tuple[str, ...]


def report(order: Sequence[str], tool: str, recovery: str | None) -> str:
    """Return the model's final answer: how it did the work."""
    text = f"Asked {', then '.join(order)}. Called {tool}."
    return text if recovery is None else f"{text} When {tool} failed, called {recovery}."


def order(texts: Sequence[str], heeds: bool, guess: float) -> Decided:
    own = guessed(ORDERS, guess)
    said = _first(_only(names, AGENTS) for names in _patterns(texts))
    if len(said) < 2:
        said = _most(
            asked for text in _successes(texts) if (asked := _only(_STEP.findall(text), AGENTS))
        )
    if not (heeds and said):
        return Decided(own, False, own)
    fitting = [each for each in ORDERS if _only(each, said) == said]
    return Decided(guessed(fitting, guess), True, own) if fitting else Decided(own, False, own)


def tool(texts: Sequence[str], heeds: bool, guess: float) -> Decided:
    said = _first(_only(names, TOOLS)[:1] for names in _patterns(texts)) or _most(
        called[:1] for text in _successes(texts) if (called := _only(_STEP.findall(text), TOOLS))
    )
    return _one(said, guessed(TOOLS, guess), heeds)


def recovery(
    failed: str, texts: Sequence[str], helped: Sequence[str], heeds: bool, guess: float
) -> Decided:
    """Decide on the call after a tool failed.

    Args:
        texts: memory from the start of the run.
        helped: memory about the failure.
    """
    said = _first(_only(names, RECOVERIES)[:1] for names in _patterns(helped))
    for several, by in ((helped, None), (texts, failed)):
        said = said or _most(
            (found[1],)
            for text in _successes(several)
            if (found := _CURED.search(text)) and by in (None, found[2])
        )
    return _one(said, guessed(RECOVERIES, guess), heeds)


def _one(said: tuple[str, ...], own: str, heeds: bool) -> Decided:
    return Decided(said, True, (own,)) if heeds and said else Decided((own,), False, (own,))


def _patterns(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the names in each pattern's advice, in order."""
    for text in texts:
        if text.startswith("[pattern"):
            yield _NAMES.findall(" ".join(_SAYS.findall(text)))


def _successes(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text.startswith("[SUCCESS"))


def _only(names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    known = frozenset(known)
    return tuple(dict.fromkeys(each for each in names if each in known))


def _first(said: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return next(filter(None, said), ())


def _most(said: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return max(Counter(said).items(), key=lambda each: each[1], default=((), 0))[0]
