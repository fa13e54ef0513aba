"""The index finds the route that Starlette's router would find."""

from typing import Any

from starlette.routing import Match

from bottega.main import RouteIndex, create_app, every_route
from tests.service import Running

ID = "0198c9a5-6b1c-7000-8000-000000000001"


async def test_every_route_is_found_by_the_index(refusing: Running) -> None:
    app = create_app(refusing.service)
    index = RouteIndex(app.router)
    asked = 0
    for route in [*every_route(), *app.router.routes]:
        path = str(getattr(route, "path_format", None)).format_map(Named())
        for method in getattr(route, "methods", None) or ("websocket",):
            kind = "websocket" if method == "websocket" else "http"
            scope: dict[str, Any] = {"type": kind, "method": method}
            scope |= {"path": path, "raw_path": path.encode()}
            found = index.find(scope)  # loads the route, if it was not loaded
            first = next(
                (each for each in app.router.routes if each.matches(scope)[0] is Match.FULL), None
            )
            if path.startswith("/v1/"):
                asked += 1
                assert found is not None, (method, path)
            assert found is None or found[0] is first
    assert asked > 70


class Named(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return ID if name.endswith("_id") else "1"


async def test_other_paths_and_methods_are_not_in_the_index(refusing: Running) -> None:
    index = RouteIndex(create_app(refusing.service).router)
    for method, path in (("PUT", "/v1/runs"), ("GET", "/v1/nothing"), ("GET", "/a"), ("GET", "")):
        assert index.find({"type": "http", "method": method, "path": path}) is None
    answer = await refusing.client.put("/v1/runs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")
    assert (await refusing.client.get("/v1/runs/")).status_code == 404
