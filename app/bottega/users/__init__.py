"""End users of tenants: their names, exports and erasures."""

import unicodedata

_UNSEEN = frozenset(("Cc", "Cf", "Zl", "Zp", "Zs"))


def names_nobody(name: str) -> bool:
    """Return true for a name of spaces, controls and format characters alone, or of nothing."""
    return all(unicodedata.category(each) in _UNSEEN for each in name)
