-- API keys and tokens. The functions read all tenants' rows, because a request has no tenant yet.

-- Trigger on api_keys. Record that a key was created, and notify all API processes. From now on,
-- requests need keys.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION announce_keys() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO first_key DEFAULT VALUES ON CONFLICT DO NOTHING;
    END IF;
    PERFORM send_signal('bottega_keys');
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER announce_keys
AFTER INSERT OR DELETE OR UPDATE OF scopes, expires_at, revoked_at ON api_keys
FOR EACH STATEMENT EXECUTE FUNCTION announce_keys();

-- Called by API processes. Return the key with this hash, unless it was revoked.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION find_key(p_hash bytea)
RETURNS TABLE (tenant_id uuid, id uuid, prefix text, scopes text[], expires_at timestamptz,
               require_user boolean, limits jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT k.tenant_id, k.id, k.prefix, k.scopes, k.expires_at, k.require_user, k.limits
    FROM api_keys k
    WHERE k.key_hash = p_hash AND k.revoked_at IS NULL
$$;

-- Called by API processes every few seconds. Return the given keys that are not revoked.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION live_keys(p_tenants uuid[], p_ids uuid[])
RETURNS TABLE (tenant_id uuid, id uuid, prefix text, scopes text[], expires_at timestamptz,
               require_user boolean, limits jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT k.tenant_id, k.id, k.prefix, k.scopes, k.expires_at, k.require_user, k.limits
    FROM unnest(p_tenants, p_ids) AS asked(tenant_id, id) JOIN api_keys k USING (tenant_id, id)
    WHERE k.revoked_at IS NULL
$$;

-- Called by API processes. Set last_used_at of the given keys, at most once a minute. Skip locked
-- rows.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION note_key_use(p_tenants uuid[], p_ids uuid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE api_keys SET last_used_at = now() WHERE (tenant_id, id) IN (
        SELECT k.tenant_id, k.id
        FROM unnest(p_tenants, p_ids) AS used(tenant_id, id) JOIN api_keys k USING (tenant_id, id)
        WHERE k.last_used_at IS NULL OR k.last_used_at <= now() - interval '1 minute'
        FOR NO KEY UPDATE OF k SKIP LOCKED)
$$;

-- Called by API processes for the token of a signed-in person. Return the named tenant's id.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION find_tenant(p_name text) RETURNS uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT id FROM tenants WHERE name = p_name
$$;

-- Called by API processes every few seconds. Return the keys that sign tokens, the revocations
-- since p_since, and the time of this answer. Add the key p_new if the newest key is a month old.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION token_state(p_new bytea, p_since timestamptz)
RETURNS TABLE (kind text, tenant_id uuid, name text, secret bytea, at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    -- A transaction may commit some time after the time in its rows, so read one minute more.
    v_since timestamptz := coalesce(
        p_since - interval '1 minute', now() - interval '1 day 1 minute');
BEGIN
    IF NOT EXISTS (
        SELECT FROM signing_keys k WHERE k.created_at > now() - interval '30 days')
    THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('signing_keys', 0));
        INSERT INTO signing_keys (secret) SELECT p_new WHERE NOT EXISTS (
            SELECT FROM signing_keys k WHERE k.created_at > now() - interval '30 days');
        DELETE FROM signing_keys k WHERE k.created_at < now() - interval '32 days';
    END IF;
    RETURN QUERY
        SELECT 'signing', NULL::uuid, k.id::text, k.secret, k.created_at FROM signing_keys k
        UNION ALL
        SELECT 'token', e.tenant_id, e.jti, NULL, e.ended_at FROM ended_tokens e
        WHERE e.revoked AND e.ended_at >= v_since
        UNION ALL
        SELECT 'key', k.tenant_id, k.id::text, NULL, k.revoked_at FROM api_keys k
        WHERE k.revoked_at >= v_since
        UNION ALL SELECT 'time', NULL, NULL, NULL, now();
END $$;
