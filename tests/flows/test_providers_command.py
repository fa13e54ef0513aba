"""``bottega providers test``."""

import asyncio
from pathlib import Path
from typing import Any

from bottega.settings import Settings
from tests import forks
from tests.fake_model import FakeModel, calls, http_error, text
from tests.service import running


def _answer(request: dict[str, Any]) -> Any:
    if request.get("tools"):
        return calls(("add", {"a": 17, "b": 25}))
    if request.get("response_format"):
        return text('{"city": "Paris"}')
    return text("one two three four five six")


async def test_each_kind_of_call_is_tried_and_reported(
    settings: Settings, database_url: str
) -> None:
    async def run(*arguments: str) -> Any:
        environment = {
            "PATH": "",
            "PYTHONPATH": str(Path(__file__).parents[2] / "app"),
            "COLUMNS": "300",
            "DATABASE_URL": database_url,
            "OPENAI_API_KEY": "unused-key",
            "BOTTEGA_EGRESS_ALLOW": "127.0.0.1",
        }
        return await asyncio.to_thread(forks.run, ("providers", "test", *arguments), environment)

    allowed = settings.model_copy(update={"egress_allow": ["127.0.0.1"]})
    async with FakeModel(_answer, token_delay_s=0.03) as model:
        async with running(allowed, database_url) as server:
            body = {"name": "mine", "dialect": "chat", "base_url": model.base_url}
            assert (await server.client.post("/v1/providers", json=body)).status_code == 201
        good = await run("mine", "--model", "m")
        assert good.returncode == 0, good.stderr + good.stdout
        assert good.stdout.count("yes") == 4
        assert {request["model"] for request in model.requests} == {"m"}

        model.decide = lambda request: (
            http_error(400) if request.get("response_format") else _answer(request)
        )
        bad = await run("mine")
        assert bad.returncode == 1
        assert bad.stdout.count("yes") == 3
        assert "model_bad_request" in bad.stdout

        unknown = await run("nobody")
        assert unknown.returncode != 0
        assert "there is no provider 'nobody'" in unknown.stderr
