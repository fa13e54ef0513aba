"""Tasks with a hidden right way, and their results. Deterministic.

A task has a domain and a type. Three decisions determine its result: the order of three sub-agents
(each domain has a right one), the tool (each type has a right one), and, if that fails, the next
call (each tool's failure has a right one). All are drawn once per seed, independently: the right
way of one domain fits another only as often as a guess does.
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

# Probability of success of each part: done the right way, and otherwise.
ORDER_WELL = (0.95, 0.1)
TOOL_WELL = (0.85, 0.2)
RECOVERY_WELL = (0.9, 0.1)


@dataclass(frozen=True, slots=True)
class Task:
    """One task, with the same luck for all arms.

    Attributes:
        heeds: memory is followed, for each of the three decisions.
        guesses: the decisions without memory, 0 to 1.
        tells: the answer reports how the work was done.
        luck: a part succeeds if this is below its probability.
        elsewhere: another domain and type, for the placebo.
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
    """The right way by domain, type of task, and failed tool."""

    order: Mapping[str, tuple[str, ...]]
    tool: Mapping[str, str]
    recovery: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class World:
    """The right ways and the tasks.

    Attributes:
        rights: right ways with the number of their first task.
    """

    salt: UUID
    tasks: Sequence[Task]
    rights: Sequence[tuple[int, Right]]

    def right(self, number: int) -> Right:
        return [each for since, each in self.rights if since <= number][-1]


def world(seed: int, episodes: int, *, follows: float, tells: float, drift: bool = False) -> World:
    """Draw the right ways and tasks of a seed.

    Args:
        follows: probability that the model follows memory.
        tells: probability that an answer, and so its episode, reports how the work was done.
        drift: in the middle, change each domain's right order and each type's right tool.
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
    return choices[int(guess * len(choices))]
