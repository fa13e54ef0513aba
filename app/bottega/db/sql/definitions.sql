-- Versions of agents, graphs, providers and MCP servers, for runs that pin them.

-- Trigger on agents, graphs, providers and MCP servers. Give the tenant's definitions a new epoch,
-- so that processes read the versions again. Epochs are random, so an old epoch never occurs again,
-- even after a restored backup.
CREATE OR REPLACE FUNCTION change_definitions() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN  -- the tenant may be in deletion, without a row
        UPDATE definition_epochs SET epoch = gen_random_uuid()
        WHERE tenant_id IN (SELECT tenant_id FROM changed);
    ELSE
        INSERT INTO definition_epochs (tenant_id) SELECT DISTINCT tenant_id FROM changed
        ON CONFLICT (tenant_id) DO UPDATE SET epoch = gen_random_uuid();
    END IF;
    RETURN NULL;
END $$;

DO $$
DECLARE
    v_table text;
    v_end text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['agents', 'graphs', 'providers', 'mcp_servers'] LOOP
        v_end := format('ON %I REFERENCING %%s TABLE AS changed FOR EACH STATEMENT '
                        'EXECUTE FUNCTION change_definitions()', v_table);
        EXECUTE 'CREATE OR REPLACE TRIGGER change_definitions_in AFTER INSERT '
            || format(v_end, 'NEW');
        EXECUTE 'CREATE OR REPLACE TRIGGER change_definitions_change AFTER UPDATE '
            || format(v_end, 'NEW');
        EXECUTE 'CREATE OR REPLACE TRIGGER change_definitions_out AFTER DELETE '
            || format(v_end, 'OLD');
    END LOOP;
END $$;

-- Called for a run whose versions are not cached. Return the epoch and the pinned definitions: the
-- graph, the reachable agents, and the tenant's providers and MCP servers that these agents may
-- use. p_version: version of the agent (or, without an agent, the graph); NULL: the current one.
CREATE OR REPLACE FUNCTION read_pins(
    p_tenant uuid, p_agent text, p_graph text, p_version integer, p_draft jsonb DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN (
        WITH RECURSIVE wanted(level, name, version, current, definition) AS (
            SELECT 1, v.name, v.version, g.version, v.definition
            FROM graphs g JOIN graph_versions v
              ON v.tenant_id = g.tenant_id AND v.name = g.name AND v.version = CASE
                WHEN p_agent IS NULL THEN coalesce(p_version, g.version) ELSE g.version END
            WHERE g.tenant_id = p_tenant AND g.name = p_graph AND g.deleted_at IS NULL
            UNION
            SELECT level + 1, node ->> 'graph', v.version, g.version, v.definition
            FROM wanted
            CROSS JOIN jsonb_path_query(
                wanted.definition, '$.nodes[*] ? (@.graph != null)') AS node
            LEFT JOIN graphs g ON g.tenant_id = p_tenant AND g.name = node ->> 'graph'
              AND g.deleted_at IS NULL
            LEFT JOIN graph_versions v ON v.tenant_id = p_tenant AND v.name = g.name
              AND v.version = coalesce((node ->> 'version')::integer, g.version)
            WHERE level <= 3  -- one level more than permitted, so that the caller can refuse it
        ), graphs_in AS (
            -- Each graph has at least one node, so more graphs would exceed the limit of nodes.
            SELECT *, jsonb_array_length(definition -> 'nodes') AS size,
                   jsonb_path_query_array(definition, '$.nodes[*] ? (@.graph != null)') AS subgraphs
            FROM wanted LIMIT 2002
        ), nodes AS (
            SELECT node FROM graphs_in
            CROSS JOIN jsonb_array_elements(graphs_in.definition -> 'nodes') AS node
        ), reached(name, version, definition) AS (
            SELECT p_agent, 0, p_draft WHERE p_draft IS NOT NULL
            UNION
            SELECT a.name, v.version, v.definition FROM agents a JOIN agent_versions v
              ON v.tenant_id = a.tenant_id AND v.name = a.name AND v.version = CASE
                WHEN a.name = p_agent THEN coalesce(p_version, a.version) ELSE a.version END
            WHERE a.tenant_id = p_tenant AND a.deleted_at IS NULL AND (
                a.name = p_agent AND p_draft IS NULL
                OR a.name = ANY(ARRAY(SELECT node ->> 'agent' FROM nodes)))
            UNION
            SELECT a.name, v.version, v.definition FROM reached
            CROSS JOIN jsonb_array_elements_text(
                reached.definition #> '{subagents,names}') AS child(name)
            JOIN agents a
              ON a.tenant_id = p_tenant AND a.name = child.name AND a.deleted_at IS NULL
            JOIN agent_versions v
              ON v.tenant_id = a.tenant_id AND v.name = a.name AND v.version = a.version
        )
        SELECT jsonb_build_object(
            'epoch', (SELECT epoch FROM definition_epochs WHERE tenant_id = p_tenant),
            'default_model', (
                SELECT default_model FROM definition_epochs WHERE tenant_id = p_tenant),
            'graph', (SELECT jsonb_build_object(
                'version', version, 'size', size, 'subgraphs', subgraphs,
                'judges', jsonb_path_query_array(definition, 'lax $.success_check[*].model'),
                'nodes', (SELECT coalesce(jsonb_agg(node -> 'agent'), '[]') FROM nodes
                    WHERE node ->> 'agent' IS NOT NULL),
                'memory', (SELECT jsonb_agg(node -> 'memory') FROM nodes
                    WHERE node ->> 'agent' IS NOT NULL),
                'tools', (SELECT coalesce(jsonb_agg(node -> 'tool'), '[]') FROM nodes
                    WHERE node -> 'tool' IS NOT NULL),
                'below', (SELECT coalesce(jsonb_agg(jsonb_build_object(
                        'name', name, 'version', version, 'current', current, 'level', level,
                        'size', size, 'subgraphs', subgraphs)
                    ORDER BY level), '[]') FROM graphs_in WHERE level > 1))
                FROM graphs_in WHERE level = 1),
            'agents', (SELECT coalesce(jsonb_object_agg(name, jsonb_build_object(
                'version', version, 'undescribed', definition ->> 'description' = '',
                'stateful', definition -> 'stateless' = 'false',
                'beside', coalesce(definition #>> '{subagents,mode}' = 'async', false),
                'memory', coalesce(definition ->> 'memory', 'full'),
                'memory_scope', definition ->> 'memory_scope',
                'model', definition -> 'model',
                'judges', jsonb_path_query_array(definition, 'lax $.success_check[*].model'),
                'params', definition -> 'params', 'expose', definition -> 'expose',
                'tools', (SELECT coalesce(jsonb_agg(jsonb_build_object(
                        'type', tool -> 'type', 'name', tool -> 'name',
                        'server', tool -> 'server', 'tools', tool -> 'tools')), '[]')
                    FROM jsonb_path_query(definition, 'lax $.tools[*]') AS tool),
                'children', coalesce(nullif(definition #> '{subagents,names}', 'null'), '[]'))),
                '{}') FROM reached),
            'mcp_servers', (
                SELECT coalesce(jsonb_object_agg(m.name, jsonb_build_object(
                    'version', m.version, 'tools', CASE WHEN v.definition -> 'tools' <> 'null'
                    THEN jsonb_path_query_array(v.definition, '$.tools[*].name') END)), '{}')
                FROM mcp_servers m JOIN mcp_server_versions v
                  ON v.tenant_id = m.tenant_id AND v.name = m.name AND v.version = m.version
                WHERE m.tenant_id = p_tenant AND m.deleted_at IS NULL AND m.name IN (
                    SELECT jsonb_path_query(
                        definition, 'lax $.tools[*] ? (@.type == "mcp").server') #>> '{}'
                    FROM reached UNION
                    SELECT node #>> '{tool,server}' FROM nodes)),
            'providers', (
                SELECT coalesce(jsonb_object_agg(p.name, jsonb_build_object(
                    'version', p.version, 'dialect', v.definition ->> 'dialect',
                    'models', v.definition -> 'models', 'headers', v.definition -> 'headers',
                    'base_url', v.definition ->> 'base_url',
                    'prices', nullif(v.definition -> 'prices', 'null'))),
                    '{}')
                FROM providers p JOIN provider_versions v
                  ON v.tenant_id = p.tenant_id AND v.name = p.name AND v.version = p.version
                WHERE p.tenant_id = p_tenant AND p.deleted_at IS NULL AND p.name IN (
                    SELECT 'default' UNION
                    SELECT split_part(default_model, ':', 1) FROM definition_epochs
                    WHERE tenant_id = p_tenant UNION
                    SELECT substring(model FROM '^[^/:]*') FROM reached
                    CROSS JOIN LATERAL (
                        SELECT jsonb_path_query(definition, 'lax $.model[*]')
                        UNION ALL
                        SELECT jsonb_path_query(definition, 'lax $.success_check[*].model')
                    ) AS named(value)
                    CROSS JOIN LATERAL (SELECT named.value #>> '{}') AS text(model)))));
END $$;
