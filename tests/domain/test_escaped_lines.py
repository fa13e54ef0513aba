"""Line ends in JSON that clients read line by line."""

from collections.abc import AsyncIterator

from bottega.api.shared.pages import escaped_lines


async def test_only_line_feeds_end_lines() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'"plain"\n'
        yield '"a\u2028b\u2029c\u0085d"\n'.encode()

    read = [chunk async for chunk in escaped_lines(chunks())]
    assert read == [b'"plain"\n', b'"a\\u2028b\\u2029c\\u0085d"\n']


async def test_a_stream_that_is_closed_closes_its_source() -> None:
    open_sources = []

    async def chunks() -> AsyncIterator[bytes]:
        open_sources.append(1)
        try:
            yield b"1"
            yield b"2"
        finally:
            open_sources.pop()

    stream = escaped_lines(chunks())
    assert await anext(stream) == b"1"
    assert open_sources
    await stream.aclose()
    assert not open_sources
