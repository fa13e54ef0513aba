"""Tasks with a right way to do them that nobody tells, and how they go. Deterministic.

A task belongs to a domain and is of a type. Three things decide how it goes: the order in which
three sub-agents are asked (each domain has a right one), the tool that is called then (each type
has a right one), and, if that fails, what is called next (each tool's failure has a right answer).
All of it is drawn once per seed, independently: the right way of one domain is that of another
about as often as a guess would be right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import permutations
from random import Random
from typing import TypeVar
from uuid import UUID

DOMAINS = ("gardening", "railways")
TYPES = {"briefing": "Prepare a briefing on {}.", "forecast": "Forecast the demand for {}."}
AGENTS = ("collector", "writer", "auditor")
TOOLS = ("crawler", "archive", "almanac")
RECOVERIES = ("mirror", "replay", "repair")
ERRORS = {
    "crawler": "no answer from host{n}.example.org after {n} seconds",
    "archive": "the volume {n} is locked by another reader",
    "almanac": "checksum of page {n} does not match",
}
TOPICS = (
    "copper", "tulips", "night trains", "pensions", "roof gardens", "sleepers", "bonds", "hedges",
    "signals", "savings", "orchards", "tunnels", "credit", "compost", "ferries", "leases", "seeds",
    "bridges", "insurance", "roses", "stations", "taxes", "lawns", "freight", "audits", "bulbs",
)  # fmt: skip

T = TypeVar("T")

ORDERS = tuple(permutations(AGENTS))
PER_DAY = 20
START = datetime(2027, 1, 1, tzinfo=UTC)

# How often each part goes well if it is done the right way, and otherwise.
ORDER_WELL = (0.95, 0.1)
TOOL_WELL = (0.85, 0.2)
RECOVERY_WELL = (0.9, 0.1)


@dataclass(frozen=True, slots=True)
class Task:
    """One task, and the luck of whoever does it, which is the same for everybody.

    Attributes:
        heeds: whether memory is followed, if it says something, for each of the three decisions.
        guesses: what is done otherwise, 0 to 1.
        tells: whether the answer says how the work was done.
        luck: a part goes well if this is below how often it does.
        elsewhere: which of the other domains, and types, a placebo is about.
    """

    number: int
    run_id: UUID
    at: datetime
    domain: str
    task_type: str
    text: str
    heeds: tuple[bool, bool, bool]
    guesses: tuple[float, float, float]
    luck: tuple[float, float, float]
    tells: bool
    elsewhere: tuple[str, str, float]


@dataclass(frozen=True, slots=True)
class Right:
    """The right way, for each domain, type of task, and tool that failed."""

    order: Mapping[str, tuple[str, ...]]
    tool: Mapping[str, str]
    recovery: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class World:
    """What there is to be learned, and the tasks.

    Attributes:
        rights: from the number of which task on it is the right way.
    """

    salt: UUID
    tasks: Sequence[Task]
    rights: Sequence[tuple[int, Right]]

    def right(self, number: int) -> Right:
        """What is right for a task."""
        return [each for since, each in self.rights if since <= number][-1]


def world(seed: int, episodes: int, *, follows: float, tells: float, drift: bool = False) -> World:
    """
    Args:
        follows: how often the model does what memory says.
        tells: how often an answer says how the work was done, so that its episode does.
        drift: in the middle the right order of each domain, and the right tool of each type,
            become others.
    """
    random = Random(f"world {seed}")
    right = Right(
        {each: random.choice(ORDERS) for each in DOMAINS},
        {each: random.choice(TOOLS) for each in TYPES},
        {each: random.choice(RECOVERIES) for each in TOOLS},
    )
    rights = [(0, right)]
    if drift:
        other = replace(
            right,
            order={each: _other(random, ORDERS, was) for each, was in right.order.items()},
            tool={each: _other(random, TOOLS, was) for each, was in right.tool.items()},
        )
        rights.append((episodes // 2, other))
    random = Random(f"tasks {seed}")
    tasks = [_task(random, number, follows, tells) for number in range(episodes)]
    return World(UUID(int=random.getrandbits(128)), tasks, rights)


def _other(random: Random, choices: Sequence[T], but: T) -> T:
    return random.choice([each for each in choices if each != but])


def _task(random: Random, number: int, follows: float, tells: float) -> Task:
    domain, task_type = random.choice(DOMAINS), random.choice(list(TYPES))
    topic = f"{random.choice(TOPICS)} and {random.choice(TOPICS)}"
    return Task(
        number=number,
        run_id=UUID(int=random.getrandbits(128)),
        at=START + timedelta(days=number / PER_DAY),
        domain=domain,
        task_type=task_type,
        text=f"For the {domain} desk: {TYPES[task_type].format(topic)}",
        heeds=_three([random.random() < follows for _ in range(3)]),
        guesses=_three([random.random() for _ in range(3)]),
        luck=_three([random.random() for _ in range(3)]),
        tells=random.random() < tells,
        elsewhere=(
            _other(random, DOMAINS, domain),
            _other(random, list(TYPES), task_type),
            random.random(),
        ),
    )


def _three(values: Sequence[T]) -> tuple[T, T, T]:
    one, two, three = values
    return one, two, three


def guessed(choices: Sequence[T], guess: float) -> T:
    """What a guess falls on."""
    return choices[int(guess * len(choices))]
