"""Learning judged by recorded runs, on a few made ones."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.learning import trajectories
from benchmarks.learning.intervals import interval, of_mean
from benchmarks.learning.outside import OutsideMemory
from benchmarks.learning.trajectories import EPISODES, PLACEBO, known_tasks, measure, read
from bottega.db.pool import Database
from bottega.llm.builtin_embedder import BuiltinEmbedder

TOPICS = ("violin lessons", "frozen pizza", "bicycle tyres", "passport photos")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}]}


def answer(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "x", "name": "it", "content": content}


def made(path: Path) -> Path:
    """Write four tasks of four runs; those that order from the right shop are good."""
    runs = []
    for task, topic in enumerate(TOPICS):
        for trial in range(4):
            good = trial % 2 == task % 2
            asked = {"role": "user", "content": f"I need {topic} today."}
            shop = f"{topic.replace(' ', '_')}_{'best' if good else 'worst'}"
            messages = [
                asked,
                call("look", shop="any"),
                answer("found"),
                call("order", shop=shop),
                answer("ordered" if good else "Error: sold out"),
                call("never_answered"),
                {"role": "assistant", "content": "Done."},
            ]
            runs.append({"task_id": task, "reward": float(good), "traj": messages, "info": {}})
    path.write_text(json.dumps(runs))
    return path


def test_recorded_calls_have_the_result_that_follows_them(tmp_path: Path) -> None:
    trial = read(made(tmp_path / "runs.json"))[1]
    assert trial.tools == ["look", "order"]
    looked, ordered = trial.episode.trace or ()
    assert looked["result"] == "found"
    assert ordered["error"] == "Error: sold out"
    assert trial.question == "I need violin lessons today."


async def test_memory_of_a_known_task_ranks_its_better_run_first(
    database: Database, tmp_path: Path
) -> None:
    trials = read(made(tmp_path / "runs.json"))
    memory = OutsideMemory(database, BuiltinEmbedder())
    ranked = await measure(memory, known_tasks(trials))
    mixed = [each for each in ranked if each.gains[trajectories.BEST] > 0]
    assert mixed
    assert {each.gains[EPISODES] for each in mixed} == {0.5}
    assert mean(each.gains[PLACEBO] for each in mixed) < 0.4
    assert "over the placebo" in "\n".join(trajectories.table(ranked))


def test_intervals_are_over_clusters() -> None:
    def rate(sums: Any) -> Any:
        return sums[:, 0] / sums[:, 1]

    value, low, high = interval([(0, 10), (10, 10)] * 20, rate)
    assert value == 0.5
    # forty clusters, not four hundred single values: the deviation is 0.5 / sqrt(40)
    assert low == pytest.approx(0.345, abs=0.02)
    assert high == pytest.approx(0.655, abs=0.02)
    assert of_mean([0.25] * 3) == "+0.250 [+0.250, +0.250]"
