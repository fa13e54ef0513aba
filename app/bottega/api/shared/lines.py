"""JSON in answers that clients read line by line."""

from collections.abc import AsyncGenerator, AsyncIterator

_BREAKS = {
    "\N{NEXT LINE}".encode(): rb"\u0085",
    "\N{LINE SEPARATOR}".encode(): rb"\u2028",
    "\N{PARAGRAPH SEPARATOR}".encode(): rb"\u2029",
}
"""Characters that many readers take for an end of line, and how JSON escapes them."""


async def escaped_lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield chunks of JSON, each of whole characters, in which only line feeds end lines.

    Closes ``chunks`` with itself: a reader that is cut off must not stay a reader.
    """
    try:
        async for chunk in chunks:
            if not chunk.isascii():
                for character, escape in _BREAKS.items():
                    chunk = chunk.replace(character, escape)
            yield chunk
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()
