"""Parts of messages on the wire: what all dialects share.

Which parts a dialect takes:

- chat: images; audio as wav or mp3; files as data (developers.openai.com/api/docs, "Images and
  vision", "Audio", "File inputs");
- responses: images; files as data or URL;
- anthropic: images (jpeg, png, gif, webp); PDF, as data or URL
  (platform.claude.com/docs/en/build-with-claude/vision and pdf-support);
- gemini: all, as data or URL (ai.google.dev/gemini-api/docs/file-input-methods).

A file that is text is sent as text by all of them.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bottega.agents.messages import StandardMessage, ToolMessage
from bottega.agents.parts import FileContent, FileLoader, Part
from bottega.agents.tokens import BYTES_PER_TOKEN
from bottega.errors import InvalidInputError
from bottega.llm.dialects.turns import Blocks
from bottega.llm.dialects.wire import encode_json
from bottega.llm.server import DialectName

Files = Mapping[str, FileContent]
"""Content of stored files by id."""

NO_FILES: Files = {}

_LARGEST: Mapping[DialectName, int] = {
    "chat": 32_000_000,
    "responses": 32_000_000,
    "anthropic": 23_000_000,
    "gemini": 32_000_000,
}
"""Most bytes of files in a request, which base64 makes a third longer.

A request may have 32 MB at Anthropic (platform.claude.com/docs/en/api/overview), 50 MB at OpenAI
(developers.openai.com/api/docs/guides/pdf-files), 100 MB at Google (ai.google.dev/gemini-api/docs/
file-input-methods).
"""

_TEXTS = re.compile(r"text/|application/(json|xml|yaml|x-ndjson|toml)\b|.*\+(json|xml)\b")


class MissingFilesError(Exception):
    """A message holds stored files that are not loaded yet."""


@dataclass(frozen=True, slots=True)
class Media:
    """A part that is not text, with its content or its address.

    Attributes:
        data: the content in base64.
        media_type: empty if it is not known, which only a part with a URL may be.
    """

    type: str
    media_type: str
    data: str | None = None
    url: str | None = None
    name: str | None = None

    @property
    def data_url(self) -> str:
        """The content as a URL, or its address."""
        return self.url or f"data:{self.media_type};base64,{self.data}"


WritePart = Callable[[Media], dict[str, Any] | None]
"""Returns the block for a part; ``None``: the dialect has none."""

WriteText = Callable[[str], dict[str, Any]]


def blocks_of(
    parts: Iterable[Part], files: Files, dialect: DialectName, text: WriteText, media: WritePart
) -> list[dict[str, Any]]:
    """Return the blocks of parts, in order.

    Raises:
        InvalidInputError: ``unsupported_part``.
        MissingFilesError: ``files`` lacks a file.
    """
    blocks = []
    for part in parts:
        if part.text is not None:
            if part.text.strip():
                blocks.append(text(part.text))
            continue
        found = loaded(part, files)
        if isinstance(found, str):
            blocks.append(text(found))
            continue
        block = media(found)
        if block is None:
            raise InvalidInputError(
                f"the dialect {dialect} takes no part '{part.type}' "
                f"({found.media_type or 'of unknown type'}, by {'url' if found.url else 'data'})",
                code="unsupported_part",
            )
        blocks.append(block)
    return blocks


def encoded_blocks(blocks: Iterable[dict[str, Any]]) -> Blocks:
    return Blocks(b",".join([encode_json(block) for block in blocks]))


async def load_files(
    messages: Iterable[StandardMessage], load: FileLoader | None, dialect: DialectName
) -> Files:
    """Load the stored files that messages hold.

    Raises:
        InvalidInputError: ``unknown_file``, or ``files_too_large``.
    """
    wanted = {part.file: None for message in messages for part in _parts(message) if part.file}
    if load is None:
        raise InvalidInputError("there are no stored files here", code="unknown_file")
    found: dict[str, FileContent] = {}
    size = 0
    for name in wanted:
        content = found[name] = await load(name)
        size += len(content.data)
        if size > _LARGEST[dialect]:
            raise InvalidInputError(
                f"the files of a request of the dialect {dialect} must not exceed "
                f"{_LARGEST[dialect] // 10**6} MB together",
                code="files_too_large",
            )
    return found


def size_as_text(size: int, messages: Iterable[StandardMessage], files: Files) -> int:
    """Return the bytes of a text that has as many tokens as a request.

    Args:
        size: of the request in bytes, with its media in base64.
    """
    for message in messages:
        for part in _parts(message):
            media = part.text or loaded(part, files)
            if isinstance(media, Media) and media.data is not None:
                size += part.tokens * BYTES_PER_TOKEN - len(media.data)
    return size


def _parts(message: StandardMessage) -> Iterable[Part]:
    yield from message.parts
    if isinstance(message, ToolMessage):
        for result in message.tool_results:
            yield from result.parts


def loaded(part: Part, files: Files) -> Media | str:
    """Return a part's content; text if it is a file of text."""
    media_type, data, name = part.media_type or "", part.data, part.name
    if part.file is not None:
        content = files.get(part.file)
        if content is None:
            raise MissingFilesError
        data, media_type = content.data, content.media_type
        name = name or content.name
    if data is None:
        return Media(part.type, media_type, url=part.url, name=name)
    kind = media_type.partition(";")[0].strip().lower()
    if part.type in ("document", "file") and _TEXTS.match(kind):
        text = data.decode("utf-8", "replace")
        return f"{name}:\n{text}" if name else text or "(empty)"
    return Media(part.type, kind, data=b64encode(data).decode(), name=name)
