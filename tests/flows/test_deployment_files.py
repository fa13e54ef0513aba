"""The unit of systemd, judged by systemd and started as it says; the compose file."""

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.fake_model import FakeModel, free_port
from tests.flows.test_processes import environment
from tests.processes import command
from tests.tenants import holder

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


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path("docker-compose.yml").read_text())["services"]
    return found


def test_compose_starts_what_is_needed_and_can_start_several_workers() -> None:
    assert services().keys() == {"db", "migrate", "api", "worker"}
    worker = services()["worker"]
    assert not worker.keys() & {"container_name", "ports", "hostname", "deploy"}
    assert worker["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}


def test_images_are_pinned_by_digest() -> None:
    bases = re.findall(r"^FROM (\S+)", Path("Dockerfile").read_text(), re.MULTILINE)
    images = [each["image"] for each in services().values() if "build" not in each]
    assert len(bases) == 2
    for image in (*bases, *images):
        assert re.fullmatch(r"\S+:\d[\w.-]+@sha256:[0-9a-f]{64}", image), image


def test_containers_get_all_settings_but_those_of_this_machine_s_sockets() -> None:
    image = dict(re.findall(r"(BOTTEGA_\w+)=(\S+)", Path("Dockerfile").read_text()))
    for name in ("migrate", "api", "worker"):
        service = services()[name]
        assert service["env_file"] == [{"path": ".env", "required": False}]
        assert service["read_only"]
        # A value of .env would move the server away from the published port.
        assert image.items() <= service["environment"].items()
        assert not any(key.startswith("AWS_") for key in service["environment"])
    assert services()["api"]["ports"] == ["127.0.0.1:${BOTTEGA_PORT:-8400}:8400"]


async def test_the_health_check_of_a_worker_passes_while_it_answers(
    database_url: str, model: FakeModel
) -> None:
    _, program, *arguments = services()["worker"]["healthcheck"]["test"]
    port = services()["worker"]["environment"]["BOTTEGA_METRICS_PORT"]
    assert program == "python"
    free = str(free_port())
    check = [sys.executable, *(each.replace(port, free) for each in arguments)]

    def is_healthy() -> bool:
        return subprocess.run(check, capture_output=True).returncode == 0

    await holder(database_url)  # the report wants its token
    settings = environment(database_url, model, BOTTEGA_METRICS_PORT=free)
    async with command("worker", **settings) as worker:
        assert await asyncio.to_thread(is_healthy)
        worker.kill()
        await worker.process.wait()
        assert not await asyncio.to_thread(is_healthy)
