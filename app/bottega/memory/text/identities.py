"""Removal of ids and server addresses from texts of earlier runs, before a model reads them.

An id of an earlier run has no meaning in a later run. A model that uses an earlier run's task or
server does harm or loses time. Events keep the ids.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import from_json, to_json

from bottega.memory.text.summaries import EARLIER, GAP, cut

ID, SERVER = "<id>", "<server>"
"""Texts that replace an id, and the address of a server."""

_IDENTITY = re.compile(
    r"""
    (?P<id>
        [0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}  # a UUID
      | (?<![0-9a-z])(?:[a-z]{1,16}[_-]){0,3}[0-9a-f]{32,}(?![0-9a-z])  # no dashes
      | (?<![0-9a-z])(?:call|chatcmpl|file|fc|msg|req|resp|run|task|toolu)[_-]
        (?=[a-z]*[0-9])[0-9a-z]{12,}(?![0-9a-z])  # of a model's API
      | (?<![0-9a-z])[0-9a-f]{8}(?:-[0-9a-f]{0,12}){0,4}…  # the beginning of a UUID
    )
    | (?<![a-z0-9])[a-z][a-z0-9+.-]{0,20}://[^\s/?\#"'`<>…)\]}\\]+(?:\][:0-9]*)?  # of a URL
    | (?<![\w:.])\[?(?=[a-f:]{0,45}\d)
        (?:[0-9a-f:]{0,45}::[0-9a-f:.]{0,45}|(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4})
        (?:%\w+)?(?:\](?::\d{1,5})?)?(?![\w:])  # IPv6
    | (?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?!\w|\.\d)  # IPv4
    | (?<![\w@.-])localhost(?![\w-])(?::\d{1,5})?
    | (?<![\w@.-])(?:[a-z0-9][a-z0-9-]{0,62}\.){1,8}(?:
        (?!(?:c|cpp|css|go|h|html|java|js|json|md|py|rb|rs|sh|sql|toml|ts|txt|ya?ml):)
        [a-z][a-z0-9-]*:\d{2,5}(?![\w:])  # a host and its port, no line of a file
      | (?:internal|intranet|invalid|lan|local|svc|test)(?![\w-]|\.\w))
    """,
    re.IGNORECASE | re.VERBOSE,
)
_NOTHING_ELSE = re.compile(rf"(?:{ID}|[\s,;:\[\]\"'…])*")


def without_identities(text: str) -> str:
    """Replace each id by ``<id>`` and each address of a server by ``<server>``."""
    return _IDENTITY.sub(lambda match: ID if match["id"] else SERVER, text)


def told_line(value: Any, most: int) -> str:
    """Return a value as one line of text without ids and addresses, at most ``most`` bytes long."""
    return cut(without_identities(" ".join(str(value).split())), most)


def told_arguments(arguments: Any, most: int) -> str:
    """Return a call's arguments as names with short values, such as ``bill=7, year="last"``.

    The result omits arguments that are only ids.

    Args:
        arguments: an object, or the object's JSON text, whose end may be missing.
    """
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if not isinstance(arguments, Mapping):
        return told_line(arguments or "", most)
    lines: list[str] = []
    for name, value in arguments.items():
        text = told_line(to_json(value, serialize_unknown=True).decode(), 72)
        if ID not in text or not _NOTHING_ELSE.fullmatch(text):
            lines.append(f"{name}={text}")
    return told_line(", ".join(lines), most)


def of_earlier_run(lines: Iterable[str]) -> list[str]:
    """Mark each line as a line of an earlier run; remove ids and server addresses."""
    texts = (without_identities(line).strip() for line in lines)
    return [f"{EARLIER}: {line}" for line in texts if line]


def _decoded(text: str) -> Any:
    try:
        return from_json(text.removesuffix(GAP), allow_partial="trailing-strings")
    except ValueError:
        return text
