"""Routes for operators: health, readiness, version."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import Field

import bottega
from bottega.api.errors import problem_response, problems, storage_full
from bottega.api.schemas.base import Answer
from bottega.api.server.console import CONSOLE, wants_page
from bottega.api.server.headers import sent
from bottega.api.shared.deps import ReadTenant, ServiceDep
from bottega.db.migrate import require_current
from bottega.engine.workers import any_alive
from bottega.errors import BottegaError
from bottega.metrics import CONTENT_TYPE

router = APIRouter(tags=["operations"])

_PATIENCE_S = 3.0


class Root(Answer):
    """The service at this address."""

    name: str = "bottega"
    version: str
    docs: str = "/docs"


class Health(Answer):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(Answer):
    """The service is ready for work."""

    status: Literal["ready"] = "ready"
    worker: Annotated[
        Literal["here", "elsewhere", "none"],
        Field(description="Place where runs are executed; `none`: no worker is up, and runs wait."),
    ]


class Info(Answer):
    """The server's version and model."""

    name: str = "bottega"
    version: str
    model: str
    demo_model: bool
    docs_url: str = "/docs"
    openapi_url: str = "/openapi.json"


@router.get(
    "/",
    operation_id="get_root",
    summary="Read name and version",
    description="A browser is sent to the console instead.",
    response_model=Root,
)
async def root(request: Request) -> Root | Response:
    if wants_page(request):
        return RedirectResponse(f"{CONSOLE}/")
    return Root(version=bottega.__version__)


@router.get(
    "/healthz",
    operation_id="get_health",
    summary="Check that the process is alive",
    response_model=Health,
)
async def health() -> Health:
    return Health()


@router.get(
    "/readyz",
    operation_id="get_readiness",
    summary="Check the database, its migrations, the background services and the worker",
    response_model=Readiness,
    responses=problems(),
)
async def ready(service: ServiceDep) -> Readiness | Response:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await require_current(service.database.pool)
            elsewhere = await any_alive(service.database.pool)
            if not await service.database.has_room():
                return storage_full()
    except TimeoutError:
        return problem_response(503, "database_unavailable", "the database does not answer")
    except BottegaError as error:
        return problem_response(503, error.code, error.detail)
    for name, deaths in service.services.failing().items():
        return problem_response(
            503,
            "service_failing",
            f"the background service '{name}' keeps dying, {deaths} times in a row: the process's "
            "log says why",
        )
    if service.wakeups.closed.is_set() or service.stop_working.is_set():
        return problem_response(503, "stopping", "this process is about to stop")
    if service.working:
        return Readiness(worker="here")
    return Readiness(worker="elsewhere" if elsewhere else "none")


@router.get("/metrics", include_in_schema=False)
async def metrics(service: ServiceDep, request: Request) -> Response:
    """Report to Prometheus. No API key opens this: it counts what all tenants do."""
    report = await service.scraping.report(sent(request.scope, b"authorization"))
    return Response(report, media_type=CONTENT_TYPE)


@router.get(
    "/v1/info",
    operation_id="get_info",
    summary="Read the server's version and model",
    response_model=Info,
    responses=problems(),
)
async def info(service: ServiceDep, tenant: ReadTenant) -> Info:
    return Info(
        version=bottega.__version__,
        model=service.settings.default_model,
        demo_model=service.settings.uses_demo_model,
    )
