"""The form in which models read HTTP answers. Pure."""

import codecs
import json
import re
from typing import Any

import httpx2

from bottega.agents.parts import Part, PartType
from bottega.json_schema.values import depth_of
from bottega.outside import OutsideError, check_json
from bottega.tools.egress import EgressRefusedError, Reply, checked_url
from bottega.tools.media import HEAD_BYTES, media_type_of

MAX_DEPTH = 64
_EXCERPT = 1000
_LONGEST_TYPE = 200

_CHARSET = re.compile(r"charset\s*=\s*[\"']?([A-Za-z0-9._:-]{1,40})", re.IGNORECASE)
# Python knows more codecs, but some are very slow and some do not decode to text.
_TEXT_CODECS = re.compile(
    r"utf-(8|16|32)(-[bl]e)?|ascii|iso8859-\d+|cp\d+|koi8-[ru]|shift_jis|euc_(jp|kr)|gb\w+|big5"
)
_KINDS: dict[str, PartType] = {
    "image": "image",
    "audio": "audio",
    "application/pdf": "document",
}
_SVG = "image/svg+xml"
"""Text, which no model's server takes as an image."""
_TEXT_TYPES = re.compile(r"text/.*|.*[/+](json|xml|javascript|yaml|x-www-form-urlencoded)")


def content_type(reply: Reply) -> str:
    """Return the header's value, cut to 200 characters; empty without the header."""
    return reply.headers.get("content-type", "")[:_LONGEST_TYPE]


def _media_type(reply: Reply) -> str:
    return content_type(reply).partition(";")[0].strip().lower()


def text_of(reply: Reply) -> str | None:
    """Decode the body as text; ``None`` if it is not text."""
    claims_text = _TEXT_TYPES.fullmatch(_media_type(reply)) is not None
    codec = _codec(content_type(reply))
    errors = "replace" if claims_text or codec else "strict"
    decoder = codecs.getincrementaldecoder(codec or "utf-8")(errors)
    try:
        text = decoder.decode(reply.body, final=not reply.truncated)
    except UnicodeDecodeError:
        return None
    if "\x00" in text and not claims_text:
        return None
    return text.removeprefix("\ufeff")


def _codec(header: str) -> str | None:
    if found := _CHARSET.search(header):
        try:
            name = codecs.lookup(found[1]).name
        except LookupError:
            return None
        if _TEXT_CODECS.fullmatch(name):
            return name
    return None


def body_of(reply: Reply) -> Any:
    """Decode the body: declared JSON, else text; ``None`` if it is empty or not text."""
    text = text_of(reply)
    if not text:
        return None
    media_type = _media_type(reply)
    if media_type == "application/json" or media_type.endswith("+json"):
        return _decoded(text)
    return text


def _decoded(text: str) -> Any:
    try:
        check_json(text)
        value = json.loads(text, parse_constant=lambda _: None)
    except (OutsideError, ValueError, RecursionError):
        return text
    return value if depth_of(value) <= MAX_DEPTH else text


def media_of(reply: Reply) -> Part | None:
    """Return the body as a part if its bytes are an image, audio or a PDF, and whole."""
    media_type = media_type_of(reply.body[:HEAD_BYTES])
    kind = _KINDS.get(media_type) or _KINDS.get(media_type.partition("/")[0])
    if kind is None or reply.truncated or media_type == _SVG:
        return None
    return Part(kind, data=reply.body, media_type=media_type)


def failure_of(reply: Reply) -> str | None:
    """Return the error text of a status, without the body; ``None`` for a success."""
    if 200 <= reply.status < 300:
        return None
    said = f"the server answered {reply.status} {httpx2.codes.get_reason_phrase(reply.status)}"
    wait = reply.headers.get("retry-after", "")
    if wait.isdecimal() and len(wait) < 8:
        said += f" and asks to wait {wait} s"
    return said.rstrip()


def excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


def is_redirect(reply: Reply) -> bool:
    return 300 <= reply.status < 400 and "location" in reply.headers


def redirect_target(reply: Reply, url: str) -> httpx2.URL | None:
    """Return a redirect's target without user, password and fragment; ``None`` if invalid."""
    try:
        target = httpx2.URL(url).join(reply.headers["location"]).copy_with(userinfo=b"")
        return checked_url(str(target))
    except (httpx2.InvalidURL, EgressRefusedError):
        return None
