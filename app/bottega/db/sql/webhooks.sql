-- Webhooks about runs that ended or wait for people.

-- Trigger on runs. When a run with a webhook_url ends, add a webhook and notify the senders. A
-- batch ends again after a retry, so each of its webhooks has the seq of a final event.
CREATE OR REPLACE FUNCTION order_webhook() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhooks (tenant_id, run_id, seq, url) VALUES (NEW.tenant_id, NEW.id,
        CASE NEW.mode WHEN 'batch' THEN NEW.last_seq ELSE 0 END, NEW.webhook_url);
    PERFORM send_signal('bottega_webhooks');
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER order_webhook AFTER UPDATE OF status ON runs FOR EACH ROW
WHEN (NEW.webhook_url IS NOT NULL AND NEW.ended_at IS NOT NULL AND OLD.ended_at IS NULL)
EXECUTE FUNCTION order_webhook();
