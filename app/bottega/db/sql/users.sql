-- Erasure of an end user's data. While user_erasures has a row for a user, new data of the user is
-- refused; the row stays until all data is erased.

-- Called before data of a user are stored. Return false if the user is being erased. Otherwise keep
-- an erasure of the user from ending before this transaction.
CREATE OR REPLACE FUNCTION hold_user(p_tenant uuid, p_user text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    -- This check takes no lock, so that refused requests do not delay the end of an erasure.
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

-- Return true if any row names a user.
CREATE OR REPLACE FUNCTION knows_user(p_tenant uuid, p_user text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM runs WHERE tenant_id = p_tenant AND user_id = p_user)
        OR EXISTS (SELECT FROM sessions WHERE tenant_id = p_tenant AND user_id = p_user)
        OR EXISTS (SELECT FROM episodes WHERE tenant_id = p_tenant AND user_id = p_user)
        OR EXISTS (SELECT FROM schedules_of_user(p_tenant, p_user))
$$;

-- Return the names of schedules whose runs name a user, or a session of the user's.
CREATE OR REPLACE FUNCTION schedules_of_user(p_tenant uuid, p_user text) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    SELECT s.name FROM schedules s
    WHERE s.tenant_id = p_tenant AND (s.run ->> 'user' = p_user OR EXISTS (
        SELECT FROM sessions o WHERE o.tenant_id = p_tenant AND o.id = s.run ->> 'session_id'
          AND o.user_id = p_user))
$$;

-- Called at the end of an erasure. Return keys of the tenant's objects that no row names. An object
-- that a transaction is about to name is locked, so its key is left out.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION trash_of_tenant(p_most integer) RETURNS SETOF text
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT object_key FROM deleted_objects
    WHERE starts_with(object_key, current_setting('bottega.tenant')::uuid || '/') AND at <= now()
    LIMIT p_most FOR UPDATE SKIP LOCKED
$$;
