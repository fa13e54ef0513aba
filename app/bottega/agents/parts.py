"""Parts of messages: texts, images, audio, documents and other files."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast, get_args

from pydantic import ConfigDict

from bottega.errors import InvalidInputError
from bottega.events.data import ContentPart, PartType

BYTES_PER_TOKEN = 4


def tokens_in(size: int) -> int:
    """Estimate the tokens of ``size`` bytes of UTF-8, rounded up."""
    return -(-size // BYTES_PER_TOKEN)


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text, at 4 bytes of UTF-8 each, rounded up."""
    return tokens_in(size_of(text))


def size_of(text: str) -> int:
    """Count the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


_SOURCES = ("text", "url", "data", "file")
_TOKENS_OF_URL = {"image": 1600, "audio": 2000, "document": 20_000, "file": 20_000}
"""Estimates for a URL, whose content is unknown: a large image, a minute of speech, ten pages."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message's content; exactly one of text, URL, data or file is set.

    Attributes:
        text: the text of a part of the type ``text``.
        url: address that the model's server fetches.
        data: the bytes of the content; needs ``media_type``.
        file: id of a stored file; :attr:`ModelOptions.files` loads it.
        media_type: type of the content, such as ``image/png``; optional with ``url`` and ``file``.
        name: file name, for the model.
        size_tokens: estimate of the part's tokens in a prompt, computed when the file was stored.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64"
    )

    type: PartType
    text: str | None = None
    url: str | None = None
    data: bytes | None = None
    file: str | None = None
    media_type: str | None = None
    name: str | None = None
    size_tokens: int | None = None

    def __post_init__(self) -> None:
        sources = [name for name in _SOURCES if getattr(self, name) is not None]
        if self.type not in get_args(PartType):
            raise InvalidInputError(f"there is no part of the type '{self.type}'", pointer="/type")
        if len(sources) != 1:
            raise InvalidInputError(
                f"a part needs exactly one of {', '.join(_SOURCES)}, found {len(sources)}"
            )
        if (self.type == "text") != (sources == ["text"]):
            raise InvalidInputError(
                "a part of the type 'text' must have a text; other parts must not",
                pointer=f"/{sources[0]}",
            )
        if self.data is not None and self.media_type is None:
            raise InvalidInputError("data needs its media_type", pointer="/media_type")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)

    def to_dict(self) -> ContentPart:
        """Return the fields that are set. All values except ``data`` are JSON values."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        values = {name: value for name, value in fields.items() if value is not None}
        return cast("ContentPart", values)

    @property
    def tokens(self) -> int:
        """Estimate of the part's tokens in a prompt; see :func:`content_tokens`."""
        if self.text is not None:
            return estimated_tokens(self.text)
        if self.size_tokens is not None:
            return self.size_tokens
        if self.data is not None and self.media_type is not None:
            return content_tokens(self.media_type, len(self.data))
        return _TOKENS_OF_URL[self.type]


def text_of(parts: Iterable[Part]) -> str:
    return "\n".join(part.text for part in parts if part.text is not None)


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of stored content, or the parts' types in brackets if there is no text."""
    if isinstance(content, str):
        return content
    said = [part["text"] for part in content if part["type"] == "text"]
    return "\n".join(said) or f"[{', '.join(part['type'] for part in content)}]"


def parts_tokens(parts: Sequence[Part]) -> int:
    """Estimate how many tokens all parts that are not text need in a prompt."""
    return sum(part.tokens for part in parts if part.text is None)


@dataclass(frozen=True, slots=True)
class FileContent:
    data: bytes
    media_type: str
    name: str | None = None


FileLoader = Callable[[str], Awaitable[FileContent]]
"""Function that loads a file by id.

Raises:
    InvalidInputError: ``unknown_file``: there is no such file, or it was deleted.
    UnavailableError: the file store does not answer.
"""

MOST_FILE_TOKENS = 10_000_000
"""Limit for estimated or reported tokens, because a file or a server may claim any number."""


def content_tokens(
    media_type: str, size: int, *, pixels: int | None = None, pages: int | None = None
) -> int:
    """Estimate how many tokens a file needs in a prompt.

    For each kind of file, the estimate follows the published rule that gives the most tokens:

    - image: 1 token per 750 pixels, 85 to 1600 tokens (Anthropic; OpenAI and Gemini count less);
    - PDF: 2000 tokens per page, as text and image; 1 page per 50 KB if ``pages`` is unknown;
    - audio: 32 tokens per second (Gemini), at 16 KB per second;
    - video: 263 tokens per second (Gemini), at 256 KB per second;
    - other files: 1 token per 4 bytes, like text.

    The estimate is at most :data:`MOST_FILE_TOKENS`.
    """
    return min(MOST_FILE_TOKENS, _content_tokens(media_type, size, pixels, pages))


def _content_tokens(media_type: str, size: int, pixels: int | None, pages: int | None) -> int:
    kind = media_type.partition("/")[0]
    if kind == "image":
        return 1600 if pixels is None else max(85, min(1600, -(-pixels // 750)))
    if media_type == "application/pdf":
        return 2000 * (pages or -(-size // 50_000))
    bytes_per_token = {"audio": 500, "video": 1000}.get(kind, BYTES_PER_TOKEN)
    return -(-size // bytes_per_token)
