"""``python -m bottega.llm.demo_model``: serve the demo model on loopback.

Prints one line, ``{"port": N}``, when it accepts connections.
"""

import argparse
import json
import os
import socket
import sys
import threading

import uvicorn

from bottega.llm.demo_model.server import create_app


def main() -> None:
    options = _options()
    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except OSError as error:
        sys.exit(f"cannot listen on 127.0.0.1:{options.port}: {error.strerror}")
    if options.exit_with_parent:
        threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    latency_s, delay_s = options.latency_ms / 1000, options.token_delay_ms / 1000
    config = uvicorn.Config(
        create_app(latency_s=latency_s, token_delay_s=delay_s),
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=0,  # nobody needs answers after a stop
    )
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)  # noqa: T201
    uvicorn.Server(config).run(sockets=[listener])


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
    if (value := float(text)) < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _exit_at_end_of_input() -> None:
    """Exit when standard input ends: the system closes it when the parent ends or is killed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
