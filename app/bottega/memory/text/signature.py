"""Failure signatures, which are equal for errors of the same kind.

Errors of the same kind differ in numbers, ids, paths, hosts and long quoted texts. A placeholder
replaces each of these details, so the signatures are equal. A signature keeps the details that
distinguish kinds of errors: the type, the tool, the status and short quoted names, such as a code.
"""

import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from json import JSONDecoder
from typing import Any

LONGEST_SIGNATURE = 200
_LONGEST_MESSAGE = 4000

NUMBER = "#"
"""Placeholder for numbers, dates, durations and ids (words with a digit, and hexadecimal words)."""

_UNITS = (  # noqa: SIM905 (a list has a line per word)
    "ms msec millisecond milliseconds s sec secs second seconds m min mins minute minutes h hr hrs "
    "hour hours d day days millisecondi secondo secondi minuto minuti ora ore giorno giorni"
).split()
# Matches a text in quotes; an apostrophe within a word is not a quote. A match ends at the next
# quote of the same kind, so no text is scanned twice.
_QUOTED = re.compile(
    r"(?<!\w)'[^']*'(?!\w)"
    r'|"[^"]*"|`[^`]*`|«[^«»]*»'
    "|\u201c[^\u201c\u201d]*\u201d|\u2018[^\u2018\u2019]*\u2019(?!\\w)"
)
_URL = re.compile(r"(?<!\w)\w{1,12}://[^\s<>]*")
_TOKEN = re.compile(r"(?:[\w./\\:@~+%$€£&?*^#-]|(?<=\d),(?=\d))+|<text>|<url>")
_CLOCK = re.compile(r"[\d.:tz+-]*\d[\d.:tz+-]*")
_ADDRESS = re.compile(r"[0-9a-f:.%]*::[0-9a-f:.%]*|(?:[0-9a-f]+:){7}[0-9a-f.%]+")
_QUAD = re.compile(r"\d+(?:\.\d+){3}(?::\d+)?")
_DOTTED = re.compile(r"\w[\w-]*(?:\.[\w-]+)+(?::\d+)?")
_HEX = re.compile("[0-9a-f]{8,}")
_MANY = re.compile(r"#(?:[\s,]+#)+")
_STATUS = re.compile(r"\b(?:http|status(?:[ _]code)?|answered)[ :=/]{1,3}([1-5]\d\d)\b", re.I)
_JSON = JSONDecoder()
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def failure_signature(
    error_type: str, message: str, tool: str | None = None, status: int | None = None
) -> str:
    """Return the signature of a failure, such as ``timeout_error @fetch: no answer in #``.

    Messages that differ only in numbers, ids, dates, durations, paths, hosts or long quoted texts
    have equal signatures. If a message contains JSON, the signature uses only keys and short texts
    of the JSON. The function reads at most 4,000 characters of the message, in linear time.

    Args:
        error_type: a class's name (dotted or not), or a code.
        tool: the tool that failed; ``None``: no tool.
        status: HTTP status; by default the status that the message contains, if any.

    Returns:
        The signature: 1 to 200 printable characters in lower case.
    """
    kind = _named(error_type) or "error"
    message = _plain(message[:_LONGEST_MESSAGE])
    if status is None and (match := _STATUS.search(message)):
        status = int(match[1])
    shape = _with_json(message)
    for name in (kind, kind.replace("_", "")):  # many messages begin with the error's type
        shape = shape.removeprefix(f"{name}: ")
    head = kind if status is None else f"{kind} {status}"
    if tool and (where := _named(tool, split=False)):
        head += f" @{where}"
    return f"{head}: {shape}"[:LONGEST_SIGNATURE].rstrip(" :")


def _named(name: str, *, split: bool = True) -> str:
    name = _plain(name[:_LONGEST_MESSAGE])
    if split:
        name = _HUMP.sub("_", name.rsplit(".", 1)[-1])
    return "_".join(name.casefold().split())[:60]


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)[:_LONGEST_MESSAGE]
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _with_json(message: str) -> str:
    """Reduce the JSON object in a message to the object's keys and short texts."""
    start = message.find("{")
    body, end = None, 0
    if start >= 0:
        with suppress(ValueError, RecursionError):
            body, end = _JSON.raw_decode(message, start)
    if not body:  # ``{}`` may be a part of a quoted text
        return _shape(message)
    parts = _shape(message[:start]), ", ".join(_reduced(body)), _shape(message[end:])
    return " ".join(part.strip() for part in parts if part.strip())


def _reduced(value: Any, name: str = "", depth: int = 0) -> Iterator[str]:
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, dict) and depth < 3:
        for key in sorted(value)[:12]:
            yield from _reduced(value[key], _shape(key), depth + 1)
    elif isinstance(value, str):
        yield f"{name}={_quote(value) or '<text>'}"
    elif name in ("status", "code", "status_code") and value in range(100, 600):
        yield f"{name}={value}"
    else:
        yield name


def _quote(text: str) -> str | None:
    """Return a short quoted text; ``None``: the text is long, or an id, number, path or time."""
    text = text.strip().casefold()
    if not 0 < len(text) <= 40 or _shape(text) != text:
        return None
    return text if any(each.isalpha() for each in text) else None


def _quoted(match: re.Match[str]) -> str:
    text = match[0]
    quote = None if _QUOTED.search(text, 1, len(text) - 1) else _quote(text[1:-1])
    return f"'{quote}'" if quote else "<text>"


def _shape(message: str) -> str:
    text = _QUOTED.sub(_quoted, message).casefold()
    text = _URL.sub("<url>", text)
    parts: list[str] = []
    end, timed = 0, False
    for match in _TOKEN.finditer(text):
        between, token = text[end : match.start()], match.group()
        end = match.end()
        bare = token.rstrip(".:?")
        if timed and between == " " and bare in _UNITS:  # equal signatures for 30 s, 30s and 30
            parts.append(token[len(bare) :])
            timed = False
            continue
        parts += [between, _placeholder(bare), token[len(bare) :]]
        timed = parts[-2] == NUMBER and token == bare
    return _MANY.sub(NUMBER, "".join([*parts, text[end:]]))


def _placeholder(word: str) -> str:
    if word in ("<text>", "<url>"):
        return word
    if ("/" in word or "\\" in word) and len(word) > 1:
        return "<path>"
    if word == "localhost" or "@" in word or _ADDRESS.fullmatch(word) or _QUAD.fullmatch(word):
        return "<name>"
    if _CLOCK.fullmatch(word):
        return NUMBER
    if _DOTTED.fullmatch(word) and not word[0].isdigit():
        return "<name>"
    if ":" in word:
        return ":".join(map(_placeholder, word.split(":")))
    if any(each.isdigit() for each in word) or _HEX.fullmatch(word):
        return NUMBER
    return word
