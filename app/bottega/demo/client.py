"""What the demo's parts share as clients of the server."""

from typing import Any

import httpx2


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


async def checked(answer: Any) -> dict[str, Any]:
    """The body of an answer, or of one that is awaited.

    Raises:
        DemoError: it is a refusal.
    """
    response: httpx2.Response = answer if isinstance(answer, httpx2.Response) else await answer
    body: dict[str, Any] = response.json()
    if response.is_error:
        raise DemoError(f"{response.request.method} {response.request.url}: {body['detail']}")
    return body
