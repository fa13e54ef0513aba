"""Trial of expensive patterns in a process of its own: ``python -m bottega.json_schema.compiling``.

The engine holds the GIL while it compiles, so that even a thread would delay all requests.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

from pydantic_core import from_json, to_json

from bottega.errors import InvalidInputError, UnavailableError
from bottega.json_schema.patterns import compile_patterns

_NICENESS = 10
_LONGEST_S = 30.0


def compile_apart(patterns: Mapping[str, Mapping[str, str]]) -> None:
    """Compile patterns in another process, and wait for it.

    Raises:
        InvalidInputError: as :func:`compile_patterns`.
        UnavailableError: ``patterns_too_slow``.
    """
    command = [sys.executable, "-P", "-m", "bottega.json_schema.compiling"]
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(  # noqa: S603
            command,
            input=to_json(patterns),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            timeout=_LONGEST_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            "the check of the tools' patterns took too long: try again, or repeat less in them",
            code="patterns_too_slow",
        ) from None
    if error := from_json(done.stdout):
        raise InvalidInputError(error["detail"], code=error["code"], pointer=error["pointer"])


def main() -> None:
    """Read patterns from standard input, as JSON; write the error, or null."""
    os.nice(_NICENESS)
    try:
        compile_patterns(from_json(sys.stdin.buffer.read()))
    except InvalidInputError as error:
        found = {"detail": error.detail, "code": error.code, "pointer": error.pointer}
        sys.stdout.buffer.write(to_json(found))
    else:
        sys.stdout.buffer.write(b"null")


if __name__ == "__main__":
    main()
