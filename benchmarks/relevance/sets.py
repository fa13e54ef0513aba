"""The sets that judge relevance, in text files beside this one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent


class Pair(NamedTuple):
    """A stored task, and later tasks (``pairs.txt``)."""

    language: str
    task: str
    related: str
    paraphrase: str
    unrelated: str


class Request(NamedTuple):
    """A stored request to a customer service, and later ones (``support.txt``)."""

    language: str
    task: str
    answer: str
    related: str  # repeats two content words
    paraphrase: str


class Chat(NamedTuple):
    """A short message about nothing that is stored (``chats.txt``)."""

    language: str
    text: str


def pairs() -> list[Pair]:
    return [Pair(*line) for line in _lines("pairs.txt")]


def requests() -> list[Request]:
    return [Request(*line) for line in _lines("support.txt")]


def chats() -> list[Chat]:
    return [Chat(*line) for line in _lines("chats.txt")]


def _lines(name: str) -> Iterator[Sequence[str]]:
    """Yield the language and the fields of each line."""
    language = ""
    for line in (_HERE / name).read_text("utf-8").splitlines():
        if line.startswith("["):
            language = line[1:-1]
        elif line and not line.startswith("#"):
            yield language, *line.split(" | ")
