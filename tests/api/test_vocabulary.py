"""Words of the service are no secrets: its documents, types and log lines name them."""

import ast
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import bottega
from bottega import redaction
from bottega.agents.messages import AssistantMessage, SystemMessage
from bottega.container import open_service
from bottega.errors import UnavailableError
from bottega.redaction import SHORTEST, is_word
from bottega.settings import Settings
from tests.service import Running, running


def names_in(document: Any) -> Iterator[str]:
    """Yield the names of fields, and the words that fields may have."""
    if isinstance(document, dict):
        yield from document.get("properties", {})
        yield from (each for each in document.get("enum", ()) if isinstance(each, str))
        if isinstance(word := document.get("const"), str):
            yield word
        for each in document.values():
            yield from names_in(each)
    elif isinstance(document, list):
        for each in document:
            yield from names_in(each)


def logged() -> Iterator[str]:
    """Yield the events and fields of log lines in the code."""
    for path in Path(bottega.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in ("info", "warning", "error", "exception", "debug", "bind"):
                yield from (each.arg for each in node.keywords if each.arg)
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield str(node.args[0].value)


def enums(of: type[Enum] = Enum) -> Iterator[str]:
    for each in of.__subclasses__():
        if each.__module__.startswith("bottega"):
            yield from (one.value for one in each if isinstance(one.value, str))
        yield from enums(each)


async def test_each_word_of_answers_events_and_log_lines_is_known(shared: Running) -> None:
    for path in ("/openapi.json", "/asyncapi.json"):
        document = (await shared.client.get(path)).json()
        assert [each for each in names_in(document) if unknown(each)] == [], path
    roles = [each.model_fields["role"].default for each in (AssistantMessage, SystemMessage)]
    of_libraries = ("timestamp", "exception", *roles)
    assert [each for each in (*logged(), *enums(), *of_libraries) if unknown(each)] == []


def unknown(word: str) -> bool:
    return len(word) >= SHORTEST and " " not in word and not is_word(word)


@pytest.mark.parametrize(
    "value",
    [
        *("2026-11-27", "20261127", "2026-11-27T10:00:00Z", "10:30:15.5", "2026-331"),
        *("27/11/2026", "11/27/2026", "27.11.2026", "2026/11/27", "27-11-2026", "27.11.26"),
        *("27/11/2026 10:30", "11/27/2026, 10:30:15 AM", "2026.11.27T10:30:15Z"),
        *("2026-11-27T10:00:00+01:00[Europe/Rome]", "2026-11-27T10:00:00Z[Etc/UTC]"),
        *("2026-11-27 10:00:00 Europe/Rome", "2026-11-27 10:00:00 CET", "2026-331T10:00:00Z"),
        *("Fri, 27 Nov 2026 10:00:00 GMT", "Fri, 27 Nov 2026 10:00:00 +0100"),
        *("1795773600", "1795773600000", "1795773600.123"),
    ],
)
def test_dates_and_times_are_words(value: str) -> None:
    assert is_word(value)


@pytest.mark.parametrize(
    "value",
    [
        *("12345678", "123456789", "12345678901", "12345678901234", "abcdefgh", "a-2026-11-27"),
        *("completed-7f3a9c", "99/99/2026", "2026-400", "10:30:99", "192.168.100.20"),
        *("1795773600Europe/Rome", "27/11.2026"),
    ],
)
def test_other_texts_are_none(value: str) -> None:
    assert not is_word(value)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process not have read the words yet."""
    redaction.read_words.cache_clear()
    yield
    monkeypatch.undo()
    redaction.read_words()


async def test_words_are_read_at_the_start_beside_the_loop(
    unread: None, settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: set[threading.Thread] = set()
    read_text = Path.read_text

    def noted(path: Path, **how: Any) -> str:
        if path.suffix == ".py":
            readers.add(threading.current_thread())
        return read_text(path, **how)

    monkeypatch.setattr(Path, "read_text", noted)
    async with running(settings, database_url):
        assert readers
        assert threading.current_thread() not in readers
        monkeypatch.setattr(redaction, "_FOLDER", Path("nowhere"))
        assert is_word("completed")


@pytest.mark.parametrize("suffix", [".py", ".sql"])
async def test_a_service_without_its_sources_does_not_start(
    suffix: str,
    unread: None,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / f"one{suffix}").touch()
    monkeypatch.setattr(redaction, "_FOLDER", tmp_path)
    with pytest.raises(UnavailableError, match=f"{tmp_path} has no .*: install Bottega"):
        async with open_service(settings, "postgresql://nowhere", api=True, worker=False):
            pass
