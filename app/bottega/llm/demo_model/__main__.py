"""``python -m bottega.llm.demo_model``: serve the demo model on loopback.

Prints one line, ``{"port": N}``, when it accepts requests.
"""

import argparse
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import uvicorn

from bottega.llm.demo_model.embeddings import answering
from bottega.llm.demo_model.server import create_app

if TYPE_CHECKING:
    from bottega.llm.local.builtin import BuiltinEmbedder, Vectors

_KEEP_ALIVE_S = 75
_GRACE_S = 0  # its answers are not needed after a stop


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        port = (sockets or [])[0].getsockname()[1]
        sys.stdout.write(json.dumps({"port": port}) + "\n")
        sys.stdout.flush()


def main() -> None:
    options = _options()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", options.port))
    except OSError as error:
        sys.exit(f"cannot listen on 127.0.0.1:{options.port}: {error.strerror}")
    if options.exit_with_parent:
        threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    app = create_app(
        embed=answering(_embed),
        latency_s=options.latency_ms / 1000,
        token_delay_s=options.token_delay_ms / 1000,
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    _Server(config).run(sockets=[listener])


async def _embed(texts: Sequence[str]) -> "Vectors":
    return await _embedder().embed(texts)


@cache
def _embedder() -> "BuiltinEmbedder":
    """Load the embedder, with numpy, at the first request for vectors."""
    from bottega.llm.local.builtin import BuiltinEmbedder

    return BuiltinEmbedder()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bottega demo-model", description="A deterministic model for demos and tests."
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--latency-ms", type=_duration, default=0, help="before an answer begins")
    parser.add_argument("--token-delay-ms", type=_duration, default=0, help="between its words")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="stop when standard input ends"
    )
    return parser.parse_args()


def _duration(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 600_000:
        raise argparse.ArgumentTypeError("must be between 0 and 600000")
    return value


def _exit_at_end_of_input() -> None:
    """Exit at the end of standard input: the parent's end closes even if it is killed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
