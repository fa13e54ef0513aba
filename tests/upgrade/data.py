"""Data of each kind that an upgrade must keep, made and read through the API."""

from typing import Any

import httpx2

from tests.fake_model import FakeModel, calls, text
from tests.service import client_of
from tests.team import define_graph
from tests.waiting import until

KEY = "upgrade-" * 5
"""The first key of the default tenant."""
_ASK = {"type": "builtin", "name": "ask_user"}
_LISTS = (
    *("agents", "graphs", "runs", "sessions", "files", "keys", "episodes", "schedules"),
    "batches",
)
_LESSONS = "/v1/lessons?session_id=counting"
_OTHERS = (_LESSONS, "/v1/users/ada/facts", "/v1/interrupts")
_PARTS = ("events", "tasks", "messages")
"""Of a run."""
_CHANGING = frozenset(("access_count", "last_access", "last_used_at", "next_cursor"))
"""Fields that reading changes."""

Answers = dict[str, Any]
"""Answers to GET, by the path."""


def client(port: int) -> httpx2.AsyncClient:
    """Return a client with the key; the caller closes it."""
    return client_of(port, headers={"Authorization": f"Bearer {KEY}"})


async def make(client: httpx2.AsyncClient, model: FakeModel) -> None:
    """Make the data, in a service with a worker that asks the model."""
    clerk = {"name": "clerk", "system_message": "You count.", "tools": [_ASK, _builtin()]}
    await _post(client, "/v1/agents", clerk)
    await define_graph(client, "pair", ("first", "second"))
    uploaded = await client.post("/v1/files", files={"file": ("sums.csv", b"a,b\n1,2\n")})
    assert uploaded.status_code == 201, uploaded.text
    model.script(calls(("calculator", {"expression": "6*7"})), text("It is 42."))
    await _run(client, "What is 6*7?", session_id="counting", memory="full")
    model.script(text("As before: 42."))
    await _run(client, "And again?", session_id="counting", memory="full")
    model.script(text("Good morning, Ada."))
    await _run(client, "Good morning.", user="ada")
    graph = {"mode": "dag", "graph": "pair", "input": "What do you see?"}
    await _post(client, "/v1/runs?wait=30", graph, 202)
    model.script(calls(("ask_user", {"question": "Which colour?"})))
    await _post(client, "/v1/runs", {"agent": "clerk", "input": "Ask me."}, 202)
    await until(lambda: _items(client, "/v1/interrupts"), lambda found: len(found) == 1)
    yearly = {"name": "yearly", "cron": "0 0 1 1 *", "run": {"agent": "clerk", "input": "Sum up."}}
    await _post(client, "/v1/schedules", yearly)
    await _post(client, "/v1/keys", {"name": "reader", "scopes": ["read"]})
    await _post(client, "/v1/users/ada/facts", {"text": "Likes green tea."})
    model.script(text("Dear Ada."), text("Dear Bob."))
    items = [{"input": "To Ada.", "key": "ada"}, {"input": "To Bob.", "key": "bob"}]
    await _post(client, "/v1/batches", {"agent": "clerk", "items": items, "concurrency": 1}, 202)

    async def batches() -> list[str]:
        return [item["status"] for item in await _items(client, "/v1/batches")]

    await until(batches, lambda found: found == ["completed"])
    judged = (await _get(client, "/v1/runs?session_id=counting"))["items"][0]["id"]
    verdict = {"outcome": "FAILURE", "comment": "The sum has no unit."}
    await _post(client, f"/v1/runs/{judged}/feedback", verdict, 200)
    await until(lambda: _items(client, _LESSONS))
    await until(lambda: _items(client, "/v1/episodes"), lambda found: len(found) == 5)  # not Ada's


async def answer_question(client: httpx2.AsyncClient, model: FakeModel) -> None:
    """Answer the question of the run that waits, and look that it ends."""
    (question,) = await _items(client, "/v1/interrupts")
    model.script(text("Blue it is."))
    await _post(client, f"/v1/interrupts/{question['id']}/resolve", {"answer": "blue"}, 200)

    async def run() -> Any:
        return (await client.get(f"/v1/runs/{question['run_id']}")).json()

    ended = await until(run, lambda found: found["status"] == "completed")
    assert ended["output"] == "Blue it is."


async def read(client: httpx2.AsyncClient) -> Answers:
    """Read all of the data, in a service without a worker, which leaves it as it is."""
    found: Answers = {path: await _get(client, path) for path in _OTHERS}
    for kind in _LISTS:
        found[f"/v1/{kind}"] = await _get(client, f"/v1/{kind}")
        for item in found[f"/v1/{kind}"]["items"]:
            one = f"/v1/{kind}/{item.get('id', item.get('name'))}"
            found[one] = await _get(client, one)
            if kind == "runs":
                found |= {f"{one}/{part}": await _get(client, f"{one}/{part}") for part in _PARTS}
            if kind == "files":
                content = await client.get(f"{one}/content")
                assert content.status_code == 200, content.text
                found[f"{one}/content"] = content.text
    return found


def missing(before: Any, now: Any, at: str = "") -> list[str]:
    """Return where an answer lacks what it had, or has another value. New fields are none."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = before.keys() - _CHANGING
        return [
            place
            for name in names
            for place in missing(before[name], now.get(name), f"{at}/{name}")
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = zip(before, now, strict=True)
        return [place for i, pair in enumerate(pairs) for place in missing(*pair, f"{at}/{i}")]
    return [] if before == now else [f"{at}: {before!r}, now {now!r}"]


def _builtin() -> dict[str, Any]:
    return {"type": "builtin", "name": "calculator"}


async def _run(client: httpx2.AsyncClient, words: str, **fields: Any) -> None:
    answer = await _post(
        client, "/v1/runs?wait=30", {"agent": "clerk", "input": words, **fields}, 202
    )
    assert answer["status"] == "completed", answer


async def _post(client: httpx2.AsyncClient, path: str, body: Any, status: int = 201) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, f"{path}: {answer.text}"
    return answer.json()


async def _get(client: httpx2.AsyncClient, path: str) -> Any:
    answer = await client.get(path)
    assert answer.status_code == 200, f"{path}: {answer.text}"
    return answer.json()


async def _items(client: httpx2.AsyncClient, path: str) -> list[Any]:
    found: list[Any] = (await _get(client, path))["items"]
    return found
