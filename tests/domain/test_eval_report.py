"""The arithmetic of an eval's report."""

from collections.abc import Sequence
from itertools import product
from math import comb
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.agents.messages import AgentUsage
from bottega.events.data import OutcomeValue
from bottega.memory.patterns.evidence import Tally
from bottega.runs.evals import MOST_FAILURES, EvalRun, compare, report, target_report

OUTCOMES: Sequence[OutcomeValue] = ("SUCCESS", "PARTIAL", "FAILURE", "CANCELLED", "UNKNOWN")
TARGETS = [("clerk", 2), ("clerk", 1), ("other", 7)]


def ran(case: int, outcome: OutcomeValue, target: int = 0, *, is_over: bool = True) -> EvalRun:
    return EvalRun(case, target, UUID(int=1), is_over, outcome, "why")


@st.composite
def evals(draw: st.DrawFn) -> list[EvalRun]:
    cases, repeats = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    places = product(range(cases), range(repeats), range(len(TARGETS)))
    return [
        EvalRun(
            case,
            target,
            draw(st.none() | st.uuids()),
            draw(st.booleans()),
            draw(st.sampled_from(OUTCOMES)),
            usage=AgentUsage(input=draw(st.integers(0, 9))),
            duration_ms=draw(st.none() | st.floats(0, 1e6)),
        )
        for case, _, target in places
    ]


@given(evals())
def test_all_figures_of_a_report_fit_together(runs: list[EvalRun]) -> None:
    found = report(TARGETS, runs)
    assert (found["status"] == "done") == (found["over"] == found["total"] == len(runs))
    for number, ((agent, version), target) in enumerate(
        zip(TARGETS, found["targets"], strict=True)
    ):
        own = [each for each in runs if each.target == number]
        assert (target["agent"], target["version"]) == (agent, version)
        assert 0 <= target["passed"] <= target["judged"] <= len(own)
        assert target["judged"] == sum(each.is_over and each.outcome != "UNKNOWN" for each in own)
        not_passed = [each for each in own if each.is_over and each.outcome != "SUCCESS"]
        assert target["failures"] == not_passed
        if target["judged"] == 0:
            assert (target["pass_rate"], target["interval"]) == (None, None)
        else:
            low, high = target["interval"]
            assert 0 <= low < target["pass_rate"] + 1e-9
            assert target["pass_rate"] - 1e-9 < high <= 1
    pairs = [(each["a"], each["b"]) for each in found["comparisons"]]
    assert pairs == [("clerk@2", "clerk@1"), ("clerk@2", "other@7"), ("clerk@1", "other@7")]


@given(evals())
def test_a_comparison_the_other_way_round_swaps_wins_and_losses(runs: list[EvalRun]) -> None:
    a, b = ([each for each in runs if each.target == number] for number in (0, 1))
    one, other = compare(a, b), compare(b, a)
    assert (one["wins"], one["losses"]) == (other["losses"], other["wins"])
    assert (one["ties"], one["p"]) == (other["ties"], pytest.approx(other["p"]))
    assert one["wins"] + one["losses"] + one["ties"] <= len({each.case for each in runs})
    assert compare(a, a) == {"wins": 0, "losses": 0, "ties": compare(a, a)["ties"], "p": 1.0}


@given(st.integers(0, 12), st.integers(0, 12))
def test_p_is_that_of_the_two_sided_sign_test(wins: int, losses: int) -> None:
    a = [ran(case, "SUCCESS" if case < wins else "FAILURE") for case in range(wins + losses)]
    b = [ran(case, "FAILURE" if case < wins else "SUCCESS") for case in range(wins + losses)]
    n, most = wins + losses, max(wins, losses)
    tail = sum(comb(n, k) for k in range(most, n + 1)) / 2**n
    found = compare(a, b)
    assert (found["wins"], found["losses"], found["ties"]) == (wins, losses, 0)
    assert found["p"] == pytest.approx(min(1.0, 2 * tail))


def test_repeats_of_a_case_count_as_one_case() -> None:
    a = [ran(0, "SUCCESS"), ran(0, "SUCCESS"), ran(0, "FAILURE"), ran(1, "SUCCESS")]
    b = [ran(0, "SUCCESS"), ran(0, "FAILURE"), ran(0, "FAILURE"), ran(1, "SUCCESS")]
    assert compare(a, b) == {"wins": 1, "losses": 0, "ties": 1, "p": 1.0}


def test_a_case_that_is_not_judged_yet_is_compared_later() -> None:
    a = [ran(0, "SUCCESS"), ran(0, "SUCCESS", is_over=False), ran(1, "SUCCESS")]
    assert compare(a, [ran(0, "FAILURE"), ran(1, "UNKNOWN")])["wins"] == 0
    assert compare(a[:1], [ran(0, "FAILURE")])["wins"] == 1


def test_a_report_shows_what_its_runs_took() -> None:
    usage = AgentUsage.from_dict(
        {"input": 5, "output": 1, "cost": {"amount": "0.002", "currency": "USD", "complete": True}}
    )
    runs = [
        EvalRun(case, 0, UUID(int=case), True, "SUCCESS", usage=usage, duration_ms=took)
        for case, took in enumerate((30.0, 10.0, None, 200.0))
    ]
    found = target_report([*runs, EvalRun(4, 0, None, True, "CANCELLED", "cancelled")])
    assert (found["passed"], found["judged"], found["pass_rate"]) == (4, 5, 0.8)
    assert found["cost"] == {"amount": "0.008", "currency": "USD", "complete": True}
    assert found["latency_ms"] == 30.0
    assert found["runs"] == [UUID(int=case) for case in range(4)]
    assert len(target_report([ran(0, "FAILURE")] * 500)["failures"]) == MOST_FAILURES


@pytest.mark.parametrize(("good", "n", "low", "high"), [(0, 1, 0, 0.867), (8, 10, 0.505, 0.995)])
def test_interval_of_a_rate(good: int, n: int, low: float, high: float) -> None:
    assert Tally(good, n).interval == pytest.approx((low, high), abs=5e-4)
