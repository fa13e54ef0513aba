"""Numbers and names in files, and a database that refuses them: no run ends by that."""

import json
from typing import Any

import pytest

from bottega.agents.parts import MOST_FILE_TOKENS
from tests.fake_model import FakeModel
from tests.flows.test_mcp_tools import define, run, shared, tools
from tests.flows.test_metering import broken
from tests.mcp_server import ToolServer
from tests.service import Running

__all__ = ["shared", "tools"]

PAGES = 1_100_000
"""By 2,000 tokens each they are more than an integer of the database holds."""


async def test_the_pages_of_a_file_overflow_nothing(guest: Running) -> None:
    data = b"%PDF-1.7\n" + b"/Type /Page\n" * PAGES
    answer = await guest.client.post("/v1/files", files={"file": ("a.pdf", data)})
    assert answer.status_code == 201, answer.text
    assert answer.json()["media_type"] == "application/pdf"
    stored = await guest.owner.fetchval(
        "SELECT tokens FROM files WHERE id = $1", answer.json()["id"]
    )
    assert stored == MOST_FILE_TOKENS


async def test_an_answer_that_the_database_refuses_is_the_tool_s_error(
    guest: Running, guest_model: FakeModel, tools: ToolServer
) -> None:
    await define(guest.client, {"url": tools.url})
    async with broken(guest, "add_file"):
        (failed,) = await run(guest, guest_model, ("s__picture", {}))
    assert failed["type"] == "tool.failed"
    assert "could not be stored" in json.dumps(failed["data"])
    (pictured,) = await run(guest, guest_model, ("s__picture", {}))
    assert pictured["type"] == "tool.completed"


PASSING = """
CREATE SEQUENCE asked;
GRANT USAGE ON SEQUENCE asked TO PUBLIC;
CREATE FUNCTION add_file(jsonb, bigint, bigint) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('asked') = 1 THEN
        RAISE EXCEPTION 'passing' USING ERRCODE = 'serialization_failure';
    END IF;
    RETURN away($1, $2, $3);
END $$;
"""


async def test_a_file_is_stored_once_a_passing_error_of_the_database_is_over(
    guest: Running, guest_model: FakeModel, tools: ToolServer
) -> None:
    await define(guest.client, {"url": tools.url})
    async with broken(guest, "add_file"):
        await guest.owner.execute(PASSING)
        (pictured,) = await run(guest, guest_model, ("s__picture", {}))
        assert await guest.owner.fetchval("SELECT last_value FROM asked") == 2
        await guest.owner.execute("DROP FUNCTION add_file; DROP SEQUENCE asked")
    assert pictured["type"] == "tool.completed"


@pytest.mark.parametrize("odd", [b"\x00", "\ud800".encode("utf-8", "surrogatepass"), b"\xff"])
async def test_a_file_s_name_is_stored_or_refused(guest: Running, odd: bytes) -> None:
    name: Any = b"a" + odd + b".txt"
    body = (
        b'--B\r\ncontent-disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n'
        b"hello\r\n--B--\r\n"
    )
    headers = {"content-type": "multipart/form-data; boundary=B"}
    answer = await guest.client.post("/v1/files", content=body, headers=headers)
    assert answer.status_code in (201, 400, 422), answer.text
