"""The chat page of the docs, on an origin of its own, with nothing but a user's token."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import BrowserContext, expect

from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.flows.conftest import asking
from tests.service import running
from tests.tenants import holder

PAGE = Path(__file__).parents[2] / "docs/guides/conversations-in-a-browser.md"


def page() -> str:
    found = re.search(r"```html\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    assert found[1].count("\n") <= 60
    return found[1]


@asynccontextmanager
async def other_origin() -> AsyncIterator[str]:
    """Serve the page alone, from another port."""
    body = page().encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(body)}\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def decides(request: dict[str, Any]) -> Any:
    """Ask which order at "Refund", and then say what was answered."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return text(f"Refunded {last['content']}.")
    if "Refund" in str(last["content"]):
        return calls(("ask_user", {"question": "Which order?"}))
    return text("Hello, Ada.")


@pytest.mark.parametrize("over", ["EventSource", "WebSocket"])
async def test_a_user_chats_with_a_token_alone(
    settings: Settings, database_url: str, profile: BrowserContext, over: str
) -> None:
    key = await holder(database_url)
    async with FakeModel() as model, other_origin() as origin:
        model.decide = decides
        service = asking(model, settings).model_copy(update={"cors_origins": [origin]})
        async with (
            running(service, database_url, worker=True) as server,
            key.client(server) as client,
        ):
            tools = [{"type": "builtin", "name": "ask_user"}]
            shop = {"name": "shop", "system_message": "You help.", "tools": tools}
            assert (await client.post("/v1/agents", json=shop)).status_code == 201
            actions = ["run", "read", "upload", "message", "cancel", "answer"]
            body = {"user": "ada", "actions": actions, "expires_in": 600, "agents": ["shop"]}
            token = (await client.post("/v1/tokens", json=body)).json()["token"]
            theirs = {"agent": "shop", "input": "x", "user": "bob", "session_id": "of-bob"}
            assert (await client.post("/v1/runs?wait=30", json=theirs)).status_code == 202
            tab = await profile.new_page()
            try:
                ws = "&ws=1" if over == "WebSocket" else ""
                base = f"http://127.0.0.1:{server.port}"
                await tab.goto(f"{origin}/#base={base}&agent=shop&token={token}{ws}")
                field, log = tab.get_by_label("Message"), tab.locator("#log")
                note = {"name": "note.txt", "mimeType": "text/plain", "buffer": b"a note"}
                await tab.get_by_label("File").set_input_files([note])  # type: ignore[arg-type]
                await field.fill("Good day")
                await field.press("Enter")
                await expect(log.locator(".assistant").last).to_have_text("Hello, Ada.")
                await field.fill("Refund it")
                await field.press("Enter")
                await expect(log.locator(".question")).to_have_text("Which order?")
                await field.fill("4711")
                await field.press("Enter")
                await expect(log.locator(".assistant").last).to_contain_text("4711")
                await tab.reload()
                await expect(log.locator(".user").first).to_contain_text("Good day")
                await expect(log.locator(".assistant").last).to_contain_text("4711")
                options = (
                    await tab.get_by_label("Conversations").locator("option").all_inner_texts()
                )
                assert len(options) == 2
                assert "of-bob" not in options
                await expect(log.locator(".error")).to_have_count(0)
            finally:
                await tab.close()
            files = (await client.get("/v1/files?user=ada")).json()["items"]
            assert [each["name"] for each in files] == ["note.txt"]
