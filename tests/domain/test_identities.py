"""Text of other runs in a model's prompt: no ids, no addresses, each line labelled."""

import time
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.agents.messages import ToolMessage, ToolResult, ToolStatus
from bottega.agents.parts import estimated_tokens
from bottega.engine.retrieval import CURE, help_after
from bottega.events.data import ContextRecalledData, context_recalled
from bottega.memory.prompts import PromptMessage
from bottega.memory.text.identities import (
    ID,
    SERVER,
    of_earlier_run,
    told_arguments,
    without_identities,
)
from bottega.memory.text.summaries import summary_of
from bottega.memory.working_memory import Retrieved, WorkingMemory

TASK = "35422862-d715-44b3-ad82-5acfcb3ba7ec"


@pytest.mark.parametrize(
    "text",
    [
        TASK,
        TASK.upper(),
        UUID(TASK).hex,
        f"call_{UUID(TASK).hex}",
        "file-abc123def456ghi",
        "resp_0a1b2c3d4e5f6a7b8c9d",
        f"{TASK[:8]}…",
        f"{TASK[:20]}…",
    ],
)
def test_an_id_becomes_a_word(text: str) -> None:
    assert without_identities(text) == ID
    assert without_identities(f"see pattern:{text}, then") == f"see pattern:{ID}, then"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://127.0.0.1:4123/refunds/7", f"{SERVER}/refunds/7"),
        ("(https://user:pw@db.acme.com)", f"({SERVER})"),
        ("ws://[::1]:80/a", f"{SERVER}/a"),
        ("postgres://data/base", f"{SERVER}/base"),
        ("10.0.0.1:80.", f"{SERVER}."),
        ("[2001:db8::7]:443", SERVER),
        ("::1", SERVER),
        ("localhost:8000/x", f"{SERVER}/x"),
        ("api.acme.com:8443", SERVER),
        ("redis.svc.cluster.local", SERVER),
        (f"http://10.1.1.1/tasks/{TASK}?x=1", f"{SERVER}/tasks/{ID}?x=1"),
    ],
)
def test_an_address_of_a_server_becomes_a_word(text: str, told: str) -> None:
    assert without_identities(text) == told


@pytest.mark.parametrize(
    "text",
    [
        "order 4711 of 2026-11-20T12:30:45",
        "[12:30] Mario: hello",
        "version 1.2.3 of main.py:42",
        "std::vector<int> and a::b",
        "mario@acme.com wrote to acme.com",
        "step_2026 run_fast task_list",
        "decade… 2026-11-2…",
        "a[1:2] os.path.join",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert without_identities(text) == text


@given(st.uuids(), st.text(max_size=20), st.text(max_size=20))
def test_no_text_around_an_id_hides_it(found: UUID, before: str, after: str) -> None:
    assert str(found) not in without_identities(f"{before}{found}{after}")


@pytest.mark.parametrize("piece", ["a", "a:", "a.", "1.", "a-", "a_", "[1:", "http://", "1::", "["])
def test_a_long_text_takes_no_long_time(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    assert without_identities(text)  # a quadratic search would take hours


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"bill": 7, "year": "last"}, 'bill=7, year="last"'),
        ({"task_ids": [TASK, str(uuid4())], "mode": "all"}, 'mode="all"'),
        ({"task_id": TASK}, ""),
        ({"url": f"http://10.1.1.1/{TASK}"}, f'url="{SERVER}/{ID}"'),
        ({"about": f"task {TASK}"}, f'about="task {ID}"'),
        ({"none": None, "empty": "", "list": []}, 'none=null, empty="", list=[]'),
        ('{"bill": 7, "note": "long te…', 'bill=7, note="long te"'),
        ({}, ""),
        ("{}", ""),
        (None, ""),
        ("plain", "plain"),
    ],
)
def test_arguments_are_told_by_name_and_short_value(arguments: Any, told: str) -> None:
    assert told_arguments(arguments, 160) == told


def test_a_long_value_leaves_room_for_the_others() -> None:
    told = told_arguments({"note": "x" * 500, "bill": 7}, 160)
    assert told.endswith("bill=7")
    assert len(told.encode()) <= 160


@given(
    st.lists(st.text(alphabet="ab .é", min_size=1, max_size=400).filter(str.strip), min_size=1),
    st.integers(20, 200),
)
def test_a_line_of_another_run_keeps_its_label_however_it_is_shortened(
    lines: list[str], tokens: int
) -> None:
    body = "\n".join(of_earlier_run(lines * 5))
    for text in (summary_of(body, tokens), summary_of(body, tokens, whole_lines=True)):
        for line in text.splitlines():
            assert line == "…" or "earlier run".startswith(line[:11].rstrip("…"))


def test_a_shortened_tool_result_keeps_the_labels() -> None:
    told = of_earlier_run([f"Result: the answer {n} is " + "word " * 60 for n in range(40)])
    result = ToolResult(
        tool_call_id="1", tool_name="t", status=ToolStatus.ERROR, error="\n".join(["no", *told])
    )
    message = ToolMessage.answering(result)
    shown = PromptMessage(message, message, 4000, reference="m1")
    assert shown.shrink(estimated_tokens) > 0
    lines = shown.sent.content.splitlines()
    assert all("earlier run" in line for line in lines if "answer" in line)


def test_working_memory_shows_no_id_of_its_sources() -> None:
    working = WorkingMemory()
    kinds = ("episode", "pattern", "insight")
    working.retrieve_from_episodic(Retrieved(f"{kind}:{uuid4()}", "it") for kind in kinds)
    working.retrieve_from_episodic([Retrieved(str(uuid4()), "it")])
    text = working.compose()
    assert [line for line in text.splitlines() if line.endswith(": it")] == [
        "episode: it",
        "pattern: it",
        "insight: it",
        f"{ID}: it",
    ]


def test_help_says_each_cure_once() -> None:
    def given_by(cure: str, rest: str) -> ContextRecalledData:
        return context_recalled("episode:x", f"{CURE}{cure}\n[SUCCESS]\n  {rest}")

    told = help_after([given_by("pay n=1", "a"), given_by("pay n=1", "b"), given_by("ask", "c")])
    assert told.splitlines()[0] == f"{CURE}pay n=1"
    assert told.count("pay n=1") == told.count("ask") == 1
    assert all(told.count(f"\n  {rest}\n") == 1 for rest in "abc")


@pytest.mark.parametrize(
    "flood",
    [
        *("1" + ":" * 60_000 + "z", "f" * 60_000 + "z", "-" * 60_000),
        *("a:" * 30_000, "a://" * 15_000, "a." * 30_000, "call_" * 12_000, "1." * 30_000),
        *("[::" * 20_000, "a_" * 30_000),
    ],
)
def test_search_for_identities_is_linear(flood: str) -> None:
    began = time.thread_time()
    without_identities(flood)
    assert time.thread_time() - began < 1
