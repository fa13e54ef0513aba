"""Changes of runs by requests that may name the run's user."""

from uuid import UUID

from bottega.api.auth import Principal, acts_for
from bottega.container import Service
from bottega.files.rows import owner_of_run


async def refuse_other_user(
    service: Service,
    principal: Principal,
    run_id: UUID,
    user: str | None,
    pointer: str | None = None,
) -> None:
    """Check that a run is the user's whom a request names, if it names one.

    Args:
        pointer: as of :func:`acts_for`.

    Raises:
        UserRequiredError: the key must name a user.
        NotFoundError: there is no such run.
        ConflictError: ``session_user``.
    """
    acting = acts_for(principal, user, pointer)
    async with service.database.begin(acting.tenant_id) as tx:
        owner = await owner_of_run(tx, acting.tenant_id, run_id)
    acting.refuse_other(owner.user, f"run {run_id}")
