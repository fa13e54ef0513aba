-- Webhooks that announce that a run ended, or waits for people.

-- Trigger on runs. When a run with a webhook_url ends, add its webhook and notify the senders.
CREATE OR REPLACE FUNCTION order_webhook() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhooks (tenant_id, run_id, url) VALUES (NEW.tenant_id, NEW.id, NEW.webhook_url);
    PERFORM pg_notify('bottega_webhooks', '');
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER order_webhook AFTER UPDATE OF status ON runs FOR EACH ROW
WHEN (NEW.webhook_url IS NOT NULL AND NEW.ended_at IS NOT NULL AND OLD.ended_at IS NULL)
EXECUTE FUNCTION order_webhook();

-- Called by claim_due_webhooks and next_webhook_s. Return the tenants with webhooks to send, at the
-- cost of one index step for each.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION webhook_tenants() RETURNS SETOF uuid
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE holder(tenant) AS (
        (SELECT tenant_id FROM webhooks WHERE status = 'pending' ORDER BY tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT w.tenant_id FROM webhooks w
                WHERE w.status = 'pending' AND w.tenant_id > holder.tenant
                ORDER BY w.tenant_id LIMIT 1)
        FROM holder WHERE holder.tenant IS NOT NULL)
    SELECT tenant FROM holder WHERE tenant IS NOT NULL
$$;

-- Called by the sender of webhooks. Lease due webhooks to the caller, at most p_each of a tenant,
-- and none of the tenants in p_busy, so that slow receivers delay no other tenant. Tenants come in
-- random order. Return also the number of tries so far.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim_due_webhooks(
    p_lease_s double precision, p_most integer, p_each integer, p_busy uuid[]
) RETURNS TABLE (tenant_id uuid, run_id uuid, seq bigint, tries integer, at timestamptz)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE webhooks w SET tries = w.tries + 1, next_at = now() + make_interval(secs => p_lease_s)
    FROM (
        SELECT due.tenant_id, due.run_id, due.seq FROM (
            SELECT * FROM webhook_tenants() AS holder(tenant) WHERE holder.tenant <> ALL (p_busy)
            ORDER BY random()
        ) AS holder CROSS JOIN LATERAL (
            SELECT w.tenant_id, w.run_id, w.seq FROM webhooks w
            WHERE w.tenant_id = holder.tenant AND w.status = 'pending' AND w.next_at <= now()
            ORDER BY w.next_at LIMIT p_each FOR UPDATE SKIP LOCKED) AS due
        LIMIT p_most) AS taken
    WHERE w.tenant_id = taken.tenant_id AND w.run_id = taken.run_id AND w.seq = taken.seq
    RETURNING w.tenant_id, w.run_id, w.seq, w.tries, now()
$$;

-- Called by the sender of webhooks. Return the seconds until the next webhook is due, without the
-- tenants in p_busy.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_webhook_s(p_busy uuid[]) RETURNS double precision
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(first.next_at) - now())::double precision
    FROM webhook_tenants() AS holder(tenant) CROSS JOIN LATERAL (
        SELECT w.next_at FROM webhooks w WHERE w.tenant_id = holder.tenant AND w.status = 'pending'
        ORDER BY w.next_at LIMIT 1) AS first
    WHERE holder.tenant <> ALL (p_busy)
$$;
