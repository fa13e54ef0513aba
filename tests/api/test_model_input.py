"""Parameters of model calls and schemas of answers that are refused."""

from typing import Any

import pytest

from bottega.settings import Settings
from bottega.settings.providers import OperatorProvider
from tests.service import Running

CLOCK = [{"type": "builtin", "name": "current_time"}]


@pytest.fixture(scope="module")
def module_settings(module_settings: Settings) -> Settings:
    """Settings with a provider of the dialect ``responses``."""
    own = OperatorProvider(name="thinks", dialect="responses", base_url="http://127.0.0.1:1/v1")
    return module_settings.model_copy(update={"providers": [own]})


@pytest.mark.parametrize(
    ("params", "pointer"),
    [
        ({"temperature": 2.1}, "/params/temperature"),
        ({"temperature": "hot"}, "/params/temperature"),
        ({"top_p": -0.1}, "/params/top_p"),
        ({"max_output_tokens": 0}, "/params/max_output_tokens"),
        ({"reasoning_effort": "huge"}, "/params/reasoning_effort"),
        ({"seed": 2**63}, "/params/seed"),
        ({"stop": []}, "/params/stop"),
        ({"stop": ["x"] * 17}, "/params/stop"),
        ({"stop": [""]}, "/params/stop/0"),
        ({"tool_choice": "auto"}, "/params/tool_choice"),
        ({"service_tier": "a b"}, "/params/service_tier"),
        ({"extra_body": {"a": "x" * 17_000}}, "/params/extra_body"),
        ({"temprature": 1}, "/params/temprature"),
        ({"tool_choice": {"name": "nothing"}}, ""),
    ],
)
async def test_bad_parameters_are_refused(
    refusing: Running, params: dict[str, Any], pointer: str
) -> None:
    body = {"name": "one", "system_message": "You.", "params": params, "tools": CLOCK}
    answer = await refusing.client.post("/v1/agents", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"].startswith(pointer)


async def test_a_parameter_that_the_dialect_lacks_is_refused(refusing: Running) -> None:
    body = {"name": "one", "system_message": "You.", "params": {"seed": 1}, "model": "thinks/m"}
    answer = await refusing.client.post("/v1/agents", json=body)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "unsupported_param")
    assert problem["errors"][0]["pointer"] == "/params/seed"
    assert "'responses'" in problem["detail"]


async def test_extra_fields_must_not_replace_the_run_s_own(refusing: Running) -> None:
    params: dict[str, Any] = {"extra_body": {"messages": []}}
    body = {"name": "one", "system_message": "You.", "params": params}
    answer = await refusing.client.post("/v1/agents", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "reserved_field")
    assert answer.json()["errors"][0]["pointer"] == "/params/extra_body/messages"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range((levels - 2) // 2):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(34),
        {"$ref": "https://example.com/a.json"},
        {"description": "x" * 65_536},
        {"type": "objekt"},
        {"pattern": "(((a{1000}){1000}){1000})"},
        {"pattern": "(a"},
        {"$ref": "#"},
        "a schema",
    ],
    ids=["too deep", "remote", "long", "invalid", "repeats", "pattern", "circle", "no object"],
)
async def test_bad_schemas_are_refused(refusing: Running, schema: Any) -> None:
    body = {"name": "one", "system_message": "You.", "output_schema": schema}
    run = {"agent": "one", "input": "x", "output_schema": schema}
    schedule = {"name": "s", "cron": "0 0 * * *", "run": run}
    for path, sent, place in (
        ("agents", body, "/output_schema"),
        ("runs", run, "/output_schema"),
        ("schedules", schedule, "/run/output_schema"),
    ):
        refused = await refusing.client.post(f"/v1/{path}", json=sent)
        assert refused.status_code == 422, refused.text
        assert refused.json()["errors"][0]["pointer"].startswith(place)
