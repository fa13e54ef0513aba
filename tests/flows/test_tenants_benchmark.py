"""The benchmark of tenants runs, and its attacks reach what they attack."""

import asyncio
import re
import sys

import pytest


@pytest.mark.deep
async def test_the_table_has_a_row_for_each_attack() -> None:
    command = [sys.executable, "-m", "benchmarks.tenants", "--seconds", "1", "--rounds", "1"]
    only = "--only", "flood,control_frames,drawings"
    process = await asyncio.create_subprocess_exec(
        *command, *only, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    rows = re.findall(
        r"^(\S.*?) {2,}\d+ +\d+ +[\d.]+ +\d+ +\d+ +[\d.]+ +(.*)$", told.decode(), re.M
    )
    seen = dict(rows)
    assert len(seen) == 3, told.decode()
    assert "429" in seen["starts 10 x its limit of runs"]
    assert "pings" in seen["pings on 60 WebSockets"]
    assert "200" in seen["drawings of a large graph"]
