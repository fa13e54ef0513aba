"""``If-Match`` and ``If-None-Match``, with versions as entity tags (RFC 9110, 13.1)."""

import re

from bottega.errors import VersionConflictError

_TAG = re.compile(r'"(\d{1,9})"')


def if_match_version(header: str | None) -> int | None:
    """Return the version in ``If-Match``, or ``None`` if any version will do.

    Raises:
        VersionConflictError: the header is no ETag of this API, so it matches no version.
    """
    if header is None or header.strip() == "*":
        return None
    match = _TAG.fullmatch(header.strip())
    if match is None:
        raise VersionConflictError(
            'If-Match takes one ETag as it was answered, such as "3", or *; this matches nothing'
        )
    return int(match.group(1))


def is_only_new(if_none_match: str | None) -> bool:
    """Return true if ``If-None-Match`` asks for a new resource.

    Raises:
        VersionConflictError: the header is not ``*``.
    """
    if if_none_match is None:
        return False
    if if_none_match.strip() != "*":
        raise VersionConflictError("If-None-Match takes only *: store it if the name is new")
    return True
