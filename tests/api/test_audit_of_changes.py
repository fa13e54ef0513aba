"""Each operation that changes something leaves an entry that names who did it, and no secret.

The operations are those of the application: a new one without a decision below fails.
"""

import json
from typing import Any

import httpx2
from fastapi.routing import APIRoute

from bottega.api.auth import is_public
from bottega.main import every_route
from tests.service import Running
from tests.tenants import holder

AGENT = {"system_message": "x"}
RUN = {"agent": "a", "input": "x"}
CRON = {"cron": "0 8 * * *", "run": RUN}
SECRET = "sk-never-in-the-log-0123456789"
PROVIDER = {"dialect": "chat", "base_url": "https://models.example.com/v1"}
PATTERN = {
    "name": "Export by month",
    "summary": "Export a month at a time.",
    "category": "strategic",
    "applicability": {"domains": ["billing"], "problem_types": ["export"]},
    "content": {
        "kind": "HEURISTIC",
        "fields": {"action": "Join.", "condition": "It is long.", "rationale": "It is limited."},
    },
}
CHANGES: dict[str, tuple[str, str, Any, str]] = {
    # method, path, body, action; in an order in which each finds what it changes
    "create_agent": ("POST", "/v1/agents", {"name": "a", **AGENT}, "agent.create"),
    "replace_agent": ("PUT", "/v1/agents/a", AGENT | {"description": "y"}, "agent.replace"),
    "create_graph": ("POST", "/v1/graphs", {"name": "g", "nodes": ["a", "b"]}, "graph.create"),
    "replace_graph": ("PUT", "/v1/graphs/g", {"nodes": ["a", "b"], "ttl_s": 9}, "graph.replace"),
    "add_graph_edge": (
        *("POST", "/v1/graphs/g/edges", {"source": "a", "target": "b"}),
        "graph.replace",
    ),
    "remove_graph_edge": (
        *("DELETE", "/v1/graphs/g/edges?source=a&target=b", None),
        "graph.replace",
    ),
    "create_provider": ("POST", "/v1/providers", {"name": "p", **PROVIDER}, "provider.create"),
    "replace_provider": ("PUT", "/v1/providers/p", PROVIDER, "provider.replace"),
    "set_default_model": (
        *("PUT", "/v1/default-model", {"model": "default/x"}),
        "default_model.set",
    ),
    "create_schedule": ("POST", "/v1/schedules", {"name": "s", **CRON}, "schedule.create"),
    "replace_schedule": ("PUT", "/v1/schedules/s", CRON, "schedule.replace"),
    "change_schedule": ("PATCH", "/v1/schedules/s", {"paused": True}, "schedule.change"),
    "apply": (
        *("POST", "/v1/apply", {"schedules": [{"name": "t", **CRON}]}),
        "schedule.create",
    ),
    "delete_schedule": ("DELETE", "/v1/schedules/s", None, "schedule.delete"),
    "delete_provider": ("DELETE", "/v1/providers/p", None, "provider.delete"),
    "delete_graph": ("DELETE", "/v1/graphs/g", None, "graph.delete"),
    "delete_agent": ("DELETE", "/v1/agents/a", None, "agent.delete"),
    "create_key": ("POST", "/v1/keys", {"name": "x", "role": "viewer"}, "key.create"),
    "create_token": (
        *("POST", "/v1/tokens", {"user": "ada", "actions": ["run"], "expires_in": 60}),
        "token.create",
    ),
    "import_episode": (
        *("POST", "/v1/episodes", {"outcome": "SUCCESS", "task": {"original_input": "x"}}),
        "episode.import",
    ),
    "create_pattern": ("POST", "/v1/patterns", PATTERN, "pattern.create"),
    "rotate_webhook_secret": ("POST", "/v1/webhook-secret", {}, "webhook_secret.rotate"),
    "create_user_fact": ("POST", "/v1/users/bob/facts", {"text": "x"}, "fact.create"),
    "maintain_memory": ("POST", "/v1/memory/maintenance", {}, "memory.maintain"),
    "delete_user": ("DELETE", "/v1/users/ada", None, "user.delete"),
    "delete_session": ("DELETE", "/v1/sessions/m", None, "session.delete"),
}
ELSEWHERE = {
    # proven with what they need: tests/flows/test_audit_of_work.py, and the tests of each part
    *("create_mcp_server", "replace_mcp_server", "delete_mcp_server", "refresh_mcp_server"),
    *(
        "put_secret",
        "delete_secret",
        "change_user_fact",
        "delete_user_fact",
        "revoke_key",
        "revoke_token",
        "delete_episode",
    ),
    *("change_pattern", "record_pattern_application", "validate_pattern", "deprecate_pattern"),
    *("merge_patterns", "prune_patterns", "learn_from_episode", "give_run_feedback"),
    *(
        "cancel_batch",
        "retry_batch",
        "cancel_run",
        "cancel_run_task",
        "send_run_message",
        "resolve_interrupt",
        "delete_file",
    ),
    *("delete_session_memory", "change_lesson", "delete_lesson"),
}
WORK = {
    # runs, sessions and files are records themselves; runs name who started them
    *(
        "create_run",
        "create_draft_run",
        "create_batch",
        "create_eval",
        "retry_run",
        "fork_run",
        "create_session",
        "change_session",
        "fork_session",
    ),
    *("create_file", "create_ws_ticket"),
}
READS = {
    *("search_episodes", "find_similar_failures", "find_context", "match_patterns"),
    *("dry_run_graph", "test_provider"),
}


def changing(server: Running) -> set[str]:
    """Return the ids of all operations of our own API that are not reads by their method."""
    return {
        str(route.operation_id)
        for route in every_route()
        if isinstance(route, APIRoute)
        and route.path.startswith("/v1/")
        and not is_public(route.path)
        and not {"GET"} & set(route.methods or ())
    }


async def test_each_operation_has_a_decision(server_: Running) -> None:
    decided = {*CHANGES, *ELSEWHERE, *WORK, *READS}
    assert changing(server_) == decided


async def test_each_change_names_who_made_it_and_no_secret(
    server_: Running, database_url: str
) -> None:
    made = await holder(database_url, "acme")
    async with made.client(server_) as client:
        await client.post("/v1/agents", json={"name": "b", **AGENT})
        for session in ({"id": "m"}, {"id": "n", "user": "ada"}):
            assert (await client.post("/v1/sessions", json=session)).status_code == 201
        entries = await noted(client)
        secrets = [made.key]
        for operation, (method, path, body, action) in CHANGES.items():
            answer = await client.request(method, path, json=body)
            assert answer.is_success, (operation, answer.text)
            found = answer.json() if answer.content else {}
            secrets += [found[name] for name in ("key", "token", "secret") if found.get(name)]
            before, entries = len(entries), await noted(client)
            added = [(each["action"], each["actor"]) for each in entries[before:]]
            added = [each for each in added if each[0] != "user.deleted"]  # the end of an erasure
            assert added == [(action, f"key:{made.prefix}")], operation
    text = json.dumps(entries)
    assert not [each for each in secrets if each in text]


async def noted(client: httpx2.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/v1/audit?limit=100")).json()["items"]
    return found
