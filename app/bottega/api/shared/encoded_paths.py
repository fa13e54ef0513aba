"""Routes whose path parameters may be any text."""

from urllib.parse import unquote

from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope


class EncodedPathRoute(APIRoute):
    """A route that is matched before its path is decoded, so that a parameter may contain ``%2F``.

    Bytes that are no UTF-8 become lone surrogates, which no parameter may contain.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        raw = scope.get("raw_path", b"").decode("latin-1")
        match, more = super().matches({**scope, "path": raw})
        if match is not Match.NONE:
            more["path_params"] = {
                name: unquote(value, errors="surrogateescape")
                for name, value in more["path_params"].items()
            }
        return match, more
