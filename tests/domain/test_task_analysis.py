"""Features of a task, read from its words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.memory.patterns.task_analysis import LONGEST_ITEM, MOST, analyse

TASK = """Prepare the monthly report for the board. You must not use figures of April.
- Fetch the sales with sql_query
- Compare them with last year's; at most 3 charts
Send it to Maria so that she can print it today."""


def test_a_task_has_goals_and_features() -> None:
    found = analyse(
        TASK, domain="finance", task_type="report", capabilities=["sql_query", "web_search"]
    )
    assert found.goals == (
        "Fetch the sales with sql_query",
        "Compare them with last year's;",
        "at most 3 charts",
    )
    assert (found.constraints, found.criteria) == ((), ()), "nothing is guessed"
    assert found.features == {
        "domain": "finance",
        "task_type": "report",
        "complexity": found.complexity,
        "capabilities": ["sql_query", "web_search"],
        "tools_required": ["sql_query"],
    }


@pytest.mark.parametrize(
    ("goal", "constraints", "criteria"),
    [
        ("Goal", "Constraints", "Success criteria"),
        ("Obiettivo", "Vincoli", "Criteri di successo"),
        ("Objetivo", "Restricciones", "Criterios de éxito"),
        ("objectif", "contraintes", "critères de succès"),
        ("Ziel", "Einschränkungen", "Erfolgskriterien"),
        ("Objetivo", "Restrições", "Critérios de sucesso"),
    ],
)
def test_labels_name_fields(goal: str, constraints: str, criteria: str) -> None:
    task = f"{goal}: ship it\n{constraints}:\n- no frills\n- 3 MB\nMore.\n- a\n{criteria} : works"
    found = analyse(task)
    told = found.goals, found.constraints, found.criteria
    assert told == (("ship it",), ("no frills", "3 MB"), ("works",))
    for hidden in (f"> {task}".replace("\n", "\n> "), f"```\n{task}\n```", f'It says "{task}"'):
        assert "ship it" not in analyse(hidden).goals
    assert analyse(f"```\n{task}\n```").constraints == ()


def test_unknown_feature_is_left_out() -> None:
    assert set(analyse("Hello").features) == {"complexity"}
    assert analyse("").goals == ()
    assert analyse("Hello there. It rains.").goals == ("Hello there.",)


def test_tool_is_recognised_in_common_spellings() -> None:
    known = ["web_search", "search", "add"]
    assert analyse("Use Web Search for it", capabilities=known).features["tools_required"] == [
        "search",
        "web_search",
    ]
    assert "tools_required" not in analyse("address the researchers", capabilities=known).features


def test_task_with_more_parts_is_more_complex() -> None:
    short, longer = analyse("Add 1 and 2."), analyse(TASK)
    long = analyse("\n".join([TASK] * 20))
    assert 0 < short.complexity < longer.complexity < long.complexity < 1


@given(st.text(), st.lists(st.text(max_size=8), max_size=4))
def test_any_text_has_bounded_features(task: str, capabilities: list[str]) -> None:
    found = analyse(task, capabilities=capabilities)
    assert found == analyse(task, capabilities=capabilities)
    assert 0 <= found.complexity <= 1
    for items in (found.goals, found.constraints, found.criteria):
        assert len(items) <= MOST
        assert all(0 < len(item) <= LONGEST_ITEM for item in items)


@given(st.sampled_from(("must. ", "- ", "so that ", "a" * 50, "?" * 9)), st.integers(1, 20))
def test_features_of_a_long_text_are_bounded(piece: str, times: int) -> None:
    found = analyse(piece * times * 2000)
    assert len(found.goals) <= MOST
    assert all(len(item) <= LONGEST_ITEM for item in found.goals)
