"""HTTP helpers of the demo."""

from typing import Any

import httpx2


class DemoError(Exception):
    """The demo cannot continue; the text is the reason."""


async def checked(answer: Any) -> dict[str, Any]:
    """Return the body of a response, or of an awaitable one.

    Raises:
        DemoError: the response is an error.
    """
    response: httpx2.Response = answer if isinstance(answer, httpx2.Response) else await answer
    body: dict[str, Any] = response.json()
    if response.is_error:
        raise DemoError(f"{response.request.method} {response.request.url}: {body['detail']}")
    return body
