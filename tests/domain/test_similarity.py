"""Similarity of episodes for consolidation."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bottega.memory.episodes.maintenance import groups as groups_of
from bottega.memory.episodes.maintenance import task_key

NOW = datetime(2026, 11, 21, tzinfo=UTC)
WINDOW = timedelta(days=7)
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=80)


def key(text: str, **more: Any) -> bytes | None:
    return task_key({"original_input": text, "goals": [], **more})


TASKS = (
    "Summarise the quarterly sales report and send it to Maria",
    "Delete order 42 of customer ACME-7 unless 12.50 euros were paid before 12:30 by wire",
    "Don't restart the database, but check why the nightly job did not finish",
    "Riassumi il verbale della riunione e inviane una copia al direttore",
)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "written",
    [
        lambda text: f"  {text}.  ",
        lambda text: text[0].lower() + text[1:],
        lambda text: text.replace(" ", " \n\t"),
        lambda text: text.replace(" ", "\N{NO-BREAK SPACE}"),
    ],
)
def test_spacing_and_a_full_stop_make_no_difference(task: str, written: Any) -> None:
    assert key(written(task)) == key(task) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Please delete the logs", "Delete the logs"),
        ("Hello, delete logs. Thanks!", "Delete the logs"),
        ("Delete the logs!", "delete logs"),
        ("Delete order 42.", "Delete order 42"),
        ('Print "ready".', 'Print "ready"'),
        ("Write a report of an hour", "Write report of hour"),
        ("Per favore, cancella il file. Grazie", "Cancella file"),
    ],
)
def test_courtesy_articles_and_end_marks_make_no_difference(one: str, other: str) -> None:
    assert key(one) == key(other) is not None


def test_two_codings_of_a_letter_make_no_difference() -> None:
    assert key("Explain cafe\u0301 culture") == key("explain caf\u00e9 culture") is not None


NEAR_MISSES = [
    # numbers, and their units and signs
    ("Delete order 42", "Delete order 43"),
    ("Delete order 42", "Delete order 4 2"),
    ("Refund 10 dollars", "Refund 10 euros"),
    ("Refund $10", "Refund €10"),
    ("Refund $10", "Refund 10"),
    ("Raise it by 5%", "Raise it by 5"),
    ("Set it to -5", "Set it to 5"),
    ("Set it to 5 - 3", "Set it to 5 3"),
    ("Set it to 1.5", "Set it to 15"),
    ("Set it to 1,5", "Set it to 1.5"),
    ("Set it to 1,000", "Set it to 1, 000"),
    ("Set it to 5 mW", "Set it to 5 MW"),
    ("Set it to 5mW", "Set it to 5MW"),
    ("Wait 5 m", "Wait 5 s"),
    ("Compute 10\u00b2", "Compute 102"),
    ("Compute 5!", "Compute 5"),
    ("Order \u2460 item", "Order 1 item"),
    ("Pay \u0663 bills", "Pay \u0664 bills"),
    ("Pay \uff13 bills", "Pay \uff14 bills"),
    ("Send two letters", "Send three letters"),
    ("Invia due lettere", "Invia tre lettere"),
    ("Retry if x > 5", "Retry if x < 5"),
    ("Retry if x == 5", "Retry if x != 5"),
    ("Meet at 12:30", "Meet at 1230"),
    ("Use Python 3.11", "Use Python 3.1.1"),
    ("Install v2", "Install v2-beta"),
    # negations
    ("Do not delete the logs", "Do delete the logs"),
    ("Do not delete the logs", "Delete the logs"),
    ("Don't delete the logs", "Delete the logs"),
    ("Deploy with tests", "Deploy without tests"),
    ("Never retry", "Retry"),
    ("Show unpaid bills", "Show paid bills"),
    ("Show non-urgent mails", "Show urgent mails"),
    ("Non cancellare il file", "Cancellare il file"),
    ("Procedi senza backup", "Procedi con backup"),
    ("Non ho ancora finito", "Ho ancora finito"),
    ("Invia né copie né originali", "Invia copie e originali"),
    ("Match !important", "Match important"),
    ("Is it done?", "Is it done"),
    # action, time, place, recipient
    ("Enable the billing", "Disable the billing"),
    ("Add Ann to the team", "Remove Ann from the team"),
    ("Attiva l'allarme", "Disattiva l'allarme"),
    ("Restart before the backup", "Restart after the backup"),
    ("Copy prod to staging", "Copy staging to prod"),
    ("Ann pays Bob", "Bob pays Ann"),
    ("Increase the limit", "Decrease the limit"),
    ("Send all mails", "Send mails"),
    ("Send the first mail", "Send the last mail"),
    ("Send this and that", "Send this or that"),
    ("Just delete the logs", "Delete the logs"),
    ("Delete my files", "Delete your files"),
    ("Send me the report", "Send the report"),
    ("Invia a Maria", "Invia Maria"),
    ("Le invia il report", "Gli invia il report"),
    ("Lo cancella", "La cancella"),
    ("Sum from A to B", "Sum from B to A"),
    # names
    ("Notify IT about the outage", "Notify it about the outage"),
    ("Ask US partners", "Ask us partners"),
    ("Take vitamin A daily", "Take vitamin daily"),
    ("Choose plan a for the team", "Choose plan for the team"),
    ("Compare C++ with Java", "Compare C with Java"),
    ("Compare C# with Java", "Compare C with Java"),
    ("Open README.md", "Open readme.md"),
    ("Open .env", "Open env"),
    ("Open /tmp/a", "Open tmp/a"),
    ("Open a/b", "Open a b"),
    ("cd ..", "cd ."),
    ("Delete *.py", "Delete py"),
    ("Delete [ab] files", "Delete (ab) files"),
    ("Write to ann@a.com", "Write to ann@b.com"),
    ('Delete "the report"', "Delete the report"),
    ('Find "Apple"', 'Find "apple"'),
    ('Say "not now"', 'Say "now"'),
    ("Call user_id", "Call userid"),
    ("Check Ma\u00dfe", "Check Masse"),
    ("Visit Paris", "Visit Rome"),
    ("Draw \u0430", "Draw a"),
    ('Write "a report"', 'Write "report"'),
    ('Say "please"', "Say"),
    ("Draw a \U0001f600", "Draw a \U0001f622"),
    ("now here", "nowhere"),
]


@pytest.mark.parametrize(("one", "other"), NEAR_MISSES)
def test_near_misses_are_different(one: str, other: str) -> None:
    assert key(one) != key(other)
    assert key(one) == key(f"{one} ") is not None


@given(ANY_TEXT)
def test_any_text_has_one_key_which_spacing_keeps(text: str) -> None:
    assert key(text) == key(f"  {text}\n")


@pytest.mark.parametrize("text", ["", "  ", "?!", "...", "\U0001f600"])
def test_text_without_words_has_no_key(text: str) -> None:
    assert key(text) is None


def test_every_field_of_a_task_counts_except_complexity() -> None:
    plain = key("x", constraints=["at most 5"], context={"branch": "main"}, complexity=0.2)
    assert plain == key("X.", constraints=["at most 5"], context={"branch": "main"}, complexity=1)
    assert plain != key("x", constraints=["at most 6"], context={"branch": "main"})
    assert plain != key("x", constraints=["at most 5"], context={"branch": "dev"})
    assert plain != key("x", goals=["y"], constraints=["at most 5"], context={"branch": "main"})
    assert task_key({"original_input": "x"}, "x y") == task_key({"original_input": "z"}, "x y")
    assert task_key({"original_input": "x"}, [{"content": "y"}]) is not None


# --- Groups -------------------------------------------------------------------------------------


Ended = tuple[NDArray[np.float32], datetime]


def ended(vector: Sequence[float], *, days: float = 0) -> Ended:
    """Return the vector and the time of an episode."""
    whole = np.array(vector, np.float32)
    return whole / np.linalg.norm(whole), NOW + timedelta(days=days)


def groups(episodes: Sequence[Ended]) -> list[list[int]]:
    vectors = np.array([vector for vector, _ in episodes], np.float32)
    return groups_of(vectors, [at for _, at in episodes], cosine=0.95, window=WINDOW)


def are_close(one: Ended, other: Ended) -> bool:
    cosine = float(one[0].astype(float) @ other[0].astype(float))
    return cosine > 0.95 and abs(one[1] - other[1]) <= WINDOW


episodes = st.lists(
    st.builds(
        ended,
        st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)),
        days=st.integers(0, 12),
    ),
    max_size=12,
)


@given(episodes)
def test_members_of_a_group_are_pairwise_close(given: list[Ended]) -> None:
    found = groups(given)
    members = [each for group in found for each in group]
    assert len(members) == len(set(members))
    for group in found:
        assert len(group) >= 2
        for one, other in combinations(group, 2):
            assert are_close(given[one], given[other])


@given(episodes)
def test_close_groups_are_joined(given: list[Ended]) -> None:
    """Check also that no two of the remaining episodes are close."""
    found = groups(given)
    grouped = {each for group in found for each in group}
    found += [[each] for each in range(len(given)) if each not in grouped]
    for one, other in combinations(found, 2):
        assert not all(are_close(given[a], given[b]) for a in one for b in other)


def test_chain_of_close_episodes_is_no_group() -> None:
    [group] = groups([ended([np.cos(n * 0.25), np.sin(n * 0.25)]) for n in range(3)])
    assert len(group) == 2
