-- API keys and tickets. All of them look across tenants: a request has no tenant yet.

-- Trigger on api_keys. Record that a key existed once, after which requests without a key are
-- refused, and notify all API processes.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION announce_keys() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO first_key DEFAULT VALUES ON CONFLICT DO NOTHING;
    END IF;
    PERFORM pg_notify('bottega_keys', '');
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER announce_keys
AFTER INSERT OR DELETE OR UPDATE OF scopes, expires_at, revoked_at ON api_keys
FOR EACH STATEMENT EXECUTE FUNCTION announce_keys();

-- Called by API processes. Return whether requests need a key.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION keys_required() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT FROM first_key)
$$;

-- Called by API processes. Return the key with this hash, unless it was revoked.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION find_key(p_hash bytea)
RETURNS TABLE (tenant_id uuid, id uuid, prefix text, scopes text[], expires_at timestamptz,
               require_user boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT k.tenant_id, k.id, k.prefix, k.scopes, k.expires_at, k.require_user FROM api_keys k
    WHERE k.key_hash = p_hash AND k.revoked_at IS NULL
$$;

-- Called by API processes every few seconds. Return those of the given keys that were not revoked.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION live_keys(p_tenants uuid[], p_ids uuid[])
RETURNS TABLE (tenant_id uuid, id uuid, prefix text, scopes text[], expires_at timestamptz,
               require_user boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT k.tenant_id, k.id, k.prefix, k.scopes, k.expires_at, k.require_user
    FROM unnest(p_tenants, p_ids) AS asked(tenant_id, id) JOIN api_keys k USING (tenant_id, id)
    WHERE k.revoked_at IS NULL
$$;

-- Called by API processes. Set last_used_at of the given keys, at most once a minute. Locked rows
-- are skipped: another process sets the same.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION note_key_use(p_tenants uuid[], p_ids uuid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE api_keys SET last_used_at = now() WHERE (tenant_id, id) IN (
        SELECT k.tenant_id, k.id
        FROM unnest(p_tenants, p_ids) AS used(tenant_id, id) JOIN api_keys k USING (tenant_id, id)
        WHERE k.last_used_at IS NULL OR k.last_used_at <= now() - interval '1 minute'
        FOR NO KEY UPDATE OF k SKIP LOCKED)
$$;

-- Called when a WebSocket or an event stream opens. Return a ticket's tenant and scopes if it is
-- valid: for this use and run, not expired, its key still valid. One for a WebSocket is deleted,
-- valid or not.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION redeem_ticket(p_hash bytea, p_run uuid, p_opens text)
RETURNS TABLE (
    tenant_id uuid, scopes text[], key_id uuid, prefix text, require_user boolean)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH used AS (
        DELETE FROM ws_tickets t
        WHERE t.ticket_hash = p_hash AND t.opens = 'websocket' RETURNING t.*),
    shown AS (
        SELECT * FROM used
        UNION ALL SELECT t.* FROM ws_tickets t WHERE t.ticket_hash = p_hash AND t.opens = 'sse')
    SELECT u.tenant_id, u.scopes, u.key_id, k.prefix, coalesce(k.require_user, false)
    FROM shown u LEFT JOIN api_keys k ON k.tenant_id = u.tenant_id AND k.id = u.key_id
    WHERE u.opens = p_opens AND u.expires_at > now() AND coalesce(u.run_id = p_run, true)
      AND CASE WHEN u.key_id IS NULL THEN NOT keys_required()
          ELSE k.id IS NOT NULL AND k.revoked_at IS NULL AND coalesce(k.expires_at > now(), true)
          END
$$;
