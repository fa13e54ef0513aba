-- Erasure of an end user's data. While user_erasures has a row for a user, new data of the user are
-- refused. The row is deleted after the erasure.

-- Called before data of a user are stored. Return false if the user is being erased. Otherwise
-- return true, and make an erasure of the user wait for this transaction.
CREATE OR REPLACE FUNCTION hold_user(p_tenant uuid, p_user text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    -- This check locks nothing, so refused requests do not delay the end of an erasure.
    IF EXISTS (SELECT FROM user_erasures WHERE tenant_id = p_tenant AND user_id = p_user) THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_xact_lock_shared(user_lock(p_tenant, p_user));
    RETURN NOT EXISTS (SELECT FROM user_erasures WHERE tenant_id = p_tenant AND user_id = p_user);
END $$;

-- Called by hold_user, and at the end of an erasure. Return the key of a user's advisory lock.
CREATE OR REPLACE FUNCTION user_lock(p_tenant uuid, p_user text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS
$$ SELECT hashtextextended(jsonb_build_array('user', p_tenant, p_user)::text, 0) $$;

-- Store a fact about a user once. Return the fact's id. Null: the user is being erased. Nil UUID:
-- the user has p_most facts. If p_confirmed is true and the fact exists, confirm the fact.
CREATE OR REPLACE FUNCTION add_user_fact(
    p_tenant uuid, p_user text, p_text text, p_kind text, p_run uuid, p_confirmed boolean,
    p_most integer
) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    v_id uuid;
BEGIN
    IF NOT hold_user(p_tenant, p_user) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock(
        hashtextextended(jsonb_build_array('facts', p_tenant, p_user)::text, 0));
    UPDATE user_facts SET confirmed = confirmed OR p_confirmed
    WHERE tenant_id = p_tenant AND user_id = p_user AND text = p_text RETURNING id INTO v_id;
    IF FOUND THEN
        RETURN v_id;
    END IF;
    -- People must always be able to set facts, so unconfirmed facts may not use all room.
    IF (SELECT count(*) >= p_most OR NOT p_confirmed AND count(*) FILTER (WHERE NOT confirmed) >= 20
        FROM user_facts WHERE tenant_id = p_tenant AND user_id = p_user) THEN
        RETURN '00000000-0000-0000-0000-000000000000';
    END IF;
    INSERT INTO user_facts (tenant_id, user_id, text, kind, source_run, confirmed)
    VALUES (p_tenant, p_user, p_text, p_kind, p_run, p_confirmed) RETURNING id INTO v_id;
    RETURN v_id;
END $$;
