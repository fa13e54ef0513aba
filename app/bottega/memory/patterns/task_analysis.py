"""Analysis of a task's text: goals, constraints, success criteria. Pure.

The analysis uses no model: a few typical words classify sentences and list items. This is coarse,
but deterministic and good enough to find similar tasks. No prompt contains the result.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.memory.patterns.pattern import Features

MOST = 10
"""Largest number of goals, of constraints and of criteria."""
LONGEST_ITEM = 300
"""Most characters of a goal, constraint or criterion."""
_MOST_NAMES = 200

_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])")  # noqa: RUF001 (CJK punctuation)
_BULLET = re.compile(r"(?:[-*+•–]|\d{1,3}[.)]|[a-z]\))\s+")  # noqa: RUF001 (en dash)
_WORD = re.compile(r"\w+")


def _any_of(words: str) -> re.Pattern[str]:
    """Compile a pattern of whole words; ``_`` stands for a space."""
    each = "|".join(re.escape(word).replace("_", r"\s") for word in words.split())
    return re.compile(rf"(?<!\w)(?:{each})(?!\w)")


_LIMITS = _any_of("""
    must must_not never at_most at_least no_more_than no_less_than not_more_than do_not don't cannot
    may_not only without within not_exceed no_later_than except unless avoid required forbidden
    deve devono devi mai al_massimo almeno non_più_di senza solo soltanto entro evita
    debe deben nunca como_máximo al_menos sin solamente antes_de
    doit doivent jamais au_plus au_moins sans seulement avant_le
    muss müssen niemals nie höchstens mindestens ohne nur nicht vermeide
""")
_TESTS = _any_of("""
    so_that until success successful successfully done_when done_if finished_when in_order_that
    make_sure ensure verify acceptance
    in_modo_che affinché finché successo riuscito assicurati
    para_que hasta_que éxito asegúrate
    afin_que jusqu'à_ce_que succès réussi
    damit bis_dass erfolgreich sicherstellen
""")
_POLITE = _any_of("please kindly per_favore por_favor s'il_vous_plaît bitte")
_ASKS = frozenset(
    re.findall(
        r"\w+",
        """
    add analyse analyze answer assess book build calculate call change check clean collect compare
    compute convert copy count create debug decide delete deploy describe design determine
    download draft edit estimate evaluate explain export extract fetch figure fill filter find fix
    forecast format gather generate get give identify implement import improve inspect install
    investigate list look make measure merge migrate monitor move open optimise optimize organise
    organize pay pick plan predict prepare print produce propose publish put query rank read
    recommend refactor remove rename repair replace report research resolve restart retrieve review
    rewrite run save schedule search select send set show solve sort split start stop store
    suggest summarise summarize tell test transfer translate try update upload use validate
    verify write
    i we can could would let what which who when where why how
    aggiorna analizza calcola cerca confronta controlla crea elenca genera invia leggi prepara
    riassumi scrivi spiega traduci trova verifica vorrei
    analiza busca calcula compara crea envía escribe explica prepara resume traduce
    analyse calcule cherche compare crée envoie explique prépare résume traduis trouve écris
    analysiere berechne erkläre erstelle finde prüfe schreibe sende suche vergleiche übersetze
    """,
    )
)


@dataclass(frozen=True, slots=True)
class Goals:
    goals: tuple[str, ...]  # sentences that ask for something; without any, the first sentence
    constraints: tuple[str, ...]  # sentences with limits
    criteria: tuple[str, ...]  # sentences about success
    complexity: float  # 0 to 1; grows with the length, the demands and the named tools
    features: Features


def analyse(
    task: str,
    *,
    domain: str | None = None,
    task_type: str | None = None,
    capabilities: Sequence[str] = (),
) -> Goals:
    """Analyse a task, deterministically and in time linear in its length.

    Args:
        capabilities: names of the available tools and agents.
    """
    text = task[:16_000]
    goals: dict[str, None] = {}
    constraints: dict[str, None] = {}
    criteria: dict[str, None] = {}
    demands = limits = 0
    for sentence, listed in _sentences(text):
        folded = sentence.casefold()
        limit, test = _LIMITS.search(folded), _TESTS.search(folded)
        if limit:
            constraints[sentence[:LONGEST_ITEM]] = None
        if test:
            # The clause from the matched word on. If folding changed the length, the position is
            # unknown, so the whole sentence is taken.
            start = test.start() if len(folded) == len(sentence) else 0
            criteria[sentence[start:][:LONGEST_ITEM]] = None
        limits += bool(limit) + bool(test)
        if _asks(folded) or (listed and not (limit or test)):
            goals[sentence[:LONGEST_ITEM]] = None
            demands += 1
    if not goals:
        goals = {sentence[:LONGEST_ITEM]: None for sentence, _ in _sentences(text[:2000])}
        goals = dict.fromkeys(list(goals)[:1])
    named = _named(text, capabilities)
    load = len(task) / 1500 + demands / 6 + limits / 10 + len(named) / 6
    complexity = round(load / (1 + load), 2)
    features: dict[str, Any] = {
        "domain": domain,
        "task_type": task_type,
        "complexity": complexity,
        "capabilities": sorted(set(capabilities))[:_MOST_NAMES],
        "tools_required": named,
    }
    return Goals(
        tuple(goals)[:MOST],
        tuple(constraints)[:MOST],
        tuple(criteria)[:MOST],
        complexity,
        {name: value for name, value in features.items() if value not in (None, [])},
    )


def refined(found: Goals, said: Mapping[str, Any]) -> Goals:
    """Replace parts of an analysis by parts that a person or a model gave."""
    complexity = said.get("complexity", found.complexity)
    return Goals(
        lines_of(said, "goals") or found.goals,
        lines_of(said, "constraints") or found.constraints,
        lines_of(said, "criteria") or found.criteria,
        complexity,
        {**found.features, "complexity": complexity},
    )


def lines_of(said: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of texts from ``said``, each on one line; omit texts of over 500 characters."""
    lines = (" ".join(str(each).split()) for each in said.get(name) or ())
    return tuple(dict.fromkeys(each for each in lines if 0 < len(each) <= 500))[:MOST]


def _sentences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each sentence or list item, with true for a list item."""
    for line in text.splitlines():
        line = line.strip()
        bullet = _BULLET.match(line)
        for part in _END.split(line[bullet.end() :] if bullet else line):
            part = " ".join(part.split())
            if _WORD.search(part):
                yield part, bullet is not None


def _asks(folded: str) -> bool:
    first = _WORD.search(folded)
    return (
        folded.endswith(("?", "？"))  # noqa: RUF001 (CJK punctuation)
        or (first is not None and first.group() in _ASKS)
        or _POLITE.search(folded) is not None
    )


def _named(text: str, capabilities: Sequence[str]) -> list[str]:
    """Return the capabilities that a task names, sorted; ``web_search`` also as "web search"."""
    words = _WORD.findall(text.casefold().replace("_", " ").replace("-", " "))
    said = f" {' '.join(words)} "
    return sorted(
        name
        for name in set(capabilities[:_MOST_NAMES])
        if len(name) >= 3
        and f" {' '.join(_WORD.findall(name.casefold().replace('_', ' ')))} " in said
    )
