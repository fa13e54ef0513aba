"""Estimates of the number of tokens in a text."""

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
