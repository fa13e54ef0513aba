"""A name service whose names under ``slow.test`` take seconds, for processes with this folder."""

import socket
import time
from typing import Any

_SECONDS = 5.0
_real = socket.getaddrinfo


def _look_up(host: Any, *rest: Any, **more: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    if name is not None and name.endswith(".slow.test"):
        time.sleep(_SECONDS)  # in a thread, as the C library waits for a server
        raise socket.gaierror(socket.EAI_AGAIN, "the name server does not answer")
    return _real(host, *rest, **more)


socket.getaddrinfo = _look_up
