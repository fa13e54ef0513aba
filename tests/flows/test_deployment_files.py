"""The unit of systemd, judged by systemd and started as it says; the compose file."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
import yaml

from tests.fake_model import FakeModel
from tests.flows.test_processes import environment
from tests.processes import command

UNIT = Path("docs/systemd/bottega.service")
OURS = Path(sys.executable).parent / "bottega"


def values(key: str) -> list[str]:
    lines = UNIT.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


@pytest.mark.deep
async def test_the_unit_starts_what_it_names(database_url: str, model: FakeModel) -> None:
    (start,) = values("ExecStart")
    program, *arguments = shlex.split(start)
    assert program == "/opt/bottega/bin/bottega"
    assert values("ExecStartPre") == [f"{program} migrate"]
    options = (*arguments, "--port", "0")
    async with command(*options, **environment(database_url, model)) as parent:
        url = f"http://127.0.0.1:{parent.port}/readyz"
        async with httpx2.AsyncClient(timeout=30) as client:
            assert (await client.get(url)).json()["status"] == "ready"


@pytest.mark.deep
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "systemd"], check=True)
    there = tmp_path / "bottega.service"
    there.write_text(UNIT.read_text().replace("/opt/bottega/bin/bottega", str(OURS)))
    judged = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(there)], capture_output=True, text=True
    )
    complaints = [line for line in judged.stderr.splitlines() if "bottega.service" in line]
    assert complaints == []


def test_compose_can_start_several_workers() -> None:
    services = yaml.safe_load(Path("docker-compose.yml").read_text())["services"]
    worker = services["worker"]
    assert not worker.keys() & {"container_name", "ports", "hostname", "deploy"}
    assert worker["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
