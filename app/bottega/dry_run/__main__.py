"""The program of a dry run: it reads a plan as JSON from standard input, and writes the result.

It is a separate process, because its CPU time would block the event loop even from a thread, and
because a process can be ended.
"""

import asyncio
import resource
import sys

from pydantic_core import from_json

from bottega.dry_run import CPU_S, MOST_BYTES, NO_MEMORY
from bottega.dry_run.result import dry_run


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    try:
        answer = asyncio.run(dry_run(from_json(sys.stdin.buffer.read())))
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            raise
        sys.exit(NO_MEMORY)  # PyO3's panic, which is no Exception, means lack of memory, too
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    main()
