-- Tables, indexes and constraints. Functions, triggers, grants and policies are in
-- app/bottega/db/sql. No index on runs names a column that changes while a run goes on:
-- each step would write to it.

-- The SQL files in app/bottega/db/sql that are in this database, each with its hash.
CREATE TABLE sql_files (
    name text NOT NULL,
    hash text NOT NULL,
    CONSTRAINT pk_sql_files PRIMARY KEY (name)
);

-- --- Tenants, their keys and limits --------------------------------------------------------------

-- Customers that own data. All of their rows elsewhere name them.
CREATE TABLE tenants (
    id uuid NOT NULL DEFAULT uuidv7(),
    name text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- Salt of the random assignments of its runs.
    salt uuid NOT NULL DEFAULT gen_random_uuid(),
    CONSTRAINT pk_tenants PRIMARY KEY (id),
    CONSTRAINT uq_tenants_name UNIQUE (name)
);

-- Keys of tenants. A key itself is not stored.
CREATE TABLE api_keys (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    name text NOT NULL,
    prefix text NOT NULL,
    -- SHA-256 of the key.
    key_hash bytea NOT NULL,
    scopes text[] NOT NULL,
    -- Its requests name the end user that they act for.
    require_user boolean NOT NULL DEFAULT false,
    -- Those that there are; see bottega.tenants.limits.
    limits jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    last_used_at timestamptz,
    revoked_at timestamptz,
    CONSTRAINT pk_api_keys PRIMARY KEY (tenant_id, id),
    CONSTRAINT uq_api_keys_key_hash UNIQUE (key_hash),
    CONSTRAINT fk_api_keys_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_api_keys_scopes CHECK (
        scopes <> '{}' AND scopes <@ ARRAY['read', 'run', 'define', 'approve', 'admin'])
);
CREATE INDEX ix_api_keys_revoked_at ON api_keys (revoked_at) WHERE revoked_at IS NOT NULL;

-- Marks that there was a key: from then on all requests need one. At most one row.
CREATE TABLE first_key (
    one boolean NOT NULL DEFAULT true,
    at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_first_key PRIMARY KEY (one),
    CONSTRAINT ck_first_key_one CHECK (one)
);

-- Keys that sign tokens of end users and tickets of streams. All API processes share them.
CREATE TABLE signing_keys (
    id uuid NOT NULL DEFAULT uuidv7(),
    -- 32 bytes, or these sealed by a key of BOTTEGA_SECRETS_KEY.
    secret bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_signing_keys PRIMARY KEY (id)
);

-- Tokens that ended before their time: revoked, or tickets that work once and were used.
CREATE TABLE ended_tokens (
    tenant_id uuid NOT NULL,
    jti text NOT NULL,
    revoked boolean NOT NULL,
    ended_at timestamptz NOT NULL DEFAULT now(),
    -- When no such token can be valid any more: the row goes.
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_ended_tokens PRIMARY KEY (tenant_id, jti),
    CONSTRAINT fk_ended_tokens_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_ended_tokens_expires_at ON ended_tokens (expires_at);
CREATE INDEX ix_ended_tokens_revoked ON ended_tokens (ended_at) WHERE revoked;

-- Responses to POSTs with an Idempotency-Key, for 24 hours.
CREATE TABLE idempotency_keys (
    tenant_id uuid NOT NULL,
    key text NOT NULL,
    -- Of the path and the body.
    request_hash bytea NOT NULL,
    -- {"status", "body", …} of the first answer.
    answer jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- The run, session or episode that it tells of: the answer is removed with it.
    about text GENERATED ALWAYS AS (
        coalesce(answer #>> '{body,id}', answer #>> '{body,episode_id}')) STORED,
    CONSTRAINT pk_idempotency_keys PRIMARY KEY (tenant_id, key),
    CONSTRAINT fk_idempotency_keys_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_idempotency_keys_created_at ON idempotency_keys (created_at);
CREATE INDEX ix_idempotency_keys_about ON idempotency_keys (tenant_id, about)
    WHERE about IS NOT NULL;

-- Administration, and cancellations of runs. Rows are only added.
CREATE TABLE audit_log (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    at timestamptz NOT NULL DEFAULT now(),
    actor text NOT NULL,
    action text NOT NULL,
    target text NOT NULL,
    -- Depends on the action.
    details jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT pk_audit_log PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_audit_log_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Spent per day (UTC), counted when a run ends; with BOTTEGA_TOKENS_PER_DAY or BOTTEGA_COST_PER_DAY
-- as workers report it. The unit is tokens, cost in billionths of a US dollar, or tokens:KEY, those
-- of a key with a limit of its own.
CREATE TABLE daily_spending (
    tenant_id uuid NOT NULL,
    day date NOT NULL,
    unit text NOT NULL,
    amount bigint NOT NULL,
    CONSTRAINT pk_daily_spending PRIMARY KEY (tenant_id, day, unit),
    CONSTRAINT fk_daily_spending_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Part of the day's budget that a process has reserved for its calls. When it expires, it counts as
-- spent.
CREATE UNLOGGED TABLE budget_slices (
    tenant_id uuid NOT NULL,
    account_id uuid NOT NULL,
    unit text NOT NULL,
    amount bigint NOT NULL,
    -- All that is reported of the account: a repeated report counts once.
    spent bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_budget_slices PRIMARY KEY (tenant_id, account_id, unit),
    CONSTRAINT fk_budget_slices_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Signing secrets of a tenant's webhooks, as plain text. The current one has no expiry.
CREATE TABLE webhook_secrets (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    secret text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    CONSTRAINT pk_webhook_secrets PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_webhook_secrets_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);
CREATE UNIQUE INDEX uq_webhook_secrets_current ON webhook_secrets (tenant_id)
    WHERE expires_at IS NULL;

-- Secrets that a tenant's providers and tools send. Deleted ones stay, without a value, so that no
-- later version has an earlier number.
CREATE TABLE secrets (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    -- Sealed by a key of BOTTEGA_SECRETS_KEY for this tenant, name and version; null: deleted.
    value bytea,
    -- Names and addresses of the hosts that it may be sent to.
    hosts jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_secrets PRIMARY KEY (tenant_id, name),
    CONSTRAINT fk_secrets_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- For how many days a tenant keeps something. Without a row the operator's settings count.
CREATE TABLE retention (
    tenant_id uuid NOT NULL,
    kind text NOT NULL,
    -- Null: for ever.
    days double precision,
    CONSTRAINT pk_retention PRIMARY KEY (tenant_id, kind),
    CONSTRAINT fk_retention_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_retention_kind CHECK (kind IN ('runs', 'audit', 'episodes')),
    CONSTRAINT ck_retention_days CHECK (days > 0)
);

-- Bytes that a tenant stores, by kind, and changes that are not added yet: see storage.sql. No
-- foreign key and no index: each run adds changes.
CREATE TABLE tenant_storage (
    tenant_id uuid NOT NULL,
    kind text NOT NULL,
    bytes bigint NOT NULL,
    CONSTRAINT pk_tenant_storage PRIMARY KEY (tenant_id, kind),
    CONSTRAINT fk_tenant_storage_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Changes of stored bytes since they were last added up in tenant_storage.
CREATE TABLE storage_changes (
    tenant_id uuid NOT NULL,
    kind text NOT NULL,
    bytes bigint NOT NULL,
    -- For the figures over time: the run whose end it is, or for which checks or memory spent
    -- something; null: another change. It may be deleted before this row, which counts still.
    of_run uuid,
    -- What these spent, as in runs.spent; null: it is the run's end.
    spent jsonb
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);

-- Figures over time: see rollups.sql.
CREATE TABLE metric_rollups (
    tenant_id uuid NOT NULL,
    span text NOT NULL,
    by text NOT NULL,
    -- Start of the minute, or of the hour.
    at timestamptz NOT NULL,
    -- Of an agent, a version, a model or a code; "all", or "other".
    key text NOT NULL,
    -- Numbers by name, such as runs, tokens, or the count "duration:27" of times in a bucket.
    sums jsonb NOT NULL,
    CONSTRAINT pk_metric_rollups PRIMARY KEY (tenant_id, span, by, at, key),
    CONSTRAINT fk_metric_rollups_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_metric_rollups_span CHECK (span IN ('minute', 'hour')),
    CONSTRAINT ck_metric_rollups_by CHECK (by IN ('all', 'agent', 'version', 'model', 'code'))
) WITH (fillfactor = 70);  -- each page of ended runs updates the rows of now: leave room beside them
CREATE INDEX ix_metric_rollups_at ON metric_rollups (span, at);

-- When a process last added them up: one row.
CREATE UNLOGGED TABLE last_sum (
    one boolean NOT NULL DEFAULT true,
    at timestamptz NOT NULL,
    CONSTRAINT pk_last_sum PRIMARY KEY (one),
    CONSTRAINT ck_last_sum_one CHECK (one)
);

-- The tenant of a server without keys.
INSERT INTO tenants (id, name) VALUES ('00000000-0000-7000-8000-000000000001', 'default');

-- --- Agents, graphs, providers and MCP servers as users edit them --------------------------------

-- Agents of a tenant by name, with the number of the current version.
CREATE TABLE agents (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz,
    CONSTRAINT pk_agents PRIMARY KEY (tenant_id, name),
    CONSTRAINT fk_agents_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Every version of an agent, as it was stored. Runs pin one.
CREATE TABLE agent_versions (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    -- As in PUT /v1/agents/{name}.
    definition jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    bytes bigint GENERATED ALWAYS AS (octet_length(definition::text)) STORED,
    CONSTRAINT pk_agent_versions PRIMARY KEY (tenant_id, name, version),
    CONSTRAINT fk_agent_versions_tenant_id_name_agents
        FOREIGN KEY (tenant_id, name) REFERENCES agents (tenant_id, name)
);

-- Graphs of a tenant by name, with the number of the current version.
CREATE TABLE graphs (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz,
    CONSTRAINT pk_graphs PRIMARY KEY (tenant_id, name),
    CONSTRAINT fk_graphs_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Every version of a graph, as it was stored. Runs pin one.
CREATE TABLE graph_versions (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    -- As in PUT /v1/graphs/{name}: nodes, edges, output.
    definition jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    bytes bigint GENERATED ALWAYS AS (octet_length(definition::text)) STORED,
    CONSTRAINT pk_graph_versions PRIMARY KEY (tenant_id, name, version),
    CONSTRAINT fk_graph_versions_tenant_id_name_graphs
        FOREIGN KEY (tenant_id, name) REFERENCES graphs (tenant_id, name)
);

-- Model servers.
CREATE TABLE providers (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz,
    CONSTRAINT pk_providers PRIMARY KEY (tenant_id, name),
    CONSTRAINT fk_providers_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Every version of a model server, as it was stored. Runs pin one.
CREATE TABLE provider_versions (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    -- As in PUT /v1/providers/{name}.
    definition jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    bytes bigint GENERATED ALWAYS AS (octet_length(definition::text)) STORED,
    CONSTRAINT pk_provider_versions PRIMARY KEY (tenant_id, name, version),
    CONSTRAINT fk_provider_versions_tenant_id_name_providers
        FOREIGN KEY (tenant_id, name) REFERENCES providers (tenant_id, name)
);

-- MCP servers, with the tools that each had when it was asked last.
CREATE TABLE mcp_servers (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz,
    CONSTRAINT pk_mcp_servers PRIMARY KEY (tenant_id, name),
    CONSTRAINT fk_mcp_servers_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Every version of an MCP server, as it was stored. Runs pin one.
CREATE TABLE mcp_server_versions (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    -- As in PUT /v1/mcp-servers/{name}, with the tools.
    definition jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    bytes bigint GENERATED ALWAYS AS (octet_length(definition::text)) STORED,
    CONSTRAINT pk_mcp_server_versions PRIMARY KEY (tenant_id, name, version),
    CONSTRAINT fk_mcp_server_versions_tenant_id_name_mcp_servers
        FOREIGN KEY (tenant_id, name) REFERENCES mcp_servers (tenant_id, name)
);

-- The sources of definitions that came with others, in one document: see POST /v1/apply.
CREATE TABLE applied_definitions (
    tenant_id uuid NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    source text NOT NULL,
    CONSTRAINT pk_applied_definitions PRIMARY KEY (tenant_id, kind, name),
    CONSTRAINT fk_applied_definitions_tenant_id_tenants
        FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- A value per tenant that every change of its agents, graphs, providers, MCP servers and default
-- model replaces. default_model: provider:MODEL of its agents that name none; NULL: the server's.
CREATE TABLE definition_epochs (
    tenant_id uuid NOT NULL,
    epoch uuid NOT NULL DEFAULT gen_random_uuid(),
    default_model text,
    CONSTRAINT pk_definition_epochs PRIMARY KEY (tenant_id),
    CONSTRAINT fk_definition_epochs_tenant_id_tenants
        FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- --- Sessions ------------------------------------------------------------------------------------

-- Sessions: memory and conversations that outlive a run.
CREATE TABLE sessions (
    tenant_id uuid NOT NULL,
    id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    -- The integrator's name for the end user; set when the session begins.
    user_id text,
    -- What a person called it; null: nobody did.
    title text,
    -- The client's own.
    metadata jsonb NOT NULL DEFAULT '{}',
    bytes bigint GENERATED ALWAYS AS (
        octet_length(metadata::text) + octet_length(coalesce(title, ''))) STORED,
    CONSTRAINT pk_sessions PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_sessions_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_sessions_user ON sessions (tenant_id, user_id, id) WHERE user_id IS NOT NULL;
CREATE INDEX ix_sessions_metadata ON sessions USING gin (metadata jsonb_path_ops)
    WHERE metadata <> '{}';

-- Of one agent in a session, or of a graph in mode dag. Its turns are its completed runs; each run
-- says which was the one before it.
CREATE TABLE conversations (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    session_id text NOT NULL,
    mode text NOT NULL,
    -- '': none.
    graph text NOT NULL,
    agent text NOT NULL,
    -- The run of its last turn; null: it has none yet.
    last_run uuid,
    -- The one that a new run continues.
    is_current boolean NOT NULL DEFAULT true,
    CONSTRAINT pk_conversations PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_conversations_tenant_id_session_id_sessions
        FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
);
CREATE UNIQUE INDEX uq_conversations_current
    ON conversations (tenant_id, session_id, mode, graph, agent) WHERE is_current;
CREATE INDEX ix_conversations_session ON conversations (tenant_id, session_id);

-- Turns that a session begins with and another session took. An erasure of the other one gives them
-- to a session that has such a row.
CREATE TABLE forked_turns (
    tenant_id uuid NOT NULL,
    session_id text NOT NULL,
    run_id uuid NOT NULL,
    CONSTRAINT pk_forked_turns PRIMARY KEY (tenant_id, session_id, run_id),
    CONSTRAINT fk_forked_turns_tenant_id_session_id_sessions
        FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
);
CREATE INDEX ix_forked_turns_run ON forked_turns (tenant_id, run_id);

-- The last publication of each agent in a session.
CREATE TABLE session_memory (
    tenant_id uuid NOT NULL,
    session_id text NOT NULL,
    -- The agent, or the node of a graph.
    agent text NOT NULL,
    -- Increases by one with each publication of any run, in the order of their commits.
    version integer NOT NULL,
    content text NOT NULL,
    -- The query's tool results and messages, for edges whose policy passes them on.
    details jsonb NOT NULL,
    run_id uuid NOT NULL,
    published_at timestamptz NOT NULL,
    bytes bigint GENERATED ALWAYS AS (octet_length(content) + octet_length(details::text)) STORED,
    CONSTRAINT pk_session_memory PRIMARY KEY (tenant_id, session_id, agent),
    CONSTRAINT fk_session_memory_tenant_id_session_id_sessions
        FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
);

-- End users whose data is being erased. The last transaction of an erasure deletes the row.
CREATE TABLE user_erasures (
    tenant_id uuid NOT NULL,
    user_id text NOT NULL,
    -- In the audit log.
    actor text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT now(),
    -- Number of removed rows by table.
    removed jsonb NOT NULL DEFAULT '{}',
    -- Due time; while a process works on it, the end of its lease.
    next_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_user_erasures PRIMARY KEY (tenant_id, user_id),
    CONSTRAINT fk_user_erasures_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_user_erasures_due ON user_erasures (tenant_id, next_at);

-- Facts about end users, which people or runs have set. Runs that begin with an agent that reads
-- facts have the confirmed ones of their user in their prompts.
CREATE TABLE user_facts (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    user_id text NOT NULL,
    text text NOT NULL,
    -- Who set the fact.
    kind text NOT NULL,
    -- The run that set the fact; it may be deleted.
    source_run uuid,
    -- False: a run set the fact after it had read outside content.
    confirmed boolean NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_user_facts PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_user_facts_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT uq_user_facts_text UNIQUE (tenant_id, user_id, text),
    CONSTRAINT ck_user_facts_kind CHECK (kind IN ('message', 'run', 'person'))
);
CREATE INDEX ix_user_facts_user ON user_facts (tenant_id, user_id, id);

-- --- Runs and their log --------------------------------------------------------------------------

-- Runs: what was asked, the state, and the result. Batches are rows, too (mode batch).
CREATE TABLE runs (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    created_at timestamptz NOT NULL DEFAULT now(),
    timeout_s double precision NOT NULL,
    queue_timeout_s double precision NOT NULL DEFAULT '86400',
    token_budget bigint,
    -- {"amount", "currency"}
    cost_budget jsonb,
    -- A retry from the last step takes over events 2 to carried_seq of the earlier run. Its task
    -- ids therefore derive from that run, or from the first of a chain of retries.
    retry_of uuid,
    -- Of a fork: {"run_id", "node" or "seq": the place, "usage": of the events that it takes over}.
    -- It takes over events as a retry does.
    fork_of jsonb,
    -- What nodes of its graph publish without being asked, by name.
    given jsonb NOT NULL DEFAULT '{}',
    -- Of a retry or a fork: the first run of the chain, whose arm of an experiment all of them get.
    assigned_as uuid,
    carried_seq bigint NOT NULL DEFAULT '0',
    task_root uuid,
    -- The run of which this child run does a part, and the run above all; null: it is no child run.
    parent_run_id uuid,
    root_run_id uuid,
    -- Of a child run that does a task: {"helper_of", "instructions", "most_steps", "files"}; with its
    -- end "written": the files that it wrote.
    parent_task jsonb,
    priority smallint NOT NULL DEFAULT '5',
    mode text NOT NULL,
    -- Permitted use of memory: the strictest of the run's and its agents' settings.
    memory text NOT NULL DEFAULT 'off',
    -- Whose earlier runs it may read, unless its memory is off.
    memory_used text NOT NULL DEFAULT 'none (no user)',
    agent text,
    graph text,
    session_id text,
    -- Of a fork, which is in no session, and of runs that repeat it: the session of the first run.
    -- It is deleted with that session, since its log is a copy.
    session_of_origin text,
    -- The integrator's name for the end user; that of the session, if it has one.
    user_id text,
    -- The conversation that it belongs to; null: none.
    conversation_id uuid,
    -- Its starter: ``key:<prefix>``, ``local``, ``cli`` or ``schedule:<name>``.
    principal text,
    -- The question: a text, or messages with role and content.
    input jsonb NOT NULL,
    -- The first 300 characters of the user's last text in it.
    question text NOT NULL GENERATED ALWAYS AS (left(coalesce(
        CASE jsonb_typeof(input) WHEN 'string' THEN input
        ELSE coalesce(
            jsonb_path_query_first(
                jsonb_path_query_array(input, '$[*] ? (@.role == "user").content') -> -1,
                '$[*].text'),
            jsonb_path_query_first(
                jsonb_path_query_array(input, '$[*] ? (@.role == "user").content') -> -1,
                '$ ? (@.type() == "string")')
        ) END #>> '{}', ''), 300)) STORED,
    -- Texts that the run's own agents read beside the input.
    goals jsonb NOT NULL DEFAULT '[]',
    -- See goals.
    constraints jsonb NOT NULL DEFAULT '[]',
    -- See goals.
    success_criteria jsonb NOT NULL DEFAULT '[]',
    -- {"agents": {name: version}, "graph": {"name", "version"} | null, "providers": {name: version},
    -- "mcp_servers": {name: version}}; of a draft "draft", too: {"definition", "model"}
    pinned jsonb NOT NULL,
    -- True: it tries a definition that is not stored; lists, series and sums of usage leave it out.
    draft boolean NOT NULL GENERATED ALWAYS AS (pinned ? 'draft') STORED,
    -- Of an eval's batch: the eval's name. A column, because row-level security uses no index for ->>.
    eval text GENERATED ALWAYS AS (batch ->> 'eval') STORED,
    -- {agent: {"params": {…}}}: parameters of models, merged with the agent's own.
    overrides jsonb NOT NULL DEFAULT '{}',
    -- Of the answer, in place of the agent's own.
    output_schema jsonb,
    -- The client's own.
    metadata jsonb NOT NULL DEFAULT '{}',
    webhook_url text,
    -- Of the request that made it (W3C).
    traceparent text,
    tracestate text,
    -- What changes after the start comes last: an update's log entry spans the changed columns.
    -- The session's memory when the run first started: a resumed run must see the same.
    session_base jsonb,
    -- Of a conversation. ``base``: the run of the turn before, fixed by the first claim. With the
    -- end of a completed run: its number, tokens, and what a prompt may hold of the turns before.
    turn jsonb,
    -- When it was queued; null: it is blocked behind a run of its conversation, or waits.
    queued_at timestamptz DEFAULT now(),
    status text NOT NULL DEFAULT 'queued',
    -- Number of claims: each increases it.
    attempt integer NOT NULL DEFAULT 0,
    started_at timestamptz,
    deadline timestamptz,
    cancel_requested_at timestamptz,
    -- [{"number", "started_at", "ended_at", "cause", …}], the oldest first.
    attempts jsonb NOT NULL DEFAULT '[]',
    -- Of the newest event; while the run is running, its head has it.
    last_seq bigint NOT NULL DEFAULT '0',
    ended_at timestamptz,
    stop_reason text,
    -- Tokens and cost of all its model calls; null: it is not over.
    usage jsonb,
    -- Of the model calls that the run paid for: [{"agent", "model", and what usage has}].
    spent jsonb NOT NULL DEFAULT '[]',
    -- The same, of the calls that its agents did not make: to analyse its task, to learn from it.
    spent_beside jsonb NOT NULL DEFAULT '[]',
    -- {"code", "message"}; null: it did not fail.
    error jsonb,
    -- The answer: a text, or texts by node of a graph.
    output jsonb,
    -- The answer, parsed; null: it has no schema.
    output_json jsonb,
    -- Number of the messages that were sent to it.
    messages smallint NOT NULL DEFAULT 0,
    -- Of a batch: {"concurrency", "on_error", "total"}; of an eval also {"eval": its name, "repeats",
    -- "checks": [those of each case], "targets": [{"agent", "version", "pinned", "memory",
    -- "memory_used"}]}, and each of its items has {"case": index of the checks that judge it}.
    batch jsonb,
    -- How many of its child runs may be queued or running; null: it has none.
    child_limit integer,
    -- Of its request; with its end also of its log and its answer.
    bytes bigint NOT NULL DEFAULT 0,
    CONSTRAINT pk_runs PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_runs_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_runs_memory CHECK (memory IN ('off', 'read', 'full')),
    CONSTRAINT ck_runs_status
        CHECK (status IN ('queued', 'running', 'waiting', 'completed', 'failed', 'timeout',
        'cancelled'))
) WITH (fillfactor=70);  -- claim and end update the row: leave room beside it
CREATE INDEX ix_runs_metadata ON runs USING gin (metadata jsonb_path_ops)
    WHERE metadata <> '{}';
CREATE INDEX ix_runs_session ON runs (tenant_id, session_id, id) WHERE session_id IS NOT NULL;
CREATE INDEX ix_runs_session_of_origin ON runs (tenant_id, session_of_origin, id)
    WHERE session_of_origin IS NOT NULL;
CREATE INDEX ix_runs_of_sessions ON runs (tenant_id, id)
    WHERE session_id IS NOT NULL AND parent_run_id IS NULL;
CREATE INDEX ix_runs_user ON runs (tenant_id, user_id, id) WHERE user_id IS NOT NULL;
CREATE INDEX ix_runs_ended ON runs (tenant_id, ended_at, id) WHERE ended_at IS NOT NULL;
CREATE INDEX ix_runs_error ON runs (tenant_id, id) WHERE error IS NOT NULL;
CREATE INDEX ix_runs_conversation ON runs (tenant_id, conversation_id, id)
    WHERE ended_at IS NULL AND conversation_id IS NOT NULL;
CREATE INDEX ix_runs_parent ON runs (tenant_id, parent_run_id, id)
    WHERE parent_run_id IS NOT NULL;
CREATE INDEX ix_runs_open_children ON runs (tenant_id, parent_run_id)
    WHERE parent_run_id IS NOT NULL AND ended_at IS NULL;
CREATE UNIQUE INDEX uq_runs_eval ON runs (tenant_id, eval) WHERE eval IS NOT NULL;
CREATE INDEX ix_runs_root ON runs (tenant_id, root_run_id) WHERE root_run_id IS NOT NULL;

-- The child runs of a run, in order. One that is held has no row in runs yet (see child_runs.sql).
CREATE TABLE run_children (
    tenant_id uuid NOT NULL,
    -- The parent.
    run_id uuid NOT NULL,
    number bigint NOT NULL,
    child_id uuid NOT NULL,
    -- What its run is made of, beside what it inherits: {"agent", "input", "metadata", "timeout_s",
    -- "token_budget", "cost_budget", "task", "messages"}.
    request jsonb NOT NULL,
    is_held boolean NOT NULL DEFAULT true,
    -- Of an item of a batch: its name, unique in the batch.
    key text,
    -- Of one that is over: of an item of a batch, and of one that ended without a run.
    status text,
    -- {"code", "message"}.
    error jsonb,
    CONSTRAINT pk_run_children PRIMARY KEY (tenant_id, run_id, number),
    CONSTRAINT uq_run_children_child_id UNIQUE (tenant_id, child_id),
    CONSTRAINT uq_run_children_key UNIQUE (tenant_id, run_id, key)
);
CREATE INDEX ix_run_children_held ON run_children (tenant_id, run_id, number) WHERE is_held;

-- The runs that no worker holds, but for those that wait.
CREATE TABLE run_queue (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    -- The order in its tenant: its time of acceptance, and 30 s for each priority below the first.
    rank timestamptz NOT NULL,
    -- A child run: it counts in no limit of its tenant.
    is_child boolean NOT NULL,
    -- Whether a worker may claim it, and since when; if not, its conversation's turn must come.
    is_due boolean NOT NULL,
    due_at timestamptz NOT NULL,
    -- Then it ends without a worker.
    expires_at timestamptz NOT NULL,
    -- Nothing begins with the tenant but one index: no plan can read all of its rows by mistake.
    CONSTRAINT pk_run_queue PRIMARY KEY (run_id, tenant_id)
);
CREATE INDEX ix_run_queue_next ON run_queue (is_due, tenant_id, is_child, rank, run_id);
CREATE INDEX ix_run_queue_expires_at ON run_queue (expires_at);

-- A tenant's turn in the queue, its count of running runs, and the lock of a claim. No foreign key
-- refers here, and this refers to nothing: one that is open would keep claims out.
CREATE TABLE tenant_queues (
    tenant_id uuid NOT NULL,
    served_at timestamptz NOT NULL DEFAULT '-infinity',
    -- Its runs that workers held when they were last counted, and those that were claimed since.
    counted bigint NOT NULL DEFAULT 0,
    claimed bigint NOT NULL DEFAULT 0,
    CONSTRAINT pk_tenant_queues PRIMARY KEY (tenant_id)
) WITH (fillfactor=10);  -- each claim updates its rows: leave room beside them
INSERT INTO tenant_queues (tenant_id) SELECT id FROM tenants;

-- Numbers the runs that are accepted, of all tenants.
CREATE SEQUENCE accepted_runs;

-- Number of a tenant's queued runs at the last count, and the number of the run that was accepted
-- then. New runs since then are at most the runs accepted since; runs that return to the queue (after
-- a wait or a crash) count at the next count.
CREATE TABLE queue_counts (
    tenant_id uuid NOT NULL,
    counted bigint NOT NULL DEFAULT 0,
    accepted bigint NOT NULL DEFAULT 0,
    CONSTRAINT pk_queue_counts PRIMARY KEY (tenant_id)
) WITH (fillfactor=50);
INSERT INTO queue_counts (tenant_id) SELECT id FROM tenants;

-- The head of each running run's log: the fence.
-- A claim writes the row; the end and the hand-back delete it. A step of a run changes it only
-- where attempt and last_seq are as the worker knows them. A statement that also needs the run's
-- row locks that row first.
CREATE TABLE run_heads (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    attempt integer NOT NULL,
    last_seq bigint NOT NULL,
    -- The process that claimed it.
    worker_id uuid NOT NULL,
    claimed_at timestamptz NOT NULL,
    -- The run's own.
    deadline timestamptz NOT NULL,
    is_child boolean NOT NULL,
    CONSTRAINT pk_run_heads PRIMARY KEY (tenant_id, run_id)
) WITH (fillfactor=40);  -- every step updates the row: leave room beside it

-- Tasks of runs: queries of sub-agents, and nodes of graphs.
CREATE TABLE tasks (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    id uuid NOT NULL,
    parent_id uuid,
    agent text NOT NULL,
    depth smallint NOT NULL,
    status text NOT NULL,
    -- Seq of the log's agent.completed event with the accepted answer.
    answer_seq bigint,
    -- Seq of the event that has what an async task was asked.
    dispatch_seq bigint,
    -- {"code", "message"}; null: it did not fail.
    error jsonb,
    -- Null if it completed: the event with its answer has it.
    usage jsonb,
    -- Null: it waits, or was cancelled before it started.
    started_at timestamptz,
    ended_at timestamptz,
    cancel_requested_at timestamptz,
    -- sync: its caller waits for it (also for a node of a DAG); async: it was dispatched.
    mode text NOT NULL DEFAULT 'sync',
    -- Only of async tasks. 1 is the highest priority; attempt counts its starts.
    priority smallint,
    timeout_ms integer,
    attempt integer,
    duration_ms bigint,
    -- Notes of its parent's model.
    metadata jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    status_changed_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_tasks PRIMARY KEY (tenant_id, run_id, id),
    CONSTRAINT ck_tasks_mode CHECK (mode IN ('sync', 'async')),
    CONSTRAINT ck_tasks_status
        CHECK (status IN ('queued', 'running', 'completed', 'failed', 'timeout',
        'cancelled', 'streaming', 'waiting'))
) WITH (fillfactor=70);  -- its end updates the row: leave room beside it
CREATE INDEX ix_tasks_cancelled ON tasks (tenant_id, run_id) WHERE cancel_requested_at IS NOT NULL;

-- Tool calls that wait for people: an approval, an answer, or a result from the client. Steps write
-- them (see run_steps for the missing foreign key).
CREATE TABLE interrupts (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL,
    run_id uuid NOT NULL,
    -- Null: the root.
    task_id uuid,
    agent text,
    kind text NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    -- Number of the model call that asked for the tool.
    call integer NOT NULL,
    tool text NOT NULL,
    tool_call_id text NOT NULL,
    -- Of the tool call.
    arguments jsonb NOT NULL,
    question text,
    -- JSON Schema of the answer or the arguments; null: any.
    schema jsonb,
    reason text,
    -- {"arguments.NAME": number} above which a person confirms an approval; null: none.
    confirm_above jsonb,
    -- The MCP server that asks; null: the agent.
    server text,
    -- The node of a graph that asks, and who may answer it: run, approve or user; null: a tool call.
    node text,
    who text,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    resolved_at timestamptz,
    -- {"key_id", "name"}; null: it expired, or its run ended.
    resolved_by jsonb,
    -- {"decision"}, {"answer"}, {"result"} or {"error"}; null: it is pending.
    resolution jsonb,
    CONSTRAINT pk_interrupts PRIMARY KEY (tenant_id, id),
    CONSTRAINT ck_interrupts_kind CHECK (kind IN ('approval', 'question', 'client_tool')),
    CONSTRAINT ck_interrupts_status
        CHECK (status IN ('pending', 'resolved', 'expired', 'cancelled'))
);
CREATE INDEX ix_interrupts_list ON interrupts (tenant_id, created_at, id);
CREATE INDEX ix_interrupts_decided ON interrupts (tenant_id, resolved_at, id)
    WHERE resolved_at IS NOT NULL;
CREATE INDEX ix_interrupts_run ON interrupts (tenant_id, run_id);
CREATE INDEX ix_interrupts_pending ON interrupts (expires_at) WHERE status = 'pending';

-- What runs await that have the status waiting (see waiting.sql).
CREATE TABLE run_waits (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    reason text NOT NULL,
    since timestamptz NOT NULL,
    -- At the latest; null: without end.
    until timestamptz,
    -- Ids of interrupts; it goes on when all of one group are decided on.
    groups jsonb NOT NULL,
    -- It goes on when at most so many of its child runs have not ended; null: it awaits none.
    children integer,
    is_child boolean NOT NULL,
    CONSTRAINT pk_run_waits PRIMARY KEY (tenant_id, run_id),
    CONSTRAINT ck_run_waits_reason
        CHECK (reason IN ('person', 'client', 'children', 'model', 'time'))
);
CREATE INDEX ix_run_waits_until ON run_waits (until);

-- What arrived for runs, until their workers have read it.
CREATE TABLE run_inbox (
    id bigint GENERATED ALWAYS AS IDENTITY,
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    -- The worker that is to read it; null: not known yet.
    worker_id uuid,
    kind text NOT NULL,
    -- The task, the interrupt, or the child run.
    subject uuid,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT pk_run_inbox PRIMARY KEY (tenant_id, run_id, id),
    CONSTRAINT ck_run_inbox_kind CHECK (kind IN ('cancel', 'task', 'message', 'decision', 'child'))
);
CREATE INDEX ix_run_inbox_worker ON run_inbox (worker_id, id);

-- Messages that users sent to runs under way. The log says which of them a run's agent was given.
CREATE TABLE run_messages (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    -- 1, 2, 3 … in the order in which the agent gets them.
    number smallint NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    -- A text, or a list of parts.
    content jsonb NOT NULL,
    principal text,
    sent_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_run_messages PRIMARY KEY (tenant_id, run_id, number),
    CONSTRAINT fk_run_messages_tenant_id_run_id_runs
        FOREIGN KEY (tenant_id, run_id) REFERENCES runs (tenant_id, id) ON DELETE CASCADE
);

-- The event log of runs, in rows of consecutive events, one JSON object a line (see steps.sql).
-- No foreign key, as for all that steps write: the head proves that the run exists. Code that
-- deletes a run deletes its head first, and then these rows.
CREATE TABLE run_steps (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    first_seq bigint NOT NULL,
    last_seq bigint NOT NULL,
    attempt integer NOT NULL,
    at timestamptz NOT NULL,
    events text STORAGE MAIN NOT NULL,
    -- Spaces, which cost 20 bytes: PostgreSQL compresses the columns of rows above 2 KiB only, and
    -- events compress well. Nobody reads it.
    filler text STORAGE MAIN GENERATED ALWAYS AS (
        CASE WHEN octet_length(events) > 300 THEN repeat(' ', 2000 - octet_length(events)) END
    ) STORED,
    CONSTRAINT pk_run_steps PRIMARY KEY (tenant_id, run_id, last_seq)
) WITH (toast_tuple_target=128);  -- compress as much as possible

-- One row per event. A reader of a part of a long log restricts and orders by step (the last seq of
-- an event's row), which has the index, and then by seq.
CREATE VIEW run_events WITH (security_invoker = true) AS
SELECT s.tenant_id, s.run_id, s.last_seq AS step, s.first_seq + e.n - 1 AS seq, s.attempt,
       split_part(e.line, '"', 4) AS type,
       (h.head ->> 'task_id')::uuid AS task_id,
       (h.head ->> 'parent_task_id')::uuid AS parent_task_id,
       h.head ->> 'agent' AS agent,
       (h.head ->> 'depth')::smallint AS depth,
       s.at, h.body, h.body::jsonb AS data
FROM run_steps s
CROSS JOIN LATERAL string_to_table(s.events, E'\n') WITH ORDINALITY AS e(line, n)
CROSS JOIN LATERAL (
    SELECT (split_part(e.line, ',"data":', 1) || '}')::jsonb AS head,
           left(substr(e.line, strpos(e.line, ',"data":') + 8), -1) AS body) AS h;

DO $$
BEGIN
    IF 'lz4' = ANY (SELECT unnest(enumvals) FROM pg_settings
                    WHERE name = 'default_toast_compression') THEN
        ALTER TABLE run_steps ALTER events SET COMPRESSION lz4;
    END IF;
END $$;

-- Text of unfinished answers, for live streams; deleted when the answer is stored.
CREATE UNLOGGED TABLE live_text (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,
    task_id uuid,
    parent_task_id uuid,
    agent text,
    call integer NOT NULL,
    attempt integer NOT NULL,
    -- Characters of the answer before this piece.
    at integer NOT NULL,
    text text NOT NULL,
    -- Null: text of a model. Else the text is the progress of this call of a tool, as JSON.
    tool_call_id text,
    CONSTRAINT pk_live_text PRIMARY KEY (tenant_id, run_id, id)
);

-- Of runs with a webhook: one for the end, which end_run stores, and one for each time that a
-- run begins to wait for people.
CREATE TABLE webhooks (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    -- Of the event run.waiting that it tells of; 0: of the run's end.
    seq bigint NOT NULL DEFAULT 0,
    url text NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    tries integer NOT NULL DEFAULT 0,
    -- HTTP status of the last try, or its error.
    answer integer,
    error text,
    next_at timestamptz DEFAULT now(),
    ended_at timestamptz,
    CONSTRAINT pk_webhooks PRIMARY KEY (tenant_id, run_id, seq),
    CONSTRAINT fk_webhooks_tenant_id_run_id_runs
        FOREIGN KEY (tenant_id, run_id) REFERENCES runs (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_webhooks_status CHECK (status IN ('pending', 'delivered', 'failed'))
);
CREATE INDEX ix_webhooks_pending ON webhooks (tenant_id, next_at) WHERE status = 'pending';

-- Runs that start by schedule.
CREATE TABLE schedules (
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    cron text NOT NULL,
    timezone text NOT NULL,
    -- The validated body of POST /v1/runs.
    run jsonb NOT NULL,
    paused boolean NOT NULL DEFAULT false,
    next_at timestamptz NOT NULL,
    last_at timestamptz,
    last_run_id uuid,
    -- {"code", "message"} of the last start; null: it succeeded.
    last_error jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    bytes bigint GENERATED ALWAYS AS (octet_length(run::text)) STORED,
    CONSTRAINT pk_schedules PRIMARY KEY (tenant_id, name),
    CONSTRAINT fk_schedules_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);
CREATE INDEX ix_schedules_next_at ON schedules (next_at) WHERE NOT paused;

-- --- Workers -------------------------------------------------------------------------------------

-- The processes that execute runs. A new process is another worker.
CREATE UNLOGGED TABLE workers (
    id uuid NOT NULL,
    started_at timestamptz NOT NULL,
    -- Its last report, until when it is alive without another one, and until when it may be one of
    -- the workers that get the next runs (see next_workers).
    seen_at timestamptz NOT NULL,
    leased_until timestamptz NOT NULL,
    next_until timestamptz NOT NULL,
    -- Places without a run, and those of them that a tenant with runs there may take.
    free_places integer NOT NULL,
    common_places integer NOT NULL,
    -- The runs that it executes, as '<run>:<attempt>'.
    runs text[] NOT NULL,
    version text NOT NULL,
    -- Its load: sums over all tenants, and by tenant.
    pool jsonb NOT NULL,
    -- See pool.
    tenants jsonb NOT NULL,
    CONSTRAINT pk_workers PRIMARY KEY (id)
);

-- When a process last swept: one row.
CREATE UNLOGGED TABLE last_sweep (
    one boolean NOT NULL DEFAULT true,
    at timestamptz NOT NULL,
    -- From when on somebody has swept without a long pause.
    since timestamptz NOT NULL,
    CONSTRAINT pk_last_sweep PRIMARY KEY (one),
    CONSTRAINT ck_last_sweep_one CHECK (one)
);

-- --- Model servers -------------------------------------------------------------------------------

-- What a worker holds of a model server's limits for calls of a tenant. Arrays are [calls, requests,
-- tokens]. No foreign keys: a share must not wait for a lock.
CREATE TABLE model_shares (
    tenant_id uuid NOT NULL,
    -- The provider is the operator's: all tenants share its limits.
    is_operators boolean NOT NULL,
    provider text NOT NULL,
    worker_id uuid NOT NULL,
    held bigint[] NOT NULL,
    -- Of the first call that waits.
    needs bigint[] NOT NULL,
    -- Calls that wait, and since when the share waits or was last served.
    waiting integer NOT NULL,
    since timestamptz NOT NULL,
    seen_at timestamptz NOT NULL,
    CONSTRAINT pk_model_shares PRIMARY KEY (tenant_id, is_operators, provider, worker_id)
);
CREATE INDEX ix_model_shares_operators ON model_shares (provider) WHERE is_operators;

-- --- Episodes ------------------------------------------------------------------------------------

-- Records of finished runs: task, steps, outcome. Rows are only added.
CREATE TABLE episodes (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    -- A single episode, or the consolidation of several similar ones.
    kind text NOT NULL DEFAULT 'episode',
    run_id uuid,
    session_id text,
    -- End of the run.
    at timestamptz NOT NULL,
    outcome text NOT NULL,
    domain text,
    task_type text,
    failure_signature text,
    -- 3: own run, 2: run that read foreign text, 1: imported.
    trust smallint NOT NULL,
    -- Where it comes from: the run, or an import.
    origin jsonb NOT NULL DEFAULT '{}',
    -- What was asked, with its analysis.
    task jsonb NOT NULL,
    -- Steps, tools, and usage.
    execution jsonb NOT NULL DEFAULT '{}',
    -- The answer, or the error.
    result jsonb NOT NULL DEFAULT '{}',
    -- The client's own.
    metadata jsonb NOT NULL DEFAULT '{}',
    -- {"task", "result", "errors", "steps"}: bounded texts, which are embedded and searched.
    summary jsonb NOT NULL,
    -- The integrator's name for the end user.
    user_id text,
    -- The agent that the run began with.
    agent text,
    -- With its bodies.
    bytes bigint NOT NULL DEFAULT 0,
    CONSTRAINT pk_episodes PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_episodes_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_episodes_kind CHECK (kind IN ('episode', 'consolidated')),
    CONSTRAINT ck_episodes_outcome
        CHECK (outcome IN ('UNKNOWN', 'SUCCESS', 'PARTIAL', 'FAILURE', 'CANCELLED')),
    CONSTRAINT ck_episodes_trust CHECK (trust BETWEEN 1 AND 3)
);
CREATE INDEX ix_episodes_run ON episodes (tenant_id, run_id) WHERE run_id IS NOT NULL;
CREATE INDEX ix_episodes_session ON episodes (tenant_id, session_id) WHERE session_id IS NOT NULL;
CREATE INDEX ix_episodes_user ON episodes (tenant_id, user_id, id) WHERE user_id IS NOT NULL;

-- The trace, and parts that are too long for ``episodes``. They move to an object store later.
CREATE TABLE episode_bodies (
    tenant_id uuid NOT NULL,
    episode_id uuid NOT NULL,
    part text NOT NULL,
    -- Null: it is an object.
    content jsonb,
    object_key text,
    bytes integer NOT NULL,
    CONSTRAINT pk_episode_bodies PRIMARY KEY (tenant_id, episode_id, part),
    CONSTRAINT fk_episode_bodies_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_episode_bodies_part CHECK (part IN ('trace', 'input', 'output')),
    CONSTRAINT ck_episode_bodies_place CHECK ((content IS NULL) <> (object_key IS NULL))
);

-- The reflection about an episode.
CREATE TABLE episode_reflections (
    tenant_id uuid NOT NULL,
    episode_id uuid NOT NULL,
    -- {"insights", "patterns", "failures", "by", "performance"}.
    reflection jsonb NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_episode_reflections PRIMARY KEY (tenant_id, episode_id),
    CONSTRAINT fk_episode_reflections_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE
);

-- Lessons of episodes, for prompts of later runs. People may edit, pin and remove them.
CREATE TABLE lessons (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    episode_id uuid NOT NULL,
    -- Those of the episode.
    run_id uuid,
    session_id text,
    user_id text,
    agent text,
    text text NOT NULL,
    -- Author: of the reflection, of the verdict whose reason it is, or of the last edit.
    "by" text NOT NULL,
    -- Reason of the verdict that made the lesson; null: a reflection made it.
    reason text,
    state text NOT NULL DEFAULT 'active',
    -- Runs get it whatever their task is.
    pinned boolean NOT NULL DEFAULT false,
    -- Runs of all users that begin with this agent get it: it is the agent's own text, or released.
    for_all boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT pk_lessons PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_lessons_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_lessons_state CHECK (state IN ('active', 'removed')),
    CONSTRAINT ck_lessons_pinned CHECK (state = 'active' OR NOT pinned),
    CONSTRAINT ck_lessons_for_all CHECK (NOT for_all OR state = 'active' AND agent IS NOT NULL)
);
CREATE INDEX ix_lessons_for_all ON lessons (tenant_id, agent, id) WHERE for_all;
CREATE INDEX ix_lessons_episode ON lessons (tenant_id, episode_id, id);
CREATE INDEX ix_lessons_user ON lessons (tenant_id, user_id, id);
CREATE INDEX ix_lessons_pinned ON lessons (tenant_id, user_id, id) WHERE pinned;

-- A person's feedback about a run's outcome.
CREATE TABLE episode_feedback (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    outcome text,
    score double precision,
    comment text,
    "by" text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_episode_feedback PRIMARY KEY (tenant_id, run_id),
    CONSTRAINT fk_episode_feedback_tenant_id_run_id_runs
        FOREIGN KEY (tenant_id, run_id) REFERENCES runs (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_episode_feedback_outcome CHECK (outcome IN ('SUCCESS', 'PARTIAL', 'FAILURE'))
);

-- Tags of episodes, for filters.
CREATE TABLE episode_tags (
    tenant_id uuid NOT NULL,
    tag text NOT NULL,
    episode_id uuid NOT NULL,
    CONSTRAINT pk_episode_tags PRIMARY KEY (tenant_id, tag, episode_id),
    CONSTRAINT fk_episode_tags_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE
);
CREATE INDEX ix_episode_tags_episode ON episode_tags (tenant_id, episode_id);

-- The signatures of all failures of an episode.
CREATE TABLE episode_failures (
    tenant_id uuid NOT NULL,
    signature text NOT NULL,
    episode_id uuid NOT NULL,
    CONSTRAINT pk_episode_failures PRIMARY KEY (tenant_id, signature, episode_id),
    CONSTRAINT fk_episode_failures_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE
);
CREATE INDEX ix_episode_failures_episode ON episode_failures (tenant_id, episode_id);

-- Parts of episodes: what a node of a graph, or a sub-agent, did in the run.
CREATE TABLE episode_parts (
    tenant_id uuid NOT NULL,
    -- GRAPH/NODE, or the name of a sub-agent.
    part text NOT NULL,
    episode_id uuid NOT NULL,
    -- Position in the run, from 1.
    number smallint NOT NULL,
    -- {"agent", "node", "input", "received", "steps", "output", "error", "verdict"}.
    content jsonb NOT NULL,
    CONSTRAINT pk_episode_parts PRIMARY KEY (tenant_id, part, episode_id),
    CONSTRAINT fk_episode_parts_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE
);
CREATE INDEX ix_episode_parts_episode ON episode_parts (tenant_id, episode_id);

-- What changes about an episode: its life, its use, and what people said of it.
CREATE TABLE episode_state (
    tenant_id uuid NOT NULL,
    episode_id uuid NOT NULL,
    state text NOT NULL DEFAULT 'active',
    at timestamptz NOT NULL,
    access_count integer NOT NULL DEFAULT 0,
    last_access timestamptz,
    consolidated_into uuid,
    deleted_at timestamptz,
    -- Key of its task's text, while it waits for a comparison with episodes of the same key.
    task_key bytea,
    -- Outcome by feedback or by the agent's checks, and which; null: nobody judged its run.
    label text,
    label_source text,
    -- {outcome, reason, by, at} of who counts most among those that judged its run.
    verdict jsonb,
    CONSTRAINT pk_episode_state PRIMARY KEY (tenant_id, episode_id),
    CONSTRAINT fk_episode_state_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_episode_state_state
        CHECK (state IN ('active', 'mature', 'aged', 'archived', 'consolidated',
        'deleted', 'quarantined')),
    CONSTRAINT ck_episode_state_label
        CHECK ((label IS NULL) = (label_source IS NULL)
        AND label IN ('SUCCESS', 'PARTIAL', 'FAILURE')
        AND label_source IN ('feedback', 'eval', 'check'))
) WITH (fillfactor=80);  -- counting an access changes no index
CREATE INDEX ix_episode_state_alike ON episode_state (tenant_id, task_key, at)
    WHERE task_key IS NOT NULL;
CREATE INDEX ix_episode_state_consolidated ON episode_state (tenant_id, consolidated_into)
    WHERE consolidated_into IS NOT NULL;
CREATE INDEX ix_episode_state_due ON episode_state (tenant_id, state, at, episode_id);
CREATE INDEX ix_episode_state_waiting ON episode_state (tenant_id, at, episode_id)
    WHERE task_key IS NOT NULL;

-- What filters and the search by words read of an episode.
CREATE TABLE episode_search (
    tenant_id uuid NOT NULL,
    episode_id uuid NOT NULL,
    at timestamptz NOT NULL,
    -- The label, or else the run's outcome.
    outcome text NOT NULL,
    domain text,
    task_type text,
    session_id text,
    failure_signature text,
    trust smallint NOT NULL,
    -- Number of episodes that it stands for.
    instances integer NOT NULL DEFAULT 1,
    terms tsvector NOT NULL,
    user_id text,
    agent text,
    CONSTRAINT pk_episode_search PRIMARY KEY (tenant_id, episode_id),
    CONSTRAINT fk_episode_search_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE
);
CREATE INDEX ix_episode_search_at ON episode_search (tenant_id, at, episode_id);
CREATE INDEX ix_episode_search_domain ON episode_search (tenant_id, domain, at, episode_id);
CREATE INDEX ix_episode_search_outcome ON episode_search (tenant_id, outcome, at, episode_id);
CREATE INDEX ix_episode_search_session ON episode_search (tenant_id, session_id, at, episode_id)
    WHERE session_id IS NOT NULL;
CREATE INDEX ix_episode_search_task_type ON episode_search (tenant_id, task_type, at, episode_id);
CREATE INDEX ix_episode_search_terms ON episode_search USING gin (terms)
    WITH (gin_pending_list_limit=64);  -- KiB: what waits for the index, a search reads whole
CREATE INDEX ix_episode_search_unnamed ON episode_search (tenant_id, at, episode_id)
    WHERE user_id IS NULL;
CREATE INDEX ix_episode_search_user ON episode_search (tenant_id, user_id, at, episode_id)
    WHERE user_id IS NOT NULL;

-- Vectors of different embedders are never compared. The index for another length than 768 is made
-- with the first such vector.
CREATE TABLE episode_vectors (
    tenant_id uuid NOT NULL,
    episode_id uuid NOT NULL,
    embedder text NOT NULL,
    at timestamptz NOT NULL,
    outcome text NOT NULL,
    domain text,
    task_type text,
    session_id text,
    task halfvec NOT NULL,
    -- A byte per number, see packed_vector: a search reads these only of its candidates.
    result bytea NOT NULL,
    -- See result.
    whole bytea NOT NULL,
    user_id text,
    agent text,
    CONSTRAINT pk_episode_vectors PRIMARY KEY (tenant_id, episode_id, embedder),
    CONSTRAINT fk_episode_vectors_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE
);
CREATE INDEX ix_episode_vectors_task_768 ON episode_vectors
    USING hnsw ((task::halfvec(768)) halfvec_cosine_ops) WITH (m = 24, ef_construction = 100)
    WHERE vector_dims(task) = 768;
-- Searches compare this vector of many rows: it stays in them.
ALTER TABLE episode_vectors ALTER COLUMN task SET STORAGE MAIN;

-- Pending background work.
CREATE TABLE episode_work (
    tenant_id uuid NOT NULL,
    episode_id uuid NOT NULL,
    work text NOT NULL,
    tries integer NOT NULL DEFAULT 0,
    next_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_episode_work PRIMARY KEY (tenant_id, episode_id, work),
    CONSTRAINT fk_episode_work_tenant_id_episode_id_episodes
        FOREIGN KEY (tenant_id, episode_id) REFERENCES episodes (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_episode_work_work CHECK (work IN ('embed', 'offload'))
);
CREATE INDEX ix_episode_work_due ON episode_work (work, tenant_id, next_at, episode_id);

-- Statistics of a tenant's memory, which searches need.
CREATE TABLE tenant_memory (
    tenant_id uuid NOT NULL,
    -- The embedder of queries.
    embedder text,
    -- Words of several episodes of a sample, the most common first.
    common text[] NOT NULL DEFAULT '{}',
    sampled_rows integer NOT NULL DEFAULT 0,
    -- The share of the tenant's episodes with each of these words.
    shares real[] NOT NULL DEFAULT '{}',
    -- True if vectors of other embedders may remain.
    leftovers boolean NOT NULL DEFAULT false,
    -- The background of an embedder: mean of the episodes' vectors; median and deviation of the
    -- cosines of unrelated ones.
    background_of text,
    background_mean real[] NOT NULL DEFAULT '{}',
    background real[] NOT NULL DEFAULT '{}',
    -- Episodes with vectors when that was measured.
    background_rows integer NOT NULL DEFAULT 0,
    CONSTRAINT pk_tenant_memory PRIMARY KEY (tenant_id),
    CONSTRAINT fk_tenant_memory_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id)
);

-- Objects without references. Without a tenant, since they may outlive it.
CREATE TABLE deleted_objects (
    object_key text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_deleted_objects PRIMARY KEY (object_key)
);
CREATE INDEX ix_deleted_objects_at ON deleted_objects (at);

-- Objects where no object store is set. They may outlive their tenant until they are deleted.
CREATE TABLE object_pieces (
    tenant_id uuid NOT NULL,
    object_key text NOT NULL,
    number integer NOT NULL,
    -- Compressed already.
    content bytea STORAGE EXTERNAL NOT NULL,
    CONSTRAINT pk_object_pieces PRIMARY KEY (tenant_id, object_key, number)
) WITH (autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);

-- Maintenance of a table's indexes, which all tenants share.
CREATE TABLE index_maintenance (
    name text NOT NULL,
    -- Number of the table's changed rows at the last rebuild.
    changes bigint NOT NULL,
    at timestamptz NOT NULL,
    CONSTRAINT pk_index_maintenance PRIMARY KEY (name)
);

-- --- Files ---------------------------------------------------------------------------------------

-- Files for models, from users and tools. The bytes are objects.
CREATE TABLE files (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    -- Its session, with which it is deleted. There may be no such session yet.
    session_id text,
    -- The end user whose token uploaded it; null: it belongs to the user of its session or run.
    user_id text,
    -- The run whose input or tool made it, with which it is deleted.
    run_id uuid,
    name text,
    media_type text NOT NULL,
    size bigint NOT NULL,
    sha256 text NOT NULL,
    -- Estimate of its tokens in a prompt.
    tokens integer NOT NULL,
    -- Its pieces in order, each of this size except the last.
    object_keys text[] NOT NULL,
    piece_bytes integer NOT NULL,
    created_at timestamptz NOT NULL,
    -- Time of its last use in a run's input.
    used_at timestamptz NOT NULL,
    bytes bigint GENERATED ALWAYS AS (size) STORED,
    CONSTRAINT pk_files PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_files_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_files_tenant_id_run_id_runs
        FOREIGN KEY (tenant_id, run_id) REFERENCES runs (tenant_id, id)
);
CREATE INDEX ix_files_session ON files (tenant_id, session_id) WHERE session_id IS NOT NULL;
CREATE INDEX ix_files_run ON files (tenant_id, run_id) WHERE run_id IS NOT NULL;
CREATE INDEX ix_files_user ON files (tenant_id, user_id) WHERE user_id IS NOT NULL;
CREATE INDEX ix_files_used_at ON files (used_at);

-- --- Patterns, learning and maintenance of memory ------------------------------------------------

-- Patterns: a condition and advice, learned from several episodes or written by a client.
CREATE TABLE patterns (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    name text NOT NULL,
    category text NOT NULL,
    state text NOT NULL DEFAULT 'CANDIDATE',
    version integer NOT NULL DEFAULT 1,
    -- 3: mined from own runs, 2: from runs that read foreign text, 1: written by a client.
    trust smallint NOT NULL DEFAULT '1',
    -- Equal for equal findings; null for a pattern that a client wrote.
    fingerprint text,
    -- Condition, advice, description, and relations to other patterns.
    document jsonb NOT NULL,
    -- Equal for equal advice for equal tasks. A column, because row-level security lets an index
    -- on this expression serve no query.
    meaning bigint GENERATED ALWAYS AS (jsonb_hash_extended(
        document -> 'content', jsonb_hash_extended(document -> 'applicability', 0))) STORED,
    -- The episodes or the client that it comes from.
    origin jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    uses integer NOT NULL DEFAULT 0,
    last_used timestamptz,
    replaced_by uuid,
    reason text,
    -- The last look of the present series, which began at looks_since (null: with the version): its
    -- number of applications, and the result.
    looks integer NOT NULL DEFAULT 0,
    looks_since timestamptz,
    decision text,
    -- Result of the last validation.
    applications integer NOT NULL DEFAULT 0,
    success_rate double precision,
    time_saved_s double precision,
    tokens_saved double precision,
    uplift double precision,
    confidence double precision NOT NULL DEFAULT '0',
    p_value double precision,
    -- Success of runs without the pattern, when it was validated.
    baseline jsonb NOT NULL DEFAULT '{}',
    verdict text,
    validated_at timestamptz,
    CONSTRAINT pk_patterns PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_patterns_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_patterns_category
        CHECK (category IN ('strategic', 'decomposition', 'sequence', 'tool_selection',
        'failure', 'recovery', 'optimization', 'domain')),
    CONSTRAINT ck_patterns_state
        CHECK (state IN ('CANDIDATE', 'VALIDATED', 'IN_REVIEW', 'DEPRECATED')),
    CONSTRAINT ck_patterns_trust CHECK (trust BETWEEN 1 AND 3)
);
CREATE INDEX ix_patterns_state ON patterns (tenant_id, state, id);
CREATE INDEX ix_patterns_meaning ON patterns (tenant_id, meaning, id);
CREATE UNIQUE INDEX uq_patterns_fingerprint ON patterns (tenant_id, fingerprint)
    WHERE fingerprint IS NOT NULL;

-- The episodes from which it was mined; they never count as evidence for it.
CREATE TABLE pattern_sources (
    tenant_id uuid NOT NULL,
    pattern_id uuid NOT NULL,
    episode_id uuid NOT NULL,
    CONSTRAINT pk_pattern_sources PRIMARY KEY (tenant_id, pattern_id, episode_id),
    CONSTRAINT fk_pattern_sources_tenant_id_pattern_id_patterns
        FOREIGN KEY (tenant_id, pattern_id) REFERENCES patterns (tenant_id, id) ON DELETE CASCADE
);
CREATE INDEX ix_pattern_sources_episode ON pattern_sources (tenant_id, episode_id);

-- Assignments of patterns to runs, with outcomes. When an episode is erased, the outcome stays
-- without a reference to it.
CREATE TABLE pattern_applications (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    pattern_id uuid NOT NULL,
    version integer NOT NULL,
    arm text NOT NULL,
    at timestamptz NOT NULL,
    episode_id uuid,
    -- Success rate without the pattern, if a client knows it.
    baseline_rate double precision,
    followed boolean,
    good boolean,
    -- Of the task, as conditions read them.
    features jsonb NOT NULL DEFAULT '{}',
    duration_s double precision,
    tokens bigint,
    CONSTRAINT pk_pattern_applications PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_pattern_applications_tenant_id_pattern_id_patterns
        FOREIGN KEY (tenant_id, pattern_id) REFERENCES patterns (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_pattern_applications_arm
        CHECK (arm IN ('used', 'trial', 'withheld', 'control', 'reported', 'reported_without')),
    CONSTRAINT ck_pattern_applications_baseline_rate
        CHECK (baseline_rate > 0 AND baseline_rate < 1)
);
CREATE INDEX ix_pattern_applications_episode ON pattern_applications (tenant_id, episode_id)
    WHERE episode_id IS NOT NULL;
CREATE INDEX ix_pattern_applications_order ON pattern_applications
    (tenant_id, pattern_id, version, at, id);
CREATE UNIQUE INDEX uq_pattern_applications_episode ON pattern_applications
    (tenant_id, pattern_id, version, episode_id)
    WHERE episode_id IS NOT NULL;

-- The work of learning from a finished run.
CREATE TABLE run_learning (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    episode_id uuid NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    tries integer NOT NULL DEFAULT 0,
    -- Due time; while a worker has it, the end of its lease.
    next_at timestamptz NOT NULL DEFAULT now(),
    error text,
    -- What was learned: ids and counts.
    result jsonb NOT NULL DEFAULT '{}',
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_run_learning PRIMARY KEY (tenant_id, run_id),
    CONSTRAINT fk_run_learning_tenant_id_run_id_runs
        FOREIGN KEY (tenant_id, run_id) REFERENCES runs (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_run_learning_status CHECK (status IN ('pending', 'done', 'failed'))
);
CREATE INDEX ix_run_learning_due ON run_learning (tenant_id, next_at, run_id)
    WHERE status = 'pending';

-- The agent's success_check of a completed run, decided in the background.
CREATE TABLE run_checks (
    tenant_id uuid NOT NULL,
    run_id uuid NOT NULL,
    -- The part of the run that is judged, as in episode_parts; empty: the run itself.
    part text NOT NULL DEFAULT '',
    -- Of a part that is not judged yet: {"agent", "input", "output"}.
    asked jsonb,
    status text NOT NULL DEFAULT 'pending',
    -- Checks that are next: 0 those that we decide, 1 those of plugins, 2 those of models.
    stage smallint NOT NULL DEFAULT 0,
    -- Number of claims in this stage.
    tries integer NOT NULL DEFAULT 0,
    -- Due time; while a worker has it, the end of its lease.
    next_at timestamptz NOT NULL DEFAULT now(),
    -- Null: not decided.
    passed boolean,
    -- [{"type", "passed", "reason"}], one for each check, in order.
    results jsonb NOT NULL DEFAULT '[]',
    -- The budget that a judge waits for; for status unknown the word budget.
    reason text,
    error text,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_run_checks PRIMARY KEY (tenant_id, run_id, part),
    CONSTRAINT fk_run_checks_tenant_id_run_id_runs
        FOREIGN KEY (tenant_id, run_id) REFERENCES runs (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_run_checks_stage CHECK (stage BETWEEN 0 AND 2),
    CONSTRAINT ck_run_checks_status CHECK (status IN ('pending', 'done', 'failed', 'unknown'))
);
CREATE INDEX ix_run_checks_due ON run_checks (stage, tenant_id, next_at, run_id)
    WHERE status = 'pending';

-- Maintenance jobs of a tenant's memory: nightly and on demand.
CREATE TABLE memory_jobs (
    tenant_id uuid NOT NULL,
    id uuid NOT NULL DEFAULT uuidv7(),
    cause text NOT NULL,
    -- The scheduled time.
    tick timestamptz,
    status text NOT NULL DEFAULT 'pending',
    -- Number of completed stages.
    stage smallint NOT NULL DEFAULT '0',
    -- Where the stage goes on.
    progress jsonb NOT NULL DEFAULT '{}',
    -- See GET /v1/memory/reports; null: it is not over.
    report jsonb,
    error text,
    tries integer NOT NULL DEFAULT 0,
    -- Due time; while a worker has it, the end of its lease.
    next_at timestamptz NOT NULL DEFAULT now(),
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    ended_at timestamptz,
    CONSTRAINT pk_memory_jobs PRIMARY KEY (tenant_id, id),
    CONSTRAINT fk_memory_jobs_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_memory_jobs_cause CHECK (cause IN ('nightly', 'demand')),
    CONSTRAINT ck_memory_jobs_stage CHECK (stage BETWEEN 0 AND 6),
    CONSTRAINT ck_memory_jobs_status CHECK (status IN ('pending', 'running', 'done', 'failed'))
);
CREATE UNIQUE INDEX uq_memory_jobs_open ON memory_jobs (tenant_id)
    WHERE status IN ('pending', 'running');
CREATE UNIQUE INDEX uq_memory_jobs_tick ON memory_jobs (tenant_id, tick) WHERE tick IS NOT NULL;
