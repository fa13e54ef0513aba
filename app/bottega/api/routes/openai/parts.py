"""Content of messages in OpenAI's API, of chat completions and responses alike. Pure."""

import json
import mimetypes
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from bottega.errors import InvalidInputError

Content = str | list[dict[str, Any]]
"""A text, or parts as a run's input has them."""
_TEXTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_MEDIA_TYPE = re.compile(r"[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,100}")
_BLANK = re.compile(r"\s")
_UNKNOWN = "application/octet-stream"


def content_of(content: Any, place: str, *, is_history: bool) -> tuple[Content, list[str]]:
    """Return a message's content, and the places of its parts if it is not a text.

    Args:
        place: JSON Pointer to the content.
        is_history: what is unknown is kept as text, since only the user's words are a question.

    Raises:
        InvalidInputError: it is no content, or has a part that no run can honour.
    """
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise InvalidInputError("the content is a text or a list of parts", pointer=place)
    found = []
    for number, part in enumerate(content):
        at = f"{place}/{number}"
        if part is not None and (made := _part(part, at, is_history)) is not None:
            found.append((made, at))
    parts = [part for part, _ in found]
    if all(part["type"] == "text" for part in parts):
        return text_of(parts), []
    return parts, [at for _, at in found]


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of parts as one."""
    return "\n".join(str(part["text"]) for part in parts if part["type"] == "text")


def _part(part: Any, place: str, is_history: bool) -> dict[str, Any] | None:
    """Return a part as a run's input has it; ``None``: it says nothing."""
    match part:
        case str(text) | {"type": "refusal", "refusal": str(text)}:
            return _text(text)
        case {"type": str(kind), "text": text} if kind in _TEXTS and isinstance(text, str | None):
            return _text(text or "")
        case {"type": "image_url" | "input_image", "image_url": str(url) | {"url": str(url)}}:
            return {"type": "image", **source_of(url, place)}
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(kind)}}:
            made = source_of(data, place) if data.startswith("data:") else {"data": data}
            return {"type": "audio", "media_type": f"audio/{kind}"} | made
        case {"type": "file" | "input_file", **more}:
            return _file(more.get("file") or more, place)
        case {"type": "input_image", "file_id": str(file)}:
            return {"type": "file", "file": file}
    if is_history:
        return _text(json.dumps(part, ensure_ascii=False))
    raise InvalidInputError(
        "takes parts with a text, an image, an audio or a file, by data, address or id",
        pointer=place,
    )


def _text(text: str) -> dict[str, Any] | None:
    return {"type": "text", "text": text} if text else None


def _file(file: Any, place: str) -> dict[str, Any]:
    match file:
        case {"file_id": str(known)}:
            return {"type": "file", "file": known}
        case {"file_data": str(source)} | {"file_url": str(source)}:
            name = file.get("filename") or None
            if not re.match(r"data:|https?://", source, re.IGNORECASE):
                kind = mimetypes.guess_type(name or "")[0] or _UNKNOWN
                made = {"media_type": kind, "data": source}
            else:
                made = source_of(source, place)
            return {"type": "document", **made, **({"name": name} if name else {})}
    raise InvalidInputError("a file has file_data, file_url or file_id", pointer=place)


def source_of(url: str, place: str) -> dict[str, str]:
    """Return where a part comes from: the data of a data URL (RFC 2397), or an address.

    Raises:
        InvalidInputError: a data URL without a comma, or with a media type that is none.
    """
    if url[:5].lower() != "data:":
        return {"url": url}
    head, comma, data = url[5:].partition(",")
    media_type, *options = (option.strip().lower() for option in head.split(";"))
    media_type = media_type or "text/plain"
    if not comma or not _MEDIA_TYPE.fullmatch(media_type):
        raise InvalidInputError(
            "a data URL is data:TYPE;base64,DATA, with a media type such as image/png",
            pointer=place,
        )
    if "base64" not in options:
        return {"media_type": media_type, "data": b64encode(unquote_to_bytes(data)).decode()}
    if "%" in data:
        data = unquote_to_bytes(data).decode("latin-1")
    return {"media_type": media_type, "data": _padded(data)}


def _padded(data: str) -> str:
    """Return base64 as it is, or with the blanks and the padding that senders get wrong mended."""
    if len(data) % 4 == 0 and not _BLANK.search(data):
        return data
    data = _BLANK.sub("", data).rstrip("=")
    return data + "=" * (-len(data) % 4)
