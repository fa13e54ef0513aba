"""The unit of systemd, judged by systemd and started as it says; compose files; the chart."""

import asyncio
import json
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
from jsonschema import Draft202012Validator

from bottega import __version__
from tests.fake_model import FakeModel, free_port
from tests.flows.test_processes import environment
from tests.processes import command
from tests.tenants import holder

UNIT = Path("deploy/bottega.service")
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


COMPOSE = Path("docker-compose.yml")
WITH_FAILOVER = Path("deploy/docker-compose.ha.yml")


def services(file: Path = COMPOSE) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())["services"]
    return found


def test_compose_starts_what_is_needed_and_can_start_several_workers() -> None:
    assert services().keys() == {"db", "migrate", "api", "worker"}
    worker = services()["worker"]
    assert not worker.keys() & {"container_name", "ports", "hostname", "deploy"}
    assert worker["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}


def test_images_are_pinned_by_digest() -> None:
    files = ("Dockerfile", str(WITH_FAILOVER))
    bases = [
        base
        for name in files
        for base in re.findall(r"^ *FROM (\S+)", Path(name).read_text(), re.M)
    ]
    images = [
        each["image"]
        for file in (COMPOSE, WITH_FAILOVER)
        for each in services(file).values()
        if "build" not in each
    ]
    assert len(bases) == 3
    for image in (*bases, *images):
        assert re.fullmatch(r"\S+:\d[\w.-]+@sha256:[0-9a-f]{64}", image), image


@pytest.mark.parametrize("file", [COMPOSE, WITH_FAILOVER], ids=lambda file: file.name)
def test_containers_get_all_settings_but_those_of_this_machine_s_sockets(file: Path) -> None:
    image = dict(re.findall(r"(BOTTEGA_\w+)=(\S+)", Path("Dockerfile").read_text()))
    for name in ("migrate", "api", "worker"):
        service = services(file)[name]
        assert service["env_file"] == [{"path": ".env", "required": False}]
        assert service["read_only"]
        # A value of .env would move the server away from the published port.
        assert image.items() <= service["environment"].items()
        assert not any(key.startswith("AWS_") for key in service["environment"])
    assert services(file)["api"]["ports"] == ["127.0.0.1:${BOTTEGA_PORT:-8400}:8400"]
    assert services(file)["worker"]["healthcheck"] == services()["worker"]["healthcheck"]


def test_each_server_that_fails_over_is_in_the_address() -> None:
    both = services(WITH_FAILOVER)
    servers = [name for name in both if name.startswith("db")]
    for name in ("migrate", "api", "worker"):
        assert f"host={','.join(servers)} " in both[name]["environment"]["DATABASE_URL"]
    (configuration,) = yaml.safe_load(WITH_FAILOVER.read_text())["configs"].values()
    patroni = yaml.safe_load(configuration["content"])
    assert patroni["bootstrap"]["dcs"]["synchronous_mode"] is True
    assert patroni["bootstrap"]["dcs"]["ttl"] == 20


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


CHART = Path("deploy/helm")


def rendered(path: Path) -> list[dict[str, Any]]:
    """Return a template's manifests: without lines of control, each value a word."""
    lines = [line for line in path.read_text().splitlines() if not _CONTROL.fullmatch(line)]
    text = re.sub(r"\{\{.*?\}\}", "word", "\n".join(lines))
    return [each for each in yaml.safe_load_all(text) if each is not None]


_CONTROL = re.compile(r"\s*\{\{[^}]*\}\}\s*")


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """Return all manifests of the chart, by kind and name."""
    paths = sorted(CHART.glob("templates/*.yaml"))
    return {
        (each["kind"], each["metadata"]["name"]): each for path in paths for each in rendered(path)
    }


def chart_values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def test_the_chart_has_what_runs_bottega() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["apiVersion"], about["appVersion"]) == ("v2", __version__)
    assert manifests().keys() == {
        ("Job", "word-migration"),
        ("Deployment", "word-api"),
        ("Deployment", "word-worker"),
        ("Service", "word"),
        ("PodDisruptionBudget", "word-api"),
        ("PodDisruptionBudget", "word-worker"),
        ("ScaledObject", "word-worker"),
    }
    scaling = (CHART / "templates/scaling.yaml").read_text()
    assert scaling.startswith("{{- if .Values.keda.enabled }}\n")
    assert scaling.endswith("\n{{- end }}\n")


def test_selectors_find_their_pods() -> None:
    for (kind, name), each in manifests().items():
        if kind in ("Deployment", "PodDisruptionBudget"):
            wanted = each["spec"]["selector"]["matchLabels"]
            pods = manifests()["Deployment", name]["spec"]["template"]["metadata"]["labels"]
            assert wanted.items() <= pods.items()
    api = manifests()["Deployment", "word-api"]["spec"]["template"]["metadata"]["labels"]
    assert manifests()["Service", "word"]["spec"]["selector"].items() <= api.items()


def test_containers_of_the_chart_may_do_little() -> None:
    for (kind, _), each in manifests().items():
        if kind not in ("Deployment", "Job"):
            continue
        pod = each["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp"}


def test_the_chart_s_values_are_those_of_its_schema_and_its_templates() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    check = Draft202012Validator(schema)
    values = chart_values()
    assert list(check.iter_errors(values)) == []
    wrong: list[dict[str, Any]] = [{"images": {}}, {"environment": {"X": 1}}, {"keda": {}}]
    wrong.append({"environment": {"BOTTEGA_DRAIN_GRACE_S": "60"}})  # no time for the rest
    for change in wrong:
        assert list(check.iter_errors(values | change)), change
    templates = "".join(path.read_text() for path in CHART.glob("templates/*.yaml"))
    used = set(re.findall(r"\.Values\.([\w.]+)", templates))
    structured = ("image", "api", "worker", "service", "keda")
    present = {name for name in values if name not in structured}
    present |= {f"{group}.{name}" for group in structured for name in values[group]}
    assert used == present


def test_the_chart_scales_by_a_metric_that_exists() -> None:
    (trigger,) = manifests()["ScaledObject", "word-worker"]["spec"]["triggers"]
    assert trigger["metadata"]["query"] == "max(bottega_queue_depth)"
    dashboard = Path("docs/grafana/bottega.json").read_text()  # tests look at its metrics
    assert trigger["metadata"]["query"] in dashboard


def test_the_example_of_a_cluster_has_what_a_migration_needs() -> None:
    cluster = yaml.safe_load(Path("deploy/cloudnative-pg.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("postgresql.cnpg.io/v1", "Cluster")
    first = cluster["spec"]["bootstrap"]["initdb"]
    assert first["encoding"] == "UTF8"
    assert "CREATE EXTENSION vector SCHEMA public" in first["postInitApplicationSQL"]
