"""Run a pipeline with the client that openapi-generator made: python pipeline.py URL KEY."""

import json
import sys
from importlib import import_module
from typing import Any


def inner(value: Any) -> Any:
    """Return the value in the objects that the client makes of `anyOf` and `oneOf`."""
    while hasattr(value, "actual_instance"):
        value = value.actual_instance
    return value


def main() -> None:
    made: Any = import_module("made")
    url, key = sys.argv[1:]
    configuration = made.Configuration(host=url, access_token=key)
    with made.ApiClient(configuration) as client:
        agents, graphs, runs = made.AgentsApi(client), made.GraphsApi(client), made.RunsApi(client)
        for name in ("first", "second"):
            about = {"description": f"The {name}.", "system_message": "You help."}
            agents.create_agent(made.NewAgent.from_dict({"name": name, **about}))
        edges = [{"source": "first", "target": "second"}]
        graph = graphs.create_graph(made.NewGraph.from_dict({"name": "line", "edges": edges}))
        body = {"mode": "dag", "graph": "line", "input": "Build a todo app."}
        started = runs.create_run(made.NewRun(made.DagRun.from_dict(body)), wait=30)
        run = runs.get_run(started.id)
        events = runs.list_run_events(started.id, limit=3)
        found: dict[str, Any] = {
            "edges": len(graph.edges),
            "status": run.status,
            "output": inner(run.output),
            "seqs": [inner(each).seq for each in events.items],
        }
        try:
            runs.get_run("01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11")
        except made.ApiException as error:
            found["missing"] = json.loads(error.body)["code"]
    print(json.dumps(found))


main()
