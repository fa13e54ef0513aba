"""Odd and old requests of clients of OpenAI's API, each in both of its forms."""

import asyncio
import json
from base64 import b64encode
from time import process_time
from typing import Any
from uuid import UUID

import pytest

from bottega.api.routes.openai.model_request import Call, HistoryMessage, ModelRequest, body_of
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_conversations import define
from tests.flows.test_forks import PNG
from tests.service import Running
from tests.waiting import until

Bodies = dict[str, Any]
FORMS = ("chat", "responses")
LOCATE: Bodies = {
    "name": "locate",
    "description": "Says where a user is.",
    "parameters": {"type": "object", "properties": {"user": {"type": "string"}}},
}
PIXEL = b64encode(PNG).decode()


@pytest.fixture
async def bottega(guest: Running) -> Running:
    await define(guest, tools=[{"type": "builtin", "name": "calculator"}])
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


def function(form: str, **more: Any) -> Bodies:
    """Return a tool as the form has it."""
    fields = LOCATE | more
    nested = {"type": "function", "function": fields}
    return nested if form == "chat" else {"type": "function", **fields}


def called(form: str, *made: tuple[str, str, str]) -> list[Bodies]:
    """Return what a form has of the calls (id, name, arguments) of one message."""
    if form == "responses":
        return [
            {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}
            for id_, name, arguments in made
        ]
    sent = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name, arguments in made
    ]
    return [{"role": "assistant", "content": None, "tool_calls": sent}]


def result(form: str, call: str, content: Any) -> Bodies:
    if form == "chat":
        return {"role": "tool", "tool_call_id": call, "content": content}
    return {"type": "function_call_output", "call_id": call, "output": content}


async def send(bottega: Running, form: str, messages: Any, **more: Any) -> tuple[int, Any]:
    """Send a request; return its status and body."""
    path, field = {"chat": ("chat/completions", "messages"), "responses": ("responses", "input")}[
        form
    ]
    body = {"model": "clerk", field: messages, **more}
    answer = await bottega.client.post(f"/openai/v1/{path}", json=body)
    return answer.status_code, answer.json()


def said(form: str, body: Any) -> str:
    """Return the text of an answer."""
    if form == "chat":
        return body["choices"][0]["message"]["content"] or ""
    items = [item for item in body["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in items for part in item["content"])


def asked_calls(form: str, body: Any) -> list[tuple[str, str]]:
    """Return id and name of each call in an answer."""
    if form == "chat":
        made = body["choices"][0]["message"].get("tool_calls") or ()
        return [(each["id"], each["function"]["name"]) for each in made]
    made = (each for each in body["output"] if each["type"] == "function_call")
    return [(each["call_id"], each["name"]) for each in made]


def history_of(form: str, body: Any) -> list[Bodies]:
    """Return an answer as a client puts it into its history."""
    if form == "chat":
        return [body["choices"][0]["message"]]
    return list(body["output"])


async def runs(bottega: Running) -> list[str]:
    found = (await bottega.client.get("/v1/runs?agent=clerk")).json()["items"]
    return [run["status"] for run in found]


USER = {"role": "user", "content": "Where is Ada?"}


SILENT: list[list[Bodies]] = [
    [{"role": "assistant", "content": ""}, USER],
    [{"role": "assistant", "content": None}, USER],
    [{"role": "assistant", "content": []}, USER],
    [{"role": "assistant"}, USER],
    [{"role": "system", "content": ""}, USER],
    [{"role": "developer", "content": []}, USER],
    [{"role": "user", "content": [{"type": "text", "text": ""}]}, USER],
    [{"role": "user", "content": None}, USER],
    [{"role": "user", "content": [None, {"type": "text", "text": None}]}, USER],
    [USER, {"role": "assistant", "content": ""}],
    [USER, {"role": "assistant", "content": "Ada is"}],
    [{"role": "assistant", "content": "Hello!"}, USER],
    [{"role": "system", "content": "Where is Ada?"}],
    [{"role": "assistant", "content": "Where is Ada?"}],
    [
        USER,
        {"role": "assistant", "content": "?"},
        USER,
        {"role": "system", "content": "Brief."},
    ],
    [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
]


@pytest.mark.parametrize("form", FORMS)
async def test_what_says_nothing_is_skipped(bottega: Running, model: FakeModel, form: str) -> None:
    for messages in SILENT:
        model.script(text("In Rome."))
        status, body = await send(bottega, form, messages)
        assert (status, said(form, body) if status == 200 else body) == (200, "In Rome."), messages
        assert "Ada" in str(model.requests[-1]["messages"]), messages


@pytest.mark.parametrize("form", FORMS)
async def test_no_words_are_put_into_the_user_s_mouth(
    bottega: Running, model: FakeModel, form: str
) -> None:
    brief = {"role": "system", "content": "Brief."}
    answer = {"role": "assistant", "content": "Ada is"}
    note = "(no message of the user follows: go on)"
    asked = "Where is Ada?"
    for messages, by_user in (
        ([brief], [note]),
        ([USER, answer], [asked, note]),
        ([USER, brief], [asked]),
        # In mid-conversation many servers take a system text only with the user's.
        ([USER, answer, USER, brief], [asked, f"Brief.\n\n{asked}"]),
    ):
        model.script(text("In Rome."))
        status, body = await send(bottega, form, messages)
        assert status == 200, body
        told = model.requests[-1]["messages"]
        assert [each["content"] for each in told if each["role"] == "user"] == by_user
        assert (brief in messages) == ("Brief." in str(told))


@pytest.mark.parametrize("form", FORMS)
async def test_nothing_at_all_is_refused(bottega: Running, form: str) -> None:
    field = "messages" if form == "chat" else "input"
    for messages in ([], [{"role": "user", "content": ""}], [{"role": "assistant"}], None):
        status, body = await send(bottega, form, messages)
        assert (status, body["error"]["param"]) == (400, field), messages
    assert await runs(bottega) == []


NOTHING: list[Bodies] = [
    {name: None}
    for name in (
        *("functions", "function_call", "tools", "tool_choice", "stop", "n", "logprobs", "user"),
        *("response_format", "stream_options", "seed", "temperature", "metadata", "audio"),
        *("web_search_options", "logit_bias", "modalities", "store", "reasoning_effort", "made_up"),
    )
]
DEFAULTS: list[Bodies] = [
    *({"tools": []}, {"functions": []}, {"stop": []}, {"stop": [""]}, {"metadata": {}}),
    *({"n": 1}, {"logprobs": False}, {"top_logprobs": 0}, {"presence_penalty": 0}),
    *({"frequency_penalty": 0.0}, {"logit_bias": {}}, {"modalities": ["text"]}, {"user": ""}),
    *({"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"made_up": []}),
    *({"service_tier": "flex"}, {"prediction": {"type": "content", "content": "x"}}),
    *({"response_format": {}}, {"tool_choice": ""}, {"stream_options": {"include_usage": None}}),
    *({"function_call": "auto"}, {"stream": None}, {"stream_options": {"include_usage": True}}),
]
OF_RESPONSES: list[Bodies] = [
    {name: None}
    for name in (
        *("instructions", "previous_response_id", "conversation", "store", "background", "text"),
        *("reasoning", "max_output_tokens", "max_tool_calls", "prompt", "include", "truncation"),
    )
]
OF_RESPONSES += [
    *({"text": {"format": {"type": "text"}}}, {"text": {"format": None, "verbosity": None}}),
    *({"previous_response_id": ""}, {"conversation": ""}, {"text": {"format": {}}}),
    *({"reasoning": {"effort": None, "summary": "auto"}}, {"instructions": ""}, {"include": []}),
    *({"truncation": "disabled"}, {"background": False}, {"top_logprobs": 0}, {"tools": []}),
]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("form", "absent"), [("chat", NOTHING + DEFAULTS), ("responses", OF_RESPONSES)], ids=FORMS
)
async def test_null_and_a_default_are_absent(
    bottega: Running, model: FakeModel, form: str, absent: list[Bodies]
) -> None:
    for more in absent:
        model.script(text("In Rome."))
        status, body = await send(bottega, form, [USER], **more)
        assert status == 200, (more, body)


@pytest.mark.parametrize("form", FORMS)
async def test_nulls_of_a_tool_are_absent(bottega: Running, model: FakeModel, form: str) -> None:
    model.script(text("In Rome."))
    tool = function(form, description=None, parameters=None, strict=None)
    status, body = await send(bottega, form, [USER], tools=[tool])
    assert status == 200, body
    assert "locate" in [each["function"]["name"] for each in model.requests[-1]["tools"]]


@pytest.mark.parametrize("form", FORMS)
async def test_callers_faults_name_the_field_and_make_no_run(bottega: Running, form: str) -> None:
    nested = "function." if form == "chat" else ""
    choice = {"type": "function", "function": {"name": "nobody"}, "name": "nobody"}
    schema = {"type": "nothing"}
    wrong: list[tuple[Bodies, str]] = [
        ({"tools": [function(form), function(form, name="calculator")]}, f"tools.1.{nested}name"),
        ({"tools": [function(form), function(form)]}, f"tools.1.{nested}name"),
        ({"tools": [function(form, name="")]}, f"tools.0.{nested}name"),
        ({"tools": [function(form, name=None)]}, f"tools.0.{nested}name"),
        ({"tools": [function(form, name="x" * 65)]}, f"tools.0.{nested}name"),
        ({"tools": [function(form, description=7)]}, f"tools.0.{nested}description"),
        ({"tool_choice": choice}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": choice, "tools": [function(form)]}, "tool_choice"),
        ({"temperature": 9}, "temperature"),
        ({"made_up": 1}, "made_up"),
        ({"metadata": {str(n): 1 for n in range(60)}}, "metadata"),
    ]
    if form == "chat":
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        wrong += [({"response_format": wanted}, "response_format"), ({"stop": ["x"] * 17}, "stop")]
        wrong += [
            ({"functions": [LOCATE]}, "functions"),
            ({"presence_penalty": 1}, "presence_penalty"),
        ]
    else:
        wrong += [({"text": {"format": {"type": "json_schema", "schema": schema}}}, "text.format")]
    for more, param in wrong:
        status, body = await send(bottega, form, [USER], **more)
        assert (status, body["error"]["param"]) == (400, param), (more, body)
    field = "messages" if form == "chat" else "input"
    empty = {"role": "assistant", "content": ""}
    odd = {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "hologram"}]}
    bad = [{"type": "text", "text": ""}, {"type": "image_url", "image_url": {"url": "ftp://x/y"}}]
    for messages, param in (
        ([empty, odd], f"{field}.1.content.1"),
        ([empty, {"role": "user", "content": [*bad, bad[0]]}], f"{field}.1.content.1"),
        ([empty, {"role": "wizard", "content": "?"}], f"{field}.1"),
        ([USER, result(form, "none", "?")], f"{field}.1"),
        ([USER, {"role": "user", "content": 7}], f"{field}.1.content"),
        ([empty, {"role": "user", "content": "a\x00b"}], f"{field}.1"),
        ([empty, {"role": "user", "content": "x" * 500_001}], f"{field}.1.content"),
    ):
        status, body = await send(bottega, form, messages)
        assert status == 400, body
        assert body["error"]["param"].startswith(param), (param, body)
    assert await runs(bottega) == []


URLS = [
    f"data:image/png;base64,{PIXEL}",
    f"data:image/png;charset=utf-8;base64,{PIXEL}",
    f"data:;base64,{PIXEL}",
    f"DATA:IMAGE/PNG;BASE64,{PIXEL}",
    f"data:image/png;name=a.png;base64,{PIXEL.rstrip('=')}",
    f"data:image/png;base64,{PIXEL.replace('=', '%3D').replace('+', '%2B')}",
    f"data:image/png;base64,{PIXEL[:20]}\n{PIXEL[20:]}",
]


@pytest.mark.parametrize("form", FORMS)
async def test_data_urls_are_those_of_rfc_2397(
    bottega: Running, model: FakeModel, form: str
) -> None:
    for url in URLS:
        model.script(text("A dot."))
        part: Bodies = {"type": "input_image", "image_url": url, "detail": "auto"}
        if form == "chat":
            part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        status, body = await send(bottega, form, [{"role": "user", "content": [part]}])
        assert status == 200, body
        (sent,) = model.requests[-1]["messages"][-1]["content"]
        assert sent["image_url"]["url"] == URLS[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("waits", [False, True])
async def test_an_image_in_a_result_reaches_the_model(
    bottega: Running, model: FakeModel, form: str, waits: bool
) -> None:
    call, before = "c1", called(form, ("c1", "locate", "{}"))
    if waits:
        model.script(calls(("locate", {})))
        _, body = await send(bottega, form, [USER], tools=[function(form)])
        ((call, _),) = asked_calls(form, body)
        before = history_of(form, body)
    kind = ("text", "image_url") if form == "chat" else ("input_text", "input_image")
    image = {"url": URLS[0]} if form == "chat" else URLS[0]
    content = [{"type": kind[0], "text": "A map:"}, {"type": kind[1], "image_url": image}]
    model.script(text("In Rome."))
    history = [USER, *before, result(form, call, content)]
    status, body = await send(bottega, form, history, tools=[function(form)])
    assert (status, said(form, body) if status == 200 else body) == (200, "In Rome.")
    told = json.dumps(model.requests[-1]["messages"])
    assert "A map:" in told
    assert PIXEL in told
    assert len(await runs(bottega)) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_an_image_of_another_role_reaches_the_model(
    bottega: Running, model: FakeModel, form: str, role: str
) -> None:
    model.script(text("Fine."))
    parts = [{"type": "text", "text": "A map:"}, {"type": "image_url", "image_url": URLS[0]}]
    status, body = await send(bottega, form, [USER, {"role": role, "content": parts}, USER])
    assert status == 200, body
    told = json.dumps(model.requests[-1]["messages"])
    assert "A map:" in told
    assert PIXEL in told


@pytest.mark.parametrize("form", FORMS)
async def test_another_schema_is_honoured_with_a_result(
    bottega: Running, model: FakeModel, form: str
) -> None:
    tools = [function(form)]
    model.script(calls(("locate", {"user": "ada"})), text('```json\n{"city":"Rome"}\n```'))
    _, body = await send(bottega, form, [USER], tools=tools)
    ((call, _),) = asked_calls(form, body)
    history = [USER, *history_of(form, body), result(form, call, "Rome")]
    wanted = {"type": "json_schema", "name": "place", "schema": {"type": "object"}}
    wanted["json_schema"] = {"name": "place", "schema": {"type": "object"}}
    more = {"response_format": wanted} if form == "chat" else {"text": {"format": wanted}}
    status, body = await send(bottega, form, history, tools=tools, **more)
    assert (status, said(form, body) if status == 200 else body) == (200, '{"city":"Rome"}')
    assert sorted(await runs(bottega)) == ["cancelled", "completed"]


@pytest.mark.parametrize("form", FORMS)
async def test_nothing_behind_a_result_changes_nothing(
    bottega: Running, model: FakeModel, form: str
) -> None:
    model.script(calls(("locate", {"user": "ada"})), text("In Rome."))
    _, body = await send(bottega, form, [USER], tools=[function(form)])
    ((call, _),) = asked_calls(form, body)
    history = [USER, *history_of(form, body), result(form, call, "Rome")]
    empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]
    status, body = await send(bottega, form, [*history, *empty], tools=[function(form)])
    assert (status, said(form, body)) == (200, "In Rome.")
    assert await runs(bottega) == ["completed"]


@pytest.mark.parametrize("form", FORMS)
async def test_histories_are_paired_by_place_and_kept(
    bottega: Running, model: FakeModel, form: str
) -> None:
    twice = [
        USER,
        *called(form, ("c", "locate", '{"user": "ada"}'), ("c", "locate", '{"user": "bob"}')),
        result(form, "c", "Rome"),
        result(form, "c", "Oslo"),
        *called(form, ("c", "locate", '{"user": "eve"}')),
        result(form, "c", "Bern"),
        USER,
    ]
    broken = [*called(form, ("c", "fs.read", '{"path": ')), result(form, "c", None), USER]
    lone = [USER, *called(form, ("c", "locate", "[1]"), ("d", "locate", "")), USER]
    late = [USER, *called(form, ("c", "locate", "{}")), USER, result(form, "c", "Rome"), USER]
    odd = [USER, None, *called(form, ("n", "locate", '{"x": NaN, "y": "\\u0000"}')), USER]
    model.script(*[text("Fine.")] * 5)
    for messages in (twice, broken, lone, late, odd):
        status, body = await send(bottega, form, messages, tools=[function(form)])
        assert status == 200, body
    first, second, third, fourth, fifth = ([*each["messages"][1:]] for each in model.requests)
    assert "NaN" in json.dumps(fifth)
    results = [each["content"] for each in first if each["role"] == "tool"]
    assert results == ["Rome", "Oslo", "Bern"]
    ids = [call["id"] for each in first for call in each.get("tool_calls", ())]
    assert [each["tool_call_id"] for each in first if each["role"] == "tool"] == ids
    assert len(set(ids)) == 3
    (kept,) = (each["tool_calls"][0] for each in second if each.get("tool_calls"))
    assert kept["function"]["name"] == "fs_read"
    assert json.loads(kept["function"]["arguments"]) == {"arguments": '{"path": '}
    assert "[1]" in json.dumps(third)
    assert "Rome" in json.dumps(fourth)


async def test_calls_without_ids_and_old_functions_are_paired(
    bottega: Running, model: FakeModel
) -> None:
    made = [{"type": "function", "function": {"name": "locate", "arguments": {"user": "ada"}}}] * 2
    nameless = [
        {"role": "assistant", "tool_calls": [*made, None]},
        {"role": "tool", "content": "Rome"},
        {"role": "tool", "content": "Oslo", "tool_call_id": None},
    ]
    old = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "Rome"},
    ]
    model.script(text("Fine."), text("Fine."))
    for messages, results in ((nameless, ["Rome", "Oslo"]), (old, ["Rome"])):
        status, body = await send(bottega, "chat", [USER, *messages, USER])
        assert status == 200, body
        told = [each for each in model.requests[-1]["messages"] if each["role"] == "tool"]
        assert [each["content"] for each in told] == results
    many = called("chat", *[("c", "locate", "{}")] * 128)
    status, body = await send(bottega, "chat", [USER, *many * 600])
    assert (status, body["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("form", FORMS)
async def test_calls_of_a_message_are_few(bottega: Running, form: str) -> None:
    field = "messages" if form == "chat" else "input"
    made = called(form, *[("a", "f", "{}")] * 129)
    status, body = await send(bottega, form, [USER, *made])
    assert status == 400, body
    assert body["error"]["param"].startswith(field)
    assert "128" in body["error"]["message"]


def test_ids_of_calls_that_repeat_cost_what_they_are_long() -> None:
    ids = [f"a#{n}" for n in range(10_000)] + [f"call#{n}" for n in range(10_000)]
    ids += ["a"] * 10_000 + ids[:10_000]
    history = [
        HistoryMessage("assistant", "", "", [Call(id_, "f", "{}") for id_ in ids[at : at + 100]])
        for at in range(0, len(ids), 100)
    ]
    before = process_time()
    body = body_of(ModelRequest("clerk", history, "/messages"), None)
    seconds = process_time() - before
    made = [call["id"] for each in body.fields["input"] for call in each.get("tool_calls", ())]
    assert len(set(made)) == len(made) == len(ids)
    assert seconds < 2, "every id is looked up a few times"


async def test_unknown_items_of_a_history_are_kept_as_text(
    bottega: Running, model: FakeModel
) -> None:
    history = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "query": "Ada's place"},
        {"type": "custom_tool_call_output", "call_id": "x", "output": "Ada's file"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "made_up", "words": "Ada's words"}]},
        USER,
    ]
    model.script(text("Fine."), text("Fine."))
    for form, messages in (("responses", history), ("chat", history[3:])):
        status, body = await send(bottega, form, messages)
        assert status == 200, body
    first, second = (json.dumps(each["messages"]) for each in model.requests)
    for words in ("Ada's place", "Ada's file", "Ada's words"):
        assert words in first
    assert "Ada's words" in second


async def test_another_agent_of_a_conversation_waits_on(bottega: Running, model: FakeModel) -> None:
    await define(bottega, name="other")
    more: Bodies = {"conversation": "talk"}
    tools = [function("responses", name="fs.read")]
    asked = {"background": True, "tools": tools, **more}
    model.script(calls(("fs_read", {})), text("Hello."))
    status, first = await send(bottega, "responses", [USER], **asked)
    assert status == 200
    path = f"/openai/v1/responses/{first['id']}"

    async def found() -> Any:
        return (await bottega.client.get(path)).json()

    done = await until(found, lambda each: each["status"] == "completed")
    assert [name for _, name in asked_calls("responses", done)] == ["fs.read"]
    body = {"model": "other", "input": "Hi.", **more}
    answer = await bottega.client.post("/openai/v1/responses", json=body)
    assert said("responses", answer.json()) == "Hello."
    assert await runs(bottega) == ["waiting"]


@pytest.mark.parametrize("form", FORMS)
async def test_a_tool_s_name_is_the_client_s_again(
    bottega: Running, model: FakeModel, form: str
) -> None:
    tools = [function(form, name=name) for name in ("fs.read", "fs_read", "7zip", "mcp:a/b")]
    choice = {"type": "function", "name": "fs.read", "function": {"name": "fs.read"}}
    model.decide = lambda request: (
        text("Done.")
        if request["messages"][-1]["role"] == "tool"
        else calls((request["tool_choice"]["function"]["name"], {}))
    )
    status, body = await send(bottega, form, [USER], tools=tools, tool_choice=choice)
    assert status == 200, body
    ((call, name),) = asked_calls(form, body)
    assert name == "fs.read"
    sent = [each["function"]["name"] for each in model.requests[-1]["tools"]]
    assert len(set(sent)) == len(sent)
    assert not any(set(each) & set(".:/") for each in sent)
    history = [USER, *history_of(form, body), result(form, call, "text")]
    status, body = await send(bottega, form, history, tools=tools)
    assert (status, said(form, body)) == (200, "Done.")


@pytest.mark.parametrize("form", FORMS)
async def test_each_request_has_its_own_text_usage_and_id(
    bottega: Running, model: FakeModel, form: str
) -> None:
    locate = calls(("locate", {"user": "ada"}), content="Let me look.")
    model.script(locate, locate, text("In Rome."))
    history, ids, usages = [USER], [], []
    for words in ("Let me look.", "Let me look.", "In Rome."):
        status, body = await send(bottega, form, history, tools=[function(form)])
        assert (status, said(form, body)) == (200, words)
        usage = body["usage"]
        usages.append(usage["total_tokens"])
        ids.append(body["id"])
        history += history_of(form, body)
        history += [result(form, call, "Rome") for call, _ in asked_calls(form, body)]
    assert len(set(ids)) == 3
    (run,) = (await bottega.client.get("/v1/runs?agent=clerk&view=full")).json()["items"]
    assert sum(usages) == run["usage"]["input"] + run["usage"]["output"]
    assert all(usages)
    if form == "responses":
        for id_, words in zip(ids, ("Let me look.", "Let me look.", "In Rome."), strict=True):
            found = (await bottega.client.get(f"/openai/v1/responses/{id_}")).json()
            assert (said(form, found), found["status"]) == (words, "completed")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("answered", [True, False])
async def test_a_call_that_the_client_gave_up_leaves_no_run_waiting(
    bottega: Running, model: FakeModel, form: str, answered: bool
) -> None:
    model.script(calls(("locate", {"user": "ada"}), ("locate", {"user": "bob"})), text("Fine."))
    _, body = await send(bottega, form, [USER], tools=[function(form)])
    history = [USER, *history_of(form, body)]
    if answered:
        history += [result(form, call, "cancelled") for call, _ in asked_calls(form, body)]
    status, body = await send(bottega, form, [*history, {"role": "user", "content": "And Eve?"}])
    assert (status, said(form, body)) == (200, "Fine.")
    assert "waiting" not in await runs(bottega)
    assert (await bottega.client.get("/v1/interrupts?status=pending")).json()["items"] == []


@pytest.mark.parametrize("form", FORMS)
async def test_calls_of_other_conversations_wait_on(
    bottega: Running, model: FakeModel, form: str
) -> None:
    tools, more = [function(form)], {} if form == "chat" else {"store": False}
    locate = calls(("locate", {"user": "ada"}))
    model.script(locate, locate, text("Fine."), text("In Rome."))
    _, left = await send(bottega, form, [USER], tools=tools, **more)
    _, other = await send(bottega, form, [USER], tools=tools, **more)
    status, body = await send(bottega, form, [USER, *history_of(form, left), USER], **more)
    assert (status, said(form, body)) == (200, "Fine.")
    assert sorted(await runs(bottega)) == ["cancelled", "completed", "waiting"]
    ((call, _),) = asked_calls(form, other)
    history = [USER, *history_of(form, other), result(form, call, "Rome")]
    status, body = await send(bottega, form, history, tools=tools, **more)
    assert (status, said(form, body)) == (200, "In Rome.")
    assert "waiting" not in await runs(bottega)


@pytest.mark.parametrize("session", ["previous_response_id", "conversation"])
@pytest.mark.parametrize("results", [0, 1, 2])
async def test_a_continued_response_answers_or_leaves_its_calls(
    bottega: Running, model: FakeModel, session: str, results: int
) -> None:
    model.script(calls(("locate", {"user": "ada"}), ("locate", {"user": "bob"})), text("Fine."))
    more: Bodies = {"conversation": "talk"} if session == "conversation" else {}
    _, body = await send(bottega, "responses", [USER], tools=[function("responses")], **more)
    made = [result("responses", call, "Rome") for call, _ in asked_calls("responses", body)]
    asked = [*made[:results], {"role": "user", "content": "And Eve?"}]
    go_on = more or {"previous_response_id": body["id"]}
    status, body = await send(bottega, "responses", asked, **go_on)
    assert (status, said("responses", body) if status == 200 else body) == (200, "Fine.")
    told = model.requests[-1]["messages"]
    assert "And Eve?" in json.dumps(told[-1])
    assert len([each for each in told if each["role"] == "tool"]) == 2
    assert "waiting" not in await runs(bottega)


async def test_the_same_result_again_forks(bottega: Running, model: FakeModel) -> None:
    tools = [function("responses")]
    model.script(text("Hello."), calls(("locate", {"user": "ada"}), content="Let me look."))
    _, hello = await send(bottega, "responses", "Hi.")
    _, first = await send(
        bottega, "responses", [USER], tools=tools, previous_response_id=hello["id"]
    )
    ((call, _),) = asked_calls("responses", first)
    model.script(text("In Rome."), text("In Oslo."), text("As I said."))
    ids = []
    for place in ("Rome", "Oslo"):
        output = [result("responses", call, place)]
        status, body = await send(
            bottega, "responses", output, tools=tools, previous_response_id=first["id"]
        )
        assert (status, said("responses", body) if status == 200 else body) == (200, f"In {place}.")
        ids.append(body["id"])
    told = model.requests[-1]["messages"]
    roles = [each["role"] for each in told]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool"]
    assert [each["content"] for each in told[1:4]] == ["Hi.", "Hello.", "Where is Ada?"]
    assert told[-1]["content"] == "Oslo"
    status, body = await send(bottega, "responses", "Sure?", previous_response_id=ids[-1])
    assert (status, said("responses", body)) == (200, "As I said.")
    assert "Oslo" in str(model.requests[-1]["messages"])
    assert "Rome." not in str(model.requests[-1]["messages"])


async def test_items_that_we_gave_are_resolved(bottega: Running, model: FakeModel) -> None:
    tools = [function("responses")]
    model.script(text("Hello."), calls(("locate", {"user": "ada"}), content="Let me look."))
    _, first = await send(bottega, "responses", "Hi.")
    refer = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    history = [{"role": "user", "content": "Hi."}, *refer, USER]
    status, second = await send(bottega, "responses", history, tools=tools)
    assert status == 200, second
    assert "Hello." in str(model.requests[-1]["messages"])
    history += [{"id": item["id"]} for item in second["output"]]
    ((call, _),) = asked_calls("responses", second)
    model.script(text("In Rome."))
    status, third = await send(
        bottega, "responses", [*history, result("responses", call, "Rome")], tools=tools
    )
    assert (status, said("responses", third)) == (200, "In Rome.")
    assert len(await runs(bottega)) == 2
    for number, name in enumerate(("x", f"msg_{'0' * 32}", f"fc_{'0' * 32}", "rs_1")):
        asked = [USER, {"type": "item_reference", "id": name}]
        status, refused = await send(bottega, "responses", asked)
        assert (status, refused["error"]["param"]) == (400, "input.1"), number
    refused = await send(bottega, "responses", [*refer, USER], user="bob")
    assert refused[0] == 400, "it is of nobody, not of bob"


async def test_instructions_are_of_one_request_only(bottega: Running, model: FakeModel) -> None:
    model.script(*[text("Fine.")] * 4)
    more: Bodies = {}
    for number in range(4):
        _, body = await send(
            bottega, "responses", f"Question {number}.", instructions=f"Rule {number}.", **more
        )
        more = {"previous_response_id": body["id"]}
        told = model.requests[-1]["messages"]
        assert f"Rule {number}." in told[0]["content"]
        assert json.dumps(told).count("Rule ") == 1
        assert f"Question {number}." in json.dumps(told[-1])
    graph = {"name": "alone", "nodes": [{"agent": "clerk"}], "edges": []}
    (await bottega.client.post("/v1/graphs", json=graph)).raise_for_status()
    more = {}
    model.script(*[text("Fine.")] * 2)
    for number in range(2):
        body = {"model": "graph:alone", "input": f"Question {number}.", **more}
        body["instructions"] = f"Rule {number}."
        answer = await bottega.client.post("/openai/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        more = {"previous_response_id": answer.json()["id"]}
        told = model.requests[-1]["messages"]
        assert f"Rule {number}." in told[0]["content"]
        assert json.dumps(told).count("Rule ") == 1


async def asked_first(bottega: Running, model: FakeModel, **more: Any) -> tuple[Bodies, list[str]]:
    """Return a response that waits for two results, and the ids of its calls."""
    model.script(calls(("locate", {"user": "ada"}), ("locate", {"user": "bob"})))
    status, body = await send(bottega, "responses", [USER], tools=[function("responses")], **more)
    assert status == 200, body
    return body, [call for call, _ in asked_calls("responses", body)]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"instructions": "Be brief."},
        {"temperature": 0.25},
        {"max_output_tokens": 77},
        {"tool_choice": "none"},
        {"tools": []},
        {"text": {"format": {"type": "json_object"}}},
        {"model": "other"},
        {"model": "clerk@1"},
    ],
    ids=str,
)
async def test_a_request_with_results_goes_on_only_with_the_same_fields(
    bottega: Running, model: FakeModel, change: Bodies
) -> None:
    await define(bottega, name="other")
    first, ids = await asked_first(bottega, model)
    model.script(text('{"city": "Rome"}'))
    results = [result("responses", call, "Rome") for call in ids]
    body = {"model": "clerk", "tools": [function("responses")], **change}
    body |= {"input": results, "previous_response_id": first["id"]}
    answer = await bottega.client.post("/openai/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    told = model.requests[-1]
    assert [each["role"] for each in told["messages"]][-4:] == ["user", "assistant", "tool", "tool"]
    goes_on = change in ({}, {"model": "clerk@1"})
    statuses = await runs(bottega)
    assert statuses.count("cancelled") == (0 if goes_on else 1)
    assert "waiting" not in statuses
    assert told.get("temperature") == change.get("temperature")
    assert ("Be brief." in str(told["messages"])) == ("instructions" in change)


@pytest.mark.parametrize("session", ["previous_response_id", "conversation", None])
async def test_what_a_resumed_request_says_wrong_is_refused(
    bottega: Running, model: FakeModel, session: str | None
) -> None:
    talk: Bodies = {"conversation": "talk"} if session == "conversation" else {}
    first, ids = await asked_first(bottega, model, **talk)
    before = [] if session else [USER, *history_of("responses", first)]
    go_on: Bodies = {"previous_response_id": first["id"]} if session else {}
    go_on = talk or go_on
    tools, good = [function("responses")], result("responses", ids[0], "Rome")
    at = f"input.{len(before)}"
    wrong: list[tuple[Any, Bodies, str]] = [
        (result("responses", ids[0], "a\x00b"), {}, at),
        (result("responses", ids[0], "x" * 500_001), {}, at),
        (good, {"temperature": 9}, "temperature"),
        (good, {"tools": [*tools, *tools]}, "tools.1.name"),
        (good, {"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        (good, {"max_output_tokens": -1}, "max_output_tokens"),
    ]
    for said_now, more, param in wrong:
        asked = {"tools": tools, **go_on, **more}
        status, body = await send(bottega, "responses", [*before, said_now], **asked)
        assert (status, (body["error"]["param"] or "")[: len(param)]) == (400, param), body
    lone = f'{{"type": "function_call_output", "call_id": "{ids[0]}", "output": "\\ud800"}}'
    sent = {"model": "clerk", "tools": tools, **go_on, "input": [*before, "LONE"]}
    answer = await bottega.client.post(
        "/openai/v1/responses",
        content=json.dumps(sent).replace('"LONE"', lone),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    assert await runs(bottega) == ["waiting"]


@pytest.mark.parametrize("form", FORMS)
async def test_of_two_equal_requests_none_ends_the_other(
    bottega: Running, model: FakeModel, form: str
) -> None:
    tools = [function(form)]
    model.script(calls(("locate", {"user": "ada"})))
    _, body = await send(bottega, form, [USER], tools=tools)
    ((call, _),) = asked_calls(form, body)
    history = [USER, *history_of(form, body), result(form, call, "Rome")]
    model.script(*[text("In Rome.")] * 4)
    answers = await asyncio.gather(*(send(bottega, form, history, tools=tools) for _ in range(4)))
    assert [(status, said(form, each)) for status, each in answers] == [(200, "In Rome.")] * 4
    assert set(await runs(bottega)) == {"completed"}


async def test_a_response_of_another_key_is_gone_on_from(
    bottega: Running, model: FakeModel
) -> None:
    first, ids = await asked_first(bottega, model)
    key = (await bottega.client.post("/v1/keys", json={"name": "b", "scopes": ["run"]})).json()
    headers = {"Authorization": f"Bearer {key['key']}"}
    model.script(text("In Rome."))
    body = {"model": "clerk", "previous_response_id": first["id"]}
    body |= {"input": [result("responses", call, "Rome") for call in ids]}
    answer = await bottega.client.post("/openai/v1/responses", json=body, headers=headers)
    assert (answer.status_code, said("responses", answer.json())) == (200, "In Rome.")
    assert "Where is Ada?" in str(model.requests[-1]["messages"])
    assert sorted(await runs(bottega)) == ["completed", "waiting"]


async def test_a_fork_has_the_whole_history_or_is_refused(
    bottega: Running, model: FakeModel
) -> None:
    for length in (400, 500):
        model.script(calls(("locate", {"user": "ada"})))
        asked = [{"role": "user", "content": f"Question {n}. {'x' * 1400}"} for n in range(length)]
        _, first = await send(bottega, "responses", asked, tools=[function("responses")])
        ((call, _),) = asked_calls("responses", first)
        model.script(text("In Rome."))
        status, body = await send(
            bottega,
            "responses",
            [result("responses", call, "Rome")],
            previous_response_id=first["id"],
        )
        if length == 500:
            assert (status, body["error"]["param"]) == (400, "previous_response_id")
            continue
        assert status == 200, body
        run = await bottega.client.get(f"/v1/runs/{UUID(body['id'].removeprefix('resp_'))}")
        kept = [
            each["content"].split(".")[0] for each in run.json()["input"] if each["role"] == "user"
        ]
        assert kept == [f"Question {n}" for n in range(length)]


async def test_calls_of_a_graph_s_agents_are_answered_once_more(
    bottega: Running, model: FakeModel
) -> None:
    tool = {"type": "client", **LOCATE}
    await define(bottega, name="asker", tools=[tool])
    graph = {"name": "alone", "nodes": [{"agent": "asker"}], "edges": []}
    (await bottega.client.post("/v1/graphs", json=graph)).raise_for_status()
    model.script(calls(("locate", {"user": "ada"})), text("In Rome."), text("In Oslo."))
    body: Bodies = {"model": "graph:alone", "input": "Where is Ada?"}
    first = (await bottega.client.post("/openai/v1/responses", json=body)).json()
    ((call, _),) = asked_calls("responses", first)
    for place in ("Rome", "Oslo"):
        body["input"] = [result("responses", call, place)]
        body["previous_response_id"] = first["id"]
        answer = await bottega.client.post("/openai/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert said("responses", answer.json()) == f"In {place}."
        assert "Where is Ada?" in str(model.requests[-1]["messages"])


async def test_instructions_of_a_graph_are_bounded_in_all(bottega: Running) -> None:
    names = ["clerk", *(f"clerk{n}" for n in range(2))]
    for name in names[1:]:
        await define(bottega, name=name)
    graph = {"name": "team", "nodes": [{"agent": name} for name in names], "edges": []}
    (await bottega.client.post("/v1/graphs", json=graph)).raise_for_status()
    body = {"model": "graph:team", "input": "?", "instructions": "x" * 200_000}
    answer = await bottega.client.post("/openai/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "instructions")


async def test_to_cancel_an_old_response_leaves_later_ones_alone(
    bottega: Running, model: FakeModel
) -> None:
    first, ids = await asked_first(bottega, model)
    tools, go_on = [function("responses")], asyncio.Event()
    model.script(gated(go_on, text("In Rome.")))
    results = [result("responses", call, "Rome") for call in ids]
    more: Bodies = {"background": True, "previous_response_id": first["id"]}
    _, later = await send(bottega, "responses", results, tools=tools, **more)
    path = f"/openai/v1/responses/{first['id']}/cancel"
    answer = await bottega.client.post(path)
    assert (answer.status_code, answer.json()["status"]) == (200, "completed")
    go_on.set()

    async def found() -> Any:
        return (await bottega.client.get(f"/openai/v1/responses/{later['id']}")).json()

    done = await until(found, lambda each: each["status"] not in ("queued", "in_progress"))
    assert (done["status"], said("responses", done)) == ("completed", "In Rome.")


async def test_items_are_few_and_of_answers(bottega: Running, model: FakeModel) -> None:
    go_on = asyncio.Event()
    model.script(text("Hello."), gated(go_on, text("late")))
    _, first = await send(bottega, "responses", "Hi.")
    (item,) = first["output"]
    _, early = await send(bottega, "responses", "Hi.", background=True)
    name = early["id"].replace("resp_", "msg_")
    status, body = await send(bottega, "responses", [USER, {"id": name}])
    assert (status, body["error"]["param"]) == (400, "input.1"), body
    go_on.set()
    model.script(text("Fine."))
    status, body = await send(bottega, "responses", [*[{"id": item["id"]}] * 400, USER])
    assert status == 200, body
    many = [{"id": f"msg_{n:032x}"} for n in range(129)]
    status, body = await send(bottega, "responses", [*many, USER])
    assert (status, body["error"]["param"]) == (400, "input"), body
