"""Summaries of texts, which need no model, because a summary consists of pieces of its text.

The pieces of a summary are unchanged and in the order of the text. The summary contains the first
and the last piece, then as many lines as fit: lines about errors before lines with numbers or
identifiers, and early lines before later lines. Equal texts have equal summaries, so a resumed run
has the same prompts.
"""

import re
from collections.abc import Callable, Iterator

from bottega.agents.parts import BYTES_PER_TOKEN, estimated_tokens, size_of

TokenCounter = Callable[[str], int]
"""Function that returns a text's number of tokens: at least 0, and not lower for a longer text."""

MAX_READ = 32_768
"""Maximum number of characters that are read of a text, half from each end."""

EARLIER = "earlier run"
"""Beginning of each prompt line from another run. Such a line is never split."""
GAP = "…"
_GAP_BYTES = len(GAP.encode())
_JOINT_BYTES = _GAP_BYTES + 2  # maximum number of bytes between two pieces: line end, gap, line end
_PIECE = 200
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_ERROR_WORDS = (  # noqa: SIM905 (a list has a line per word)
    "error|exception|traceback|fail|fatal|denied|refused|timeout|timed out|invalid|missing|"
    "not found|cannot|unable|abort|warning"
).split("|")
_SPECIFIC = re.compile(r"\d|[a-z][A-Z]|\w[_/\\@#]\w|[\"'`]\w")  # numbers, identifiers, names


def summary_of(
    text: str, tokens: int, count: TokenCounter = estimated_tokens, *, whole_lines: bool = False
) -> str:
    """Return the text, or a summary if the text has more than ``tokens`` tokens.

    The function reads at most :data:`MAX_READ` characters, half of them from each end of the text.

    Args:
        whole_lines: true: shorten no line except the first and the last line.
    """
    if count(text) <= tokens:
        return text
    half = min(max(tokens * 48, 2_048), MAX_READ) // 2
    sample = text if len(text) <= 2 * half else f"{text[:half]}\n{_end_of(text, half)}"
    pieces = _pieces(sample, whole_lines)
    room = tokens * BYTES_PER_TOKEN
    while room > 0:
        summary = _extract(pieces, room)
        if (tokens_used := count(summary)) <= tokens:
            return summary
        room = min(room * tokens // tokens_used, room - 1)
    return ""


def cut(text: str, room: int) -> str:
    """Cut a text to at most ``room`` bytes of UTF-8; an ellipsis marks the cut."""
    if size_of(text) <= room:
        return text
    if room < _GAP_BYTES:
        return ""
    head = text[:room].encode("utf-8", "surrogatepass")[: room - _GAP_BYTES]
    return head.decode("utf-8", "ignore").rstrip() + GAP


def _pieces(text: str, whole_lines: bool) -> list[str]:
    pieces = dict.fromkeys(
        part.strip()
        for line in text.splitlines()
        for part in ([line] if whole_lines or _is_whole(line) else _parts(line))
    )
    return [*filter(None, pieces)]


def _end_of(text: str, length: int) -> str:
    end = text[-length:]
    return end.partition("\n")[2] or end


def _is_whole(line: str) -> bool:
    return len(line) <= _PIECE or line.lstrip().startswith(EARLIER)


def _parts(line: str) -> Iterator[str]:
    for sentence in _SENTENCE_END.split(line):
        start = 0
        while len(sentence) - start > _PIECE:
            most = start + _PIECE
            end = 1 + max(sentence.rfind(mark, start, most) for mark in ", ;}])")
            yield sentence[start : end or most]
            start = end or most
        yield sentence[start:]


def _extract(pieces: list[str], room: int) -> str:
    if not pieces:
        return ""
    last = len(pieces) - 1
    parts = {0: cut(pieces[0], room // 2 if last else room)}
    bytes_left = room - size_of(parts[0])
    if last and (end := cut(pieces[last], bytes_left // 2 - _JOINT_BYTES)):
        parts[last] = end
        bytes_left -= size_of(end) + _JOINT_BYTES
    weights = _weights(pieces)
    for index in sorted(range(1, last), key=weights.__getitem__, reverse=True):
        if bytes_left < 20:
            break
        size = size_of(pieces[index]) + _JOINT_BYTES
        if size <= bytes_left:
            parts[index] = pieces[index]
            bytes_left -= size
    lines: list[str] = []
    before = 0
    for index in sorted(parts):
        if index > before + 1:
            lines.append(GAP)
        lines.append(parts[index])
        before = index
    return "\n".join(lines)


def _weights(pieces: list[str]) -> list[int]:
    weights = [1 if _SPECIFIC.search(piece) else 0 for piece in pieces]
    whole = "\n".join(pieces).lower()
    if errors := [word for word in _ERROR_WORDS if word in whole]:  # often empty
        for index, piece in enumerate(pieces):
            lower = piece.lower()
            if any(word in lower for word in errors):
                weights[index] += 2
    return weights
