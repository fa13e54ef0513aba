"""All tables.

Every primary and foreign key of a tenant's table begins with the tenant: no key can cross tenants,
and the table can be partitioned or distributed by tenant.
"""

from bottega.db.tables.definitions import agent_versions, agents, graph_versions, graphs
from bottega.db.tables.memory import (
    deleted_objects,
    episode_bodies,
    episode_feedback,
    episode_reflections,
    episode_search,
    episode_state,
    episode_tags,
    episode_vectors,
    episode_work,
    episodes,
    tenant_memory,
)
from bottega.db.tables.patterns import (
    index_maintenance,
    memory_jobs,
    pattern_applications,
    pattern_sources,
    patterns,
    run_learning,
)
from bottega.db.tables.runs import (
    graph_snapshots,
    live_text,
    run_events,
    run_heads,
    runs,
    schedules,
    tasks,
    waiting_runs,
    webhooks,
)
from bottega.db.tables.sessions import session_memory, sessions
from bottega.db.tables.tenants import (
    api_keys,
    audit_log,
    first_key,
    idempotency_keys,
    tenants,
    token_slices,
    token_usage,
    webhook_secrets,
    ws_tickets,
)
from bottega.db.tables.workers import worker_tenants, workers

__all__ = [
    "agent_versions",
    "agents",
    "api_keys",
    "audit_log",
    "deleted_objects",
    "episode_bodies",
    "episode_feedback",
    "episode_reflections",
    "episode_search",
    "episode_state",
    "episode_tags",
    "episode_vectors",
    "episode_work",
    "episodes",
    "first_key",
    "graph_snapshots",
    "graph_versions",
    "graphs",
    "idempotency_keys",
    "index_maintenance",
    "live_text",
    "memory_jobs",
    "pattern_applications",
    "pattern_sources",
    "patterns",
    "run_events",
    "run_heads",
    "run_learning",
    "runs",
    "schedules",
    "session_memory",
    "sessions",
    "tasks",
    "tenant_memory",
    "tenants",
    "token_slices",
    "token_usage",
    "waiting_runs",
    "webhook_secrets",
    "webhooks",
    "worker_tenants",
    "workers",
    "ws_tickets",
]
