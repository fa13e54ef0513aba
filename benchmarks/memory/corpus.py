"""A corpus of tasks and questions with known answers.

The generator decides on relevance (the same intent for the same entity, the same ticket, the same
kind of failure) before it writes any text. Texts are never compared. A seed determines the corpus.
Outcome, age and accesses are independent of relevance, except in three classes: ``old`` (all
relevant tasks are three to six months old, and recent tasks share their words), ``aged`` (the same
beyond six months, where only close episodes may be found) and ``latest`` (only a topic's tasks of
the last two weeks are relevant).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from benchmarks.memory.intents import ENTITIES, Failure, Intent, failures, intents

LATEST_DAYS = 14
OLD_DAYS = (90.0, 175.0)
AGED_DAYS = (185.0, 360.0)
_MOST_LOVED = 5.0  # times as many tasks as the least loved topic

Topic = tuple[Intent, str]
"""A task's subject: an intent and its entity."""


@dataclass(frozen=True, slots=True)
class Told:
    """An episode with the facts of its generation.

    ``steps`` are tools. ``kind`` is the purpose of its topic: plain, old, aged, latest, italian.
    ``age_days`` is 0 to 360.
    """

    number: int
    topic: Topic
    kind: str
    ticket: str
    age_days: float
    outcome: str
    failure: Failure | None
    accesses: int
    task: str
    result: str
    errors: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Query:
    """A question, its class, and the numbers of the relevant episodes."""

    text: str
    relevant: frozenset[int]
    domain: str | None = None
    failures_only: bool = False
    name: str = ""


Asked = tuple[Query, tuple[str | None, str | None]]
"""A question and its subject: intent, entity."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Episodes and questions.

    ``about`` holds the meaning of each text, for an embedder that understands: the intent and the
    entity, if the text has them.
    """

    episodes: Sequence[Told]
    queries: Sequence[Query]
    about: dict[str, tuple[str | None, str | None]]


def corpus(seed: int, size: int = 5_000, per_class: int = 40) -> Corpus:
    """Generate ``size`` episodes, and ``per_class`` questions of each class."""
    random = Random(seed)
    plans = _plans(random, size)
    episodes = [
        _told(random, number, topic, kind, age, ticket)
        for number, (topic, kind, age, ticket) in enumerate(plans)
    ]
    index = Index(episodes)
    about: dict[str, tuple[str | None, str | None]] = {
        told.task: (told.topic[0].key, told.topic[1]) for told in episodes
    }
    queries = []
    for name, ask in CLASSES.items():
        for query, meaning in _distinct(per_class, partial(ask, random, index)):
            queries.append(replace(query, name=name))
            about[query.text] = meaning
    return Corpus(episodes, queries, about)


def _distinct(count: int, ask: Callable[[], "Asked"]) -> list["Asked"]:
    found: dict[str, Asked] = {}
    for _ in range(count * 20):
        if len(found) == count:
            break
        asked = ask()
        found[asked[0].text] = asked
    return list(found.values())


# Episodes


def _plans(random: Random, size: int) -> list[tuple[Topic, str, float, str]]:
    """Return topic, kind, age in days and ticket of each episode; shuffled."""
    pairs: list[Topic] = [(intent, entity) for intent in intents() for entity in ENTITIES]
    random.shuffle(pairs)
    share = max(3, size // 80)  # topics of each special kind
    special = {"old": share, "aged": share, "latest": share, "italian": share * 3 // 2}
    plans: list[tuple[Topic, str, float, str]] = []
    for kind, count in special.items():
        for topic in [pairs.pop() for _ in range(min(count, len(pairs) // 4))]:
            plans += [(topic, kind, age, "") for age in _ages(random, kind)]
    plain = pairs[: max(4, size // 13)]
    weights = [min(random.paretovariate(1.5), _MOST_LOVED) for _ in plain]
    rest = random.choices(plain, weights, k=max(0, size - len(plans)))
    plans += [(topic, "plain", _age(random), "") for topic in rest]
    plans = _ticketed(random, plans[:size])
    random.shuffle(plans)
    return plans


def _ages(random: Random, kind: str) -> list[float]:
    if kind in ("old", "aged"):
        between = OLD_DAYS if kind == "old" else AGED_DAYS
        return [random.uniform(*between) for _ in range(random.randint(1, 4))]
    if kind == "latest":
        recent = [random.uniform(0, LATEST_DAYS) for _ in range(random.randint(1, 3))]
        return recent + [random.uniform(*OLD_DAYS) for _ in range(random.randint(4, 8))]
    return [_age(random) for _ in range(random.randint(2, 12))]


def _age(random: Random) -> float:
    """Draw an age; two in five are below three weeks."""
    return random.uniform(0, 20) if random.random() < 0.4 else random.uniform(0, OLD_DAYS[1])


def _ticketed(
    random: Random, plans: list[tuple[Topic, str, float, str]]
) -> list[tuple[Topic, str, float, str]]:
    """Let one to three successive tasks of a topic share a ticket."""
    numbers = random.sample(range(1_000, 99_999), len(plans))
    found: list[tuple[Topic, str, float, str]] = []
    left, last, ticket = 0, None, ""
    for (topic, kind, age, _), number in zip(
        sorted(plans, key=lambda plan: (plan[0][0].key, plan[0][1])), numbers, strict=True
    ):
        if left == 0 or topic != last:
            ticket = f"{topic[0].domain[:3].upper()}-{number}"
            left, last = random.randint(1, 3), topic
        left -= 1
        found.append((topic, kind, age, ticket))
    return found


_DETAILS = (
    "The result is needed by the end of the week.",
    "Please keep the budget below {n} EUR.",
    "Do not change anything that other teams use.",
    "We did something like this for {other} before.",
    "Explain each step and list what is still open.",
    "The customer has asked about it {k} times.",
    "Use only data from the last {k} months.",
    "It concerns the region eu-west-{k}.",
    "A manager has to approve the result.",
    "Work together with the team of {other}.",
)
_DETAILS_IT = (
    "Il risultato serve entro la fine della settimana.",
    "Per favore restare sotto i {n} EUR di spesa.",
    "Non cambiare nulla di ciò che usano gli altri gruppi.",
    "Abbiamo fatto qualcosa di simile per {other}.",
    "Spiegare ogni passo ed elencare ciò che resta aperto.",
)
_RESULTS = (
    "Finished for {e}: {k} changes, checked with {tool}, report attached.",
    "All {k} points are settled and {e} has confirmed the result.",
    "The work took {n} minutes; a summary went to the team of {e}.",
    "Most of it is done, {k} questions remain open with {e}.",
)
_RESULTS_IT = (
    "Finito per {e}: {k} modifiche, verificate con {tool}.",
    "Tutti i {k} punti sono chiusi e {e} ha confermato.",
)
_COMMON_TOOLS = ("search_notes", "write_file", "http_get", "calculator")


def _told(random: Random, number: int, topic: Topic, kind: str, age: float, ticket: str) -> Told:
    intent, entity = topic
    outcome = random.choices(
        ("SUCCESS", "PARTIAL", "FAILURE", "CANCELLED"), (0.65, 0.12, 0.2, 0.03)
    )[0]
    ways = [way for way in failures() if way.domain == intent.domain]
    failure = random.choice(ways) if outcome == "FAILURE" else None
    steps = [random.choice(ways).tool, *random.sample(_COMMON_TOOLS, random.randint(1, 3))]
    if failure is not None:
        steps.append(failure.tool)

    def fill(text: str) -> str:
        return text.format(
            e=entity,
            n=random.randint(100, 9_999),
            k=random.randint(2, 12),
            other=random.choice(ENTITIES),
            tool=steps[0],
        )

    italian = kind == "italian"
    phrase = intent.italian_stored if italian else random.choice(intent.stored)
    details = random.sample(_DETAILS_IT if italian else _DETAILS, random.randint(1, 4))
    task = f"{fill(phrase)} (ticket {ticket}). " + " ".join(fill(detail) for detail in details)
    error = f"{failure.type} in {failure.tool}: {fill(failure.message)}" if failure else ""
    return Told(
        number=number,
        topic=topic,
        kind=kind,
        ticket=ticket,
        age_days=age,
        outcome=outcome,
        failure=failure,
        accesses=int(random.paretovariate(1.0)) - 1,
        task=task[0].upper() + task[1:],
        result=error or fill(random.choice(_RESULTS_IT if italian else _RESULTS)),
        errors=error,
        steps=tuple(steps),
    )


# Questions


class Index:
    """Episodes by topic, intent, ticket and kind of failure."""

    def __init__(self, episodes: Sequence[Told]) -> None:
        self.episodes = episodes
        self.by_topic: dict[Topic, list[Told]] = {}
        self.by_intent: dict[str, list[Told]] = {}
        self.by_ticket: dict[str, list[Told]] = {}
        self.by_failure: dict[Failure, list[Told]] = {}
        for told in episodes:
            self.by_topic.setdefault(told.topic, []).append(told)
            self.by_intent.setdefault(told.topic[0].key, []).append(told)
            self.by_ticket.setdefault(told.ticket, []).append(told)
            if told.failure is not None:
                self.by_failure.setdefault(told.failure, []).append(told)
        self.topics = {
            kind: sorted(
                {told.topic for told in episodes if told.kind == kind},
                key=lambda topic: (topic[0].key, topic[1]),
            )
            for kind in ("plain", "old", "aged", "latest", "italian")
        }


_WORD = re.compile(r"[^\W\d_]{4,}")
_SMALL_WORDS = {
    "from",
    "with",
    "without",
    "that",
    "this",
    "before",
    "after",
    "until",
    "more",
    "what",
}
_NOISE = (
    "I have been working on many things this week and would like to know how this was done.",
    "Somebody in the team said that we had the same question some time ago, but nobody knows when.",
    "Before we start I want to see what the result was and which problems came up on the way.",
    "Please look at what is there, tell me what should be changed, and list the open points.",
)


def _about(told: Sequence[Told]) -> frozenset[int]:
    return frozenset(each.number for each in told)


def _of_topic(index: Index, topic: Topic, text: str, domain: str | None = None) -> Asked:
    query = Query(text, _about(index.by_topic[topic]), domain)
    return query, (topic[0].key, topic[1])


def _plain(random: Random, index: Index, kind: str = "plain") -> tuple[Topic, str]:
    topic = random.choice(index.topics[kind])
    return topic, random.choice(topic[0].stored).format(e=topic[1])


def _some_words(random: Random, text: str, entity: str, count: int) -> list[str]:
    """Return ``count`` longer words of the text, in order, and the entity."""
    found = [word for word in _WORD.findall(text.replace(entity, "")) if word not in _SMALL_WORDS]
    chosen = set(random.sample(found, min(count, len(found))))
    return [word for word in found if word in chosen] + [entity]


def _verbatim(random: Random, index: Index) -> Asked:
    topic, phrase = _plain(random, index)
    return _of_topic(index, topic, phrase)


def _paraphrase(random: Random, index: Index) -> Asked:
    topic, _ = _plain(random, index)
    return _of_topic(index, topic, random.choice(topic[0].asked).format(e=topic[1]))


def _meaning(random: Random, index: Index) -> Asked:
    """Ask for an intent in other words, for any entity."""
    intent = random.choice([each for each, _ in index.topics["plain"]])
    text = random.choice(intent.asked).format(e=random.choice(("a company", "one client")))
    told = [each for each in index.by_intent[intent.key] if each.kind != "italian"]
    return Query(text, _about(told)), (intent.key, None)


def _typos(random: Random, index: Index) -> Asked:
    topic, phrase = _plain(random, index)
    text = _WORD.sub(lambda word: _mistyped(random, word.group()), phrase)
    return _of_topic(index, topic, text)


def _mistyped(random: Random, word: str) -> str:
    """Swap two letters, omit one, or double one, in half of the words."""
    place = random.randrange(1, len(word) - 1)
    before, here, after = word[:place], word[place], word[place + 1 :]
    return random.choice(
        (
            word,
            word,
            word,
            before + after[0] + here + after[1:],
            before + after,
            before + here + here + after,
        )
    )


def _identifier(random: Random, index: Index) -> Asked:
    told = random.choice(index.episodes)
    text = random.choice(("{t}", "what happened with {t}", "status of ticket {t}?"))
    query = Query(text.format(t=told.ticket), _about(index.by_ticket[told.ticket]))
    return query, (None, None)


def _long(random: Random, index: Index) -> Asked:
    topic, phrase = _plain(random, index)
    words = " ".join(_some_words(random, phrase, topic[1], 3))
    first, second, third = random.sample(_NOISE, 3)
    return _of_topic(index, topic, f"{first} It is about this: {words}. {second} {third}")


def _italian(random: Random, index: Index) -> Asked:
    topic = random.choice(index.topics["italian"])
    text = topic[0].italian_asked.format(e=topic[1])
    if random.random() < 0.5:
        phrase = topic[0].italian_stored.format(e=topic[1])
        text = "come abbiamo fatto per " + " ".join(_some_words(random, phrase, topic[1], 2))
    return _of_topic(index, topic, text)


def _short(random: Random, index: Index) -> Asked:
    topic, phrase = _plain(random, index)
    return _of_topic(index, topic, " ".join(_some_words(random, phrase, topic[1], 1)))


def _domain(random: Random, index: Index) -> Asked:
    topic, phrase = _plain(random, index)
    text = " ".join(_some_words(random, phrase, topic[1], 1))
    return _of_topic(index, topic, "anything about " + text, domain=topic[0].domain)


def _old(random: Random, index: Index, kind: str = "old") -> Asked:
    topic, phrase = _plain(random, index, kind)
    return _of_topic(index, topic, " ".join(_some_words(random, phrase, topic[1], 3)))


def _latest(random: Random, index: Index) -> Asked:
    topic, phrase = _plain(random, index, "latest")
    told = [each for each in index.by_topic[topic] if each.age_days <= LATEST_DAYS]
    return Query(phrase, _about(told)), (topic[0].key, topic[1])


def _failures(random: Random, index: Index) -> Asked:
    """Ask for failures of the same kind, with another number and entity."""
    failure = random.choice([each for each in failures() if each in index.by_failure])
    message = failure.message.format(n=random.randint(100, 9_999), e=random.choice(ENTITIES))
    relevant = _about(index.by_failure[failure])
    return Query(f"{failure.type}: {message}", relevant, failures_only=True), (None, None)


CLASSES: dict[str, Callable[[Random, Index], Asked]] = {
    "verbatim": _verbatim,
    "paraphrase": _paraphrase,
    "meaning": _meaning,
    "typos": _typos,
    "identifier": _identifier,
    "long": _long,
    "italian": _italian,
    "short": _short,
    "domain": _domain,
    "old": _old,
    "aged": partial(_old, kind="aged"),
    "latest": _latest,
    "failures": _failures,
}
