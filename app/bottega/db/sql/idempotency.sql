-- Stored answers to requests with an Idempotency-Key. A repeated request creates no new object.

-- Called before an object is created. Return NULL for the first request with a key. For a repeated
-- request, return {"answer": ...}, or {"refused": reason} if the first request is in progress or
-- was a different request. Requests with the same key wait for each other's transactions.
CREATE OR REPLACE FUNCTION earlier_answer(p_tenant uuid, p_key text, p_hash bytea) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    v_kept idempotency_keys%ROWTYPE;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended(p_tenant || ' ' || p_key, 0)) THEN
        RETURN '{"refused": "in_flight"}';
    END IF;
    SELECT * INTO v_kept FROM idempotency_keys k WHERE k.tenant_id = p_tenant AND k.key = p_key
        AND k.created_at > now() - interval '24 hours';
    RETURN CASE WHEN NOT FOUND THEN NULL
        WHEN v_kept.request_hash <> p_hash THEN '{"refused": "idempotency_key_reused"}'
        ELSE jsonb_build_object('answer', v_kept.answer) END;
END $$;

-- Called after the creation of an object, in the same transaction. Store the request's answer.
CREATE OR REPLACE FUNCTION keep_answer(p_tenant uuid, p_key text, p_hash bytea, p_answer jsonb)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO idempotency_keys AS k (tenant_id, key, request_hash, answer, created_at)
    VALUES (p_tenant, p_key, p_hash, p_answer, now())
    ON CONFLICT (tenant_id, key) DO UPDATE SET
        request_hash = excluded.request_hash, answer = excluded.answer,
        created_at = excluded.created_at
$$;
