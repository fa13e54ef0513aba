"""Tables for queries that Python composes: names and types of the columns.

The baseline migration has the whole schema, with comments. Most tables are not in this module,
because only SQL functions and fixed SQL statements use them.
"""

from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    LargeBinary,
    MetaData,
    Table,
    Text,
    Uuid,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.types import TypeEngine

_TYPES: dict[str, TypeEngine[Any]] = {
    "uuid": Uuid(),
    "text": Text(),
    "texts": ARRAY(Text()),
    "json": JSONB(),
    "number": BigInteger(),
    "real": Float(),
    "time": DateTime(timezone=True),
    "binary": LargeBinary(),
    "flag": Boolean(),
}
_metadata = MetaData()


def _table(name: str, **columns: str) -> Table:
    made: list[Column[Any]] = [
        Column(each, _TYPES[kind]) for kind in columns for each in columns[kind].split()
    ]
    return Table(name, _metadata, *made)


agents = _table(
    "agents",
    uuid="tenant_id",
    text="name",
    number="version",
    time="created_at updated_at deleted_at",
)
agent_versions = _table(
    "agent_versions",
    uuid="tenant_id",
    text="name",
    number="version",
    json="definition",
    time="created_at",
)
definition_epochs = _table("definition_epochs", uuid="tenant_id epoch", text="default_model")
graphs = _table(
    "graphs",
    uuid="tenant_id",
    text="name",
    number="version",
    time="created_at updated_at deleted_at",
)
graph_versions = _table(
    "graph_versions",
    uuid="tenant_id",
    text="name",
    number="version",
    json="definition",
    time="created_at",
)
providers = _table(
    "providers",
    uuid="tenant_id",
    text="name",
    number="version",
    time="created_at updated_at deleted_at",
)
provider_versions = _table(
    "provider_versions",
    uuid="tenant_id",
    text="name",
    number="version",
    json="definition",
    time="created_at",
)
mcp_servers = _table(
    "mcp_servers",
    uuid="tenant_id",
    text="name",
    number="version",
    time="created_at updated_at deleted_at",
)
mcp_server_versions = _table(
    "mcp_server_versions",
    uuid="tenant_id",
    text="name",
    number="version",
    json="definition",
    time="created_at",
)
sessions = _table(
    "sessions",
    uuid="tenant_id",
    text="id user_id title",
    json="metadata",
    time="created_at updated_at",
)
conversations = _table(
    "conversations",
    uuid="tenant_id id last_run",
    text="session_id mode graph agent",
    flag="is_current",
)
forked_turns = _table("forked_turns", uuid="tenant_id run_id", text="session_id")
session_memory = _table(
    "session_memory",
    uuid="tenant_id run_id",
    text="session_id agent content",
    number="version",
    json="details",
    time="published_at",
)
files = _table(
    "files",
    uuid="tenant_id id run_id",
    text="session_id user_id name media_type sha256",
    number="size tokens",
    time="created_at used_at",
)
user_erasures = _table(
    "user_erasures",
    uuid="tenant_id",
    text="user_id actor",
    json="removed",
    time="requested_at next_at",
)
user_facts = _table(
    "user_facts",
    uuid="tenant_id id source_run",
    text="user_id text kind",
    flag="confirmed",
    time="created_at",
)
runs = _table(
    "runs",
    uuid="tenant_id id retry_of task_root parent_run_id root_run_id conversation_id",
    text="status mode agent graph session_id session_of_origin user_id stop_reason webhook_url "
    "memory memory_used question principal traceparent tracestate",
    json="session_base turn input goals constraints success_criteria pinned cost_budget overrides "
    "output_schema output output_json error usage spent spent_beside metadata attempts "
    "parent_task batch fork_of given",
    number="priority token_budget carried_seq attempt last_seq messages child_limit",
    real="timeout_s queue_timeout_s",
    flag="draft",
    time="created_at queued_at cancel_requested_at started_at deadline ended_at",
)
run_waits = _table("run_waits", uuid="tenant_id run_id", text="reason", time="since until")
interrupts = _table(
    "interrupts",
    uuid="tenant_id id run_id task_id",
    text="agent kind status tool tool_call_id question reason server node who",
    number="call",
    json="arguments schema confirm_above resolved_by resolution",
    time="created_at expires_at resolved_at",
)
run_messages = _table(
    "run_messages",
    uuid="tenant_id run_id id",
    text="principal",
    number="number",
    json="content",
    time="sent_at",
)
tasks = _table(
    "tasks",
    uuid="tenant_id run_id id parent_id",
    text="agent status mode",
    number="depth priority timeout_ms attempt answer_seq dispatch_seq duration_ms",
    json="error usage metadata",
    time="created_at started_at cancel_requested_at ended_at status_changed_at",
)
run_events = _table(
    "run_events",
    uuid="tenant_id run_id task_id parent_task_id",
    number="step seq attempt depth",
    text="type agent body",
    time="at",
    json="data",
)
webhooks = _table(
    "webhooks",
    uuid="tenant_id run_id",
    text="url status error",
    number="seq tries answer",
    time="next_at ended_at",
)
schedules = _table(
    "schedules",
    uuid="tenant_id last_run_id",
    text="name cron timezone",
    json="run last_error",
    flag="paused",
    time="next_at last_at created_at",
)
run_checks = _table(
    "run_checks",
    uuid="tenant_id run_id",
    text="part status reason error",
    number="stage tries",
    flag="passed",
    time="next_at updated_at",
    json="results asked",
)
episode_feedback = _table(
    "episode_feedback",
    uuid="tenant_id run_id",
    text="outcome comment by",
    real="score",
    time="at",
)
run_learning = _table(
    "run_learning",
    uuid="tenant_id run_id episode_id",
    text="status error",
    number="tries",
    time="next_at updated_at",
    json="result",
)
episodes = _table(
    "episodes",
    uuid="tenant_id id run_id",
    text="kind session_id user_id agent outcome domain task_type failure_signature",
    time="at",
    number="trust",
    json="origin task execution result metadata summary",
)
tenants = _table(
    "tenants",
    uuid="id salt",
    text="name",
    time="created_at",
)
api_keys = _table(
    "api_keys",
    uuid="tenant_id id",
    text="name prefix",
    texts="scopes",
    flag="require_user",
    json="limits",
    binary="key_hash",
    time="created_at expires_at last_used_at revoked_at",
)
audit_log = _table(
    "audit_log",
    uuid="tenant_id id",
    time="at",
    text="actor action target",
    json="details",
)
webhook_secrets = _table(
    "webhook_secrets",
    uuid="tenant_id id",
    text="secret",
    time="created_at expires_at",
)
secrets = _table(
    "secrets",
    uuid="tenant_id",
    text="name",
    number="version",
    binary="value",
    json="hosts",
    time="created_at updated_at",
)
idempotency_keys = _table(
    "idempotency_keys",
    uuid="tenant_id",
    text="key about",
    binary="request_hash",
    json="answer",
    time="created_at",
)
retention = _table(
    "retention",
    uuid="tenant_id",
    text="kind",
    real="days",
)
applied_definitions = _table(
    "applied_definitions",
    uuid="tenant_id",
    text="kind name source",
)
ended_tokens = _table(
    "ended_tokens",
    uuid="tenant_id",
    text="jti",
    flag="revoked",
    time="ended_at expires_at",
)
run_heads = _table(
    "run_heads",
    uuid="tenant_id run_id worker_id",
    number="attempt last_seq",
    time="claimed_at deadline",
    flag="is_child",
)


DEFAULT_TENANT = UUID("00000000-0000-7000-8000-000000000001")
"""The tenant of a server without keys. The first migration creates this tenant."""
