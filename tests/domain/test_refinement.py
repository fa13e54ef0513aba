"""Refinement: narrowing, merging and removing patterns."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.patterns import applies, holds
from bottega.conditions import check
from bottega.memory.patterns.evidence import Tally
from bottega.memory.patterns.pattern import (
    Applicability,
    Category,
    Content,
    ContentKind,
    Evidence,
    Features,
    Guide,
    Lifecycle,
    Pattern,
    PatternState,
)
from bottega.memory.patterns.refinement import (
    Applied,
    generalised,
    likeness,
    merged,
    narrowed,
    narrowing,
    of_low_value,
    started_over,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
VALIDATED = PatternState.VALIDATED

names = st.sampled_from(["a", "b", "c"])
some = st.lists(names, max_size=3, unique=True).map(tuple)
ranges = st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)).map(
    lambda two: (min(two), max(two))
)
conditions = st.lists(
    st.builds(lambda value: {"feature": "tool", "op": "eq", "value": value}, names), max_size=2
).map(tuple)
applicabilities = st.builds(
    Applicability,
    problem_types=some,
    domains=some,
    complexity=ranges,
    capabilities=some,
    conditions=conditions,
    anti_conditions=conditions,
)
tasks = st.fixed_dictionaries(
    {},
    optional={
        "task_type": names,
        "domain": names,
        "tool": names,
        "complexity": st.floats(0, 1),
        "capabilities": st.lists(names, max_size=3),
    },
)


def pattern(number: int = 1, *, good: int = 18, n: int = 20, **more: Any) -> Pattern:
    said: dict[str, Any] = {
        "category": Category.SEQUENCE,
        "content": Content(ContentKind.PROCEDURE, {"steps": ["Look first."]}, uses=("look", "ask")),
        "applicability": Applicability(problem_types=("report",), domains=("office",)),
        "evidence": Evidence(applications=n, success_rate=good / n if n else None),
        "lifecycle": Lifecycle(VALIDATED),
        "trust": 3,
        "updated_at": NOW,
    }
    return Pattern(id=UUID(int=number), name=f"p{number}", **(said | more))


def went(*several: tuple[Features, int, int]) -> list[Applied]:
    """Build applications: per task a number of good and a number of bad ones."""
    return [
        Applied(features, good)
        for features, well, badly in several
        for good in [True] * well + [False] * badly
    ]


class TestNarrowing:
    def test_value_where_the_pattern_fails_becomes_an_anti_condition(self) -> None:
        found = narrowing(
            went(({"domain": "office"}, 30, 2), ({"domain": "law"}, 1, 12), ({}, 6, 0))
        )
        assert found is not None
        assert found.condition == {"feature": "domain", "op": "eq", "value": "law"}
        assert (found.inside, found.outside) == (Tally(36, 38), Tally(1, 13))
        assert found.reason == (
            "narrowed to where not domain eq 'law': 36 of 38 went well there, 1 of 13 elsewhere"
        )

    def test_list_member_is_found(self) -> None:
        found = narrowing(went(({"tools": ["look", "ask"]}, 0, 9), ({"tools": ["look"]}, 20, 0)))
        assert found is not None
        assert found.condition == {"feature": "tools", "op": "contains", "value": "ask"}

    @pytest.mark.parametrize(
        "applied",
        [
            [],
            went(({"domain": "office"}, 9, 9)),  # nothing differs
            went(({"domain": "office"}, 10, 3), ({"domain": "law"}, 9, 4)),  # by chance
            went(({"domain": "office"}, 4, 0), ({"domain": "law"}, 0, 40)),  # too few are left
            went(({"domain": "office"}, 40, 0), ({"domain": "law"}, 0, 4)),  # … or are told apart
        ],
    )
    def test_no_value_is_found_without_a_difference(self, applied: Sequence[Applied]) -> None:
        assert narrowing(applied) is None

    @given(st.lists(st.tuples(tasks, st.booleans()), max_size=40))
    def test_found_value_separates_as_reported(self, applied: list[tuple[Features, bool]]) -> None:
        found = narrowing([Applied(*each) for each in applied])
        if found is not None:
            inside = [good for task, good in applied if not holds(found.condition, task)]
            assert found.inside == Tally(sum(inside), len(inside))
            assert found.inside.rate > found.outside.rate
            assert narrowed(Applicability(), found) is not None

    def test_narrowing_is_not_repeated(self) -> None:
        found = narrowing(went(({"domain": "a"}, 30, 0), ({"domain": "b"}, 0, 12)))
        assert found is not None
        once = narrowed(Applicability(), found)
        assert once is not None
        assert once.anti_conditions == (found.condition,)
        assert narrowed(once, found) is None


class TestSimilar:
    @given(applicabilities, applicabilities)
    def test_similarity_is_a_symmetric_share(
        self, one: Applicability, other: Applicability
    ) -> None:
        a, b = pattern(1, applicability=one), pattern(2, applicability=other)
        assert 0 <= likeness(a, b) <= 1
        assert likeness(a, b) == likeness(b, a)
        assert likeness(a, a.with_changes(id=UUID(int=9))) == 1

    @given(applicabilities, applicabilities, tasks)
    def test_merged_pattern_applies_wherever_either_does(
        self, one: Applicability, other: Applicability, task: Features
    ) -> None:
        both = generalised([one, other])
        if any(applies(pattern(applicability=each), task) for each in (one, other)):
            assert applies(pattern(applicability=both), task)

    def test_merged_pattern_keeps_the_best_known_text(self) -> None:
        sure = Evidence(confidence=0.9, applications=9, mined_from=(UUID(int=7),))
        best = pattern(2, evidence=sure, summary="best", guide=Guide(risks=("b",)), trust=2)
        one = merged([pattern(1, guide=Guide(risks=("a",))), best])
        assert (one.name, one.summary, one.trust, one.state) == ("p2", "best", 2, "CANDIDATE")
        assert one.evidence == Evidence(mined_from=(UUID(int=7),))
        assert one.guide.risks == ("b", "a")
        assert one.id is None


class TestRemoval:
    def candidate(self, good: int, n: int, **evidence: Any) -> Pattern:
        made = pattern(good=good, n=n, lifecycle=Lifecycle(PatternState.CANDIDATE))
        return made.with_changes(evidence=replace(made.evidence, **evidence))

    def test_significant_contrary_evidence_removes_a_candidate(self) -> None:
        assert of_low_value(self.candidate(1, 11), NOW) is not None
        assert of_low_value(self.candidate(1, 10), NOW) is None
        assert of_low_value(self.candidate(0, 7), NOW) is None

    def test_candidate_without_effect_at_its_last_look_is_removed(self) -> None:
        tried = self.candidate(32, 64)
        life = replace(tried.lifecycle, looks=64, decision="32 of 64 with it")
        assert (
            of_low_value(tried.with_changes(lifecycle=life), NOW)
            == "low confidence: 32 of 64 with it"
        )
        assert of_low_value(tried.with_changes(lifecycle=replace(life, looks=32)), NOW) is None

    def test_unused_candidate_is_removed_in_time(self) -> None:
        fresh = self.candidate(0, 0)
        assert of_low_value(fresh, NOW + timedelta(days=90)) is None
        late = NOW + timedelta(days=91)
        assert of_low_value(fresh, late) == "low use: not given for 90 days"
        used = fresh.with_changes(
            lifecycle=replace(fresh.lifecycle, last_used=NOW + timedelta(days=50))
        )
        assert of_low_value(used, late) is None

    def test_only_candidates_are_removed(self) -> None:
        assert of_low_value(pattern(good=0), NOW) is None

    def test_restarted_pattern_loses_its_evidence_but_not_its_sources(self) -> None:
        was = pattern(evidence=Evidence(mined_from=(UUID(int=7),), confidence=0.9, applications=9))
        now = started_over(was)
        assert (now.version, now.state, now.lifecycle.looks) == (2, PatternState.CANDIDATE, 0)
        assert now.evidence == Evidence(mined_from=(UUID(int=7),))


@pytest.mark.parametrize(
    "strange",
    [{"n": 10**400}, {"n": -1e308}, {"n": "x" * 201}, {"n": "\0"}, {"A b": "x"}, {"n": [{}]}],
)
def test_features_that_patterns_may_not_use_are_skipped(strange: dict[str, Any]) -> None:
    good, bad = {**strange, "domain": "office"}, {"domain": "law"}
    found = narrowing([Applied(good, True)] * 20 + [Applied(bad, False)] * 20)
    assert found is not None
    check(found.condition)
    assert found.condition["feature"] == "domain"
