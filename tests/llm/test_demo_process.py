"""The demo model as a separate process."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bottega.agents.messages import HumanMessage
from bottega.errors import UnavailableError
from bottega.llm.demo_process import demo_model
from bottega.llm.vendors import OpenAIProvider
from tests.waiting import until

PARENT = """
import asyncio
from bottega.llm.demo_process import demo_model

async def main():
    async with demo_model() as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def connect(base_url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(base_url.rsplit(":", 1)[1].split("/")[0])
    return await asyncio.open_connection("127.0.0.1", port)


async def closed(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    """Wait until the other side has closed the connection."""
    reader, writer = connection
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


async def test_it_answers_then_stops() -> None:
    async with demo_model(latency_ms=1, token_delay_ms=1) as url:
        assert url.startswith("http://127.0.0.1:")
        provider = OpenAIProvider("demo", api_key="none", base_url=url)
        deltas: list[str] = []
        answer = await provider.invoke([HumanMessage(content="hello")], on_delta=deltas.append)
        await provider.aclose()
        connection = await connect(url)

    assert "hello" in answer.content
    assert "".join(deltas) == answer.content
    assert await closed(connection)
    with pytest.raises(ConnectionRefusedError):
        await connect(url)


async def test_it_stops_with_an_open_stream() -> None:
    async with demo_model(token_delay_ms=500) as url:
        provider = OpenAIProvider("demo", api_key="none", base_url=url, patience_s=0)
        heard = asyncio.Event()
        task = asyncio.ensure_future(
            provider.invoke([HumanMessage(content="hello")], on_delta=lambda _: heard.set())
        )
        connection = await connect(url)
        await until(heard.is_set)
        assert not task.done()
    assert await closed(connection)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await provider.aclose()


async def test_it_ends_with_a_parent_that_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    url = (await parent.stdout.readline()).decode().strip()
    connection = await connect(url)

    parent.kill()

    assert await parent.wait() == -signal.SIGKILL
    assert await closed(connection)  # it keeps idle connections open for as long as it lives


async def test_it_starts_in_a_folder_with_another_bottega(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bottega").mkdir()
    (tmp_path / "bottega" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    async with demo_model() as url:
        assert url


async def test_process_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(UnavailableError, match="demo-model"):
        async with demo_model():
            pass


async def test_process_that_hangs_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    stuck.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stuck))
    with pytest.raises(UnavailableError):
        async with demo_model(start_timeout_s=0.05):
            pass


def test_the_client_side_loads_no_web_server() -> None:
    code = (
        "import bottega.llm.vendors, bottega.llm.demo_process, sys; "
        "web = {'starlette', 'fastapi', 'uvicorn', 'bottega.llm.demo_model'}; "
        "print(sorted(web & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert found.stdout.strip() == "[]"
