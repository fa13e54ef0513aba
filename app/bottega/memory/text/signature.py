"""Failure signatures: equal for errors of the same kind. Pure.

Errors of one kind differ in details (numbers, ids, paths, hosts, quoted texts). A placeholder
replaces each of these, so that the remaining texts are equal.
"""

import re
import unicodedata

LONGEST_SIGNATURE = 200
_LONGEST_MESSAGE = 4000
_LONGEST_NAME = 60

NUMBER = "#"
"""Placeholder of numbers, dates, durations and ids: words with a digit, or hexadecimal ones."""

_UNITS = frozenset(
    re.findall(
        r"\w+",
        """
    ms msec millisecond milliseconds s sec secs second seconds m min mins minute minutes h hr hrs
    hour hours d day days millisecondi secondo secondi minuto minuti ora ore giorno giorni
    """,
    )
)
# Quotes around a text, but no apostrophe within a word. Each match ends at the next quote of its
# kind, opening or closing, so that nothing is scanned twice.
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
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def failure_signature(error_type: str, message: str, tool: str | None = None) -> str:
    """Return the signature of a failure, such as ``timeout_error @fetch: no answer in #``.

    Messages that differ only in numbers, ids, dates, durations, paths, hosts or quoted texts have
    the same one. Linear in the message's length, of which 4,000 characters count.

    Args:
        error_type: a class's name (dotted or not), or a code.
        tool: the tool that failed, if one did.

    Returns:
        at most 200 characters, printable, in lower case, never empty.
    """
    kind = _named(error_type) or "error"
    shape = _shape(message)
    for name in (kind, kind.replace("_", "")):  # many messages begin with it
        shape = shape.removeprefix(f"{name}: ")
    head = f"{kind} @{where}" if tool and (where := _named(tool, split=False)) else kind
    return f"{head}: {shape}"[:LONGEST_SIGNATURE].rstrip(" :")


def _named(name: str, *, split: bool = True) -> str:
    name = _plain(name[:_LONGEST_MESSAGE])
    if split:
        name = _HUMP.sub("_", name.rsplit(".", 1)[-1])
    return "_".join(name.casefold().split())[:_LONGEST_NAME]


def _plain(text: str) -> str:
    """Normalise characters, and replace those that are not printable by spaces."""
    text = unicodedata.normalize("NFKC", text)[:_LONGEST_MESSAGE]
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _shape(message: str) -> str:
    text = _QUOTED.sub("<text>", _plain(message[:_LONGEST_MESSAGE])).casefold()
    text = _URL.sub("<url>", text)
    parts: list[str] = []
    end, timed = 0, False
    for found in _TOKEN.finditer(text):
        between, token = text[end : found.start()], found.group()
        end = found.end()
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
