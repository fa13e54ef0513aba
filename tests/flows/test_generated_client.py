"""A client that openapi-python-client generates from the server's own document.

In the gate, each change of the document shows in its snapshot, and generated requests check the
answers against it.
"""

import asyncio
import compileall
import importlib
import json
import pkgutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bottega.cli.scenarios import SOFTWARE
from tests.service import Running
from tests.tenants import holder

PACKAGE = "generated_client"
CONFIG = {
    "post_hooks": [],
    "content_type_overrides": {"application/x-ndjson": "application/octet-stream"},
}


async def generate(document: dict[str, Any], folder: Path) -> None:
    """Write the client into `folder`; anything that the generator leaves out is an error."""
    (folder / "openapi.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openapi_python_client", "generate", "--fail-on-warning"),
        *("--path", folder / "openapi.json", "--config", folder / "config.json"),
        *("--meta", "none", "--output-path", folder / PACKAGE),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await generator.communicate()
    assert generator.returncode == 0, output.decode()
    assert output.decode().split() == ["Generating", str(folder / PACKAGE)]


def import_all() -> SimpleNamespace:
    """Import every module; return each function of each operation and each model."""
    package = importlib.import_module(PACKAGE)
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.")
    ]
    operations = {
        module.__name__.rpartition(".")[2]: module.asyncio
        for module in modules
        if hasattr(module, "asyncio_detailed")
    }
    models = importlib.import_module(f"{PACKAGE}.models")
    return SimpleNamespace(**operations, models=models, Client=package.AuthenticatedClient)


@pytest.fixture
async def generated(
    bottega: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SimpleNamespace]:
    document = (await bottega.client.get("/openapi.json")).json()
    await generate(document, tmp_path)
    assert compileall.compile_dir(tmp_path / PACKAGE, quiet=1, workers=1)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_all()
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.mark.deep
async def test_the_generated_client_runs_a_pipeline(
    bottega: Running, generated: SimpleNamespace, database_url: str
) -> None:
    api, models = generated, generated.models
    key = (await holder(database_url)).key
    async with api.Client(f"http://127.0.0.1:{bottega.port}", token=key, timeout=30) as client:
        for definition in SOFTWARE.agents:
            unjudged = {**definition, "success_check": []}
            agent = await api.create_agent(client=client, body=models.NewAgent.from_dict(unjudged))
            assert (agent.name, agent.version) == (definition["name"], 1)
        edges = [models.Edge("requirements", "designer"), models.Edge("designer", "implementer")]
        graph = await api.create_graph(client=client, body=models.NewGraph("line", edges=edges))
        assert [edge.target for edge in graph.edges] == ["designer", "implementer"]

        body = models.OrchestratedRun(
            input_=SOFTWARE.task, agent=SOFTWARE.coordinator, graph=graph.name
        )
        started = await api.create_run(client=client, body=body, wait=30)
        assert started.status == models.RunStatus.COMPLETED
        run = await api.get_run(started.id, client=client)
        assert (run.id, run.input_, run.error) == (started.id, SOFTWARE.task, None)
        assert run.output
        assert run.ended_at > run.started_at
        assert run.usage.model_calls > run.usage.tool_calls > 0

        tasks = await api.list_run_tasks(run.id, client=client)
        assert {task.status for task in tasks.items} == {models.TaskStatus.COMPLETED}
        events = await api.list_run_events(run.id, client=client, limit=3)
        assert [event.seq for event in events.items] == [1, 2, 3]
        rest = await api.list_run_events(run.id, client=client, cursor=events.next_cursor)
        assert rest.items[0].seq == 4

        (episode,) = (await api.list_episodes(client=client)).items
        assert (episode.run_id, episode.outcome) == (run.id, models.EpisodeOutcome.UNKNOWN)
        assert episode.task["original_input"] == SOFTWARE.task
        same = await api.get_episode(episode.id, client=client)
        assert same.execution["trace"]
        found = await api.search_episodes(client=client, body=models.SearchByQuery("todo"))
        assert [hit.episode.id for hit in found.items] == [episode.id]
        query = models.ContextQuery("Build a todo app, please.")
        context = await api.find_context(client=client, body=query)
        assert [hit.episode.id for hit in context.episodes] == [episode.id]

        missing = await api.get_run(episode.id, client=client)
        assert isinstance(missing, models.Problem)
        assert missing.code == "not_found"
