"""Paths of virtual files, and their limits, which no write exceeds."""

import asyncio
import unicodedata
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bottega.errors import InvalidInputError
from bottega.subagents.shared_context import (
    SharedContext,
    Workspace,
    check_path,
    namespace_of,
)
from tests.examples import examples

CHILD = UUID(int=1)

AS_IT_IS = [
    "a",
    "notes/plan.md",
    "/global/report.md",
    "Größe.txt",
    "報告/第一章.md",
    "отчёт.md",
    "two words.md",
    ".hidden",
    "a..b",
    "...a",
    "x" * 255,
    "/".join(["x" * 254] * 4),
]

REFUSED = [
    "",
    "/",
    "//a",
    "a//b",
    "a/",
    "..",
    "../a",
    "a/../b",
    "/global/../subagent/x",
    ".",
    "./a",
    "a/./b",
    "...",
    "a/.../b",
    "a\\b",
    "..\\a",
    "a\x00b",
    "a\nb",
    "a\tb",
    "a\x7fb",
    "a\x9bb",
    " a",
    "a ",
    "a/ b",
    " ",
    "a\u00a0b",
    "a\u2028b",
    "e\u0301t\u00e9",  # decomposed
    "a\uff0fb",  # full-width slash
    "\u2024\u2024/a",  # one-dot leaders
    "\u2025/a",
    "\u2026",
    "\uff0e\uff0e/a",
    "a\uff3cb",
    "a\u2215b",  # division slash
    "a\u2044b",
    "a\u29f8b",
    "a\u2216b",
    "\ufb01le",  # a ligature
    "\uff47lobal/a",
    "glo\u200bbal/a",  # zero width
    "a\ufeff",
    "a\u202eb",  # right-to-left override
    "a\u2066b",
    "a\u3164b",  # Hangul filler
    "a\u115fb",
    "a\ufe0f",
    "a\U000e0041",
    "a\ue000",  # private use
    "a\u0378",  # unassigned
    "a\ud800",  # half a pair
    "x" * 256,
    "é" * 128,
    "/".join(["x" * 100] * 11),
    "x" * 10_000_000,
]

UNKIND = "/.\\ aé\u0301\u2024\uff0f\u200b\u202e\u2215\u3164Ggl"
texts = st.one_of(
    st.text(max_size=30),
    st.text(st.sampled_from(UNKIND), max_size=12),
    st.text(st.sampled_from("aé漢/. "), min_size=1, max_size=6),
    st.lists(
        st.sampled_from(["global", "subagent", "Global", "..", ".", "", str(CHILD), "a", "input"]),
        max_size=5,
    ).map("/".join),
)


def accepted(text: str) -> str | None:
    """Return the path's normal form; ``None`` if it is refused."""
    try:
        return check_path(text)
    except InvalidInputError as error:
        refused = error
    assert refused.code == "bad_path"
    assert refused.detail.isprintable()
    return None


@pytest.mark.parametrize("path", AS_IT_IS)
def test_ordinary_names_in_any_script_are_paths(path: str) -> None:
    assert check_path(path) == "/" + path.removeprefix("/")


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: ascii(path[:20]))
def test_invalid_paths_are_refused_everywhere(path: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_path(path)
    assert (refused.value.code, type(refused.value)) == ("bad_path", InvalidInputError)
    assert refused.value.detail.isprintable()
    assert len(refused.value.detail) < 1000


@given(texts)
@example("/global/a")
def test_accepted_path_lies_in_one_place_and_is_its_own_normal_form(text: str) -> None:
    path = accepted(text)
    if path is None:
        return
    assert check_path(path) == path
    names = path.split("/")[1:]
    assert all(name.strip(".") for name in names)
    assert len(path.encode()) <= 1024
    try:
        namespace = namespace_of(path)
    except InvalidInputError:
        assert names[0].casefold() in ("global", "subagent")
        return
    if namespace is None:
        assert names[0].casefold() not in ("global", "subagent")
    else:
        assert path.startswith(f"{namespace}/")
        assert namespace == "/global" or names[0] == "subagent"


@given(texts, st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
@example("Größe", "NFD")
@example("\ufb01le", "NFKC")
def test_at_most_one_spelling_of_a_text_is_accepted(text: str, form: Any) -> None:
    other = unicodedata.normalize(form, text)
    assert other == text or accepted(text) is None or accepted(other) is None


@given(st.lists(texts, max_size=20))
@example(["a", "/a"])
def test_two_texts_name_one_file_only_by_a_leading_slash(spellings: list[str]) -> None:
    named: dict[str, str] = {}
    for text in spellings:
        path = accepted(text)
        if path is not None:
            assert named.setdefault(path, text.removeprefix("/")) == text.removeprefix("/")


class Sizes(RuleBasedStateMachine):
    """Machine: no write exceeds the limits, and reads return accepted writes."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.context = SharedContext(max_bytes=60, max_files=4, max_run_bytes=100)
        self.spaces = {
            who: Workspace(self.context, who, lambda task_id: False) for who in (None, CHILD)
        }
        self.model: dict[tuple[UUID | None, str], str] = {}

    @rule(
        who=st.sampled_from([None, CHILD]),
        name=st.sampled_from("abcdef"),
        shared=st.booleans(),
        size=st.integers(0, 70),
        letter=st.sampled_from("xé漢"),
    )
    def write(self, who: UUID | None, name: str, shared: bool, size: int, letter: str) -> None:
        space = self.spaces[who]
        path = space.folder + name if shared else f"/{name}"
        before = self.context.used
        try:
            self.runner.run(space.write(path, letter * size))
            refused = None
        except InvalidInputError as error:
            refused = error.code
        if self.too_much(who, path, letter * size):
            assert (refused, self.context.used) == ("too_large", before)
        else:
            assert refused is None
            self.model[who, path] = letter * size

    def too_much(self, who: UUID | None, path: str, content: str) -> bool:
        """Return whether a write breaks the limits and does not only make things smaller."""
        old = self.model.get((who, path))
        after = {**self.model, (who, path): content}
        place = {
            key: text
            for key, text in after.items()
            if (key[0], namespace_of(key[1])) == (who, namespace_of(path))
        }
        if old is not None and len(content.encode()) <= len(old.encode()):
            return False
        return len(place) > 4 or total(place) > 60 or total(after) > 100

    @invariant()
    def all_is_there(self) -> None:
        assert self.context.used == total(self.model) <= 100
        assert self.runner.run(self.contents()) == self.model

    async def contents(self) -> dict[tuple[UUID | None, str], str]:
        return {(who, path): await self.spaces[who].read(path) for who, path in self.model}

    def teardown(self) -> None:
        self.runner.close()


def total(files: dict[Any, str]) -> int:
    return sum(len(text.encode()) for text in files.values())


TestSizes = Sizes.TestCase
TestSizes.settings = settings(max_examples=examples(50), stateful_step_count=30)


def test_single_file_has_its_own_limit() -> None:
    files = SharedContext(max_bytes=100, max_file_bytes=10)
    files.write("/global/a", "x" * 10)
    with pytest.raises(InvalidInputError, match="the maximum is 10"):
        files.write("/global/a", "é" * 6)
    assert files.read("/global/a") == "x" * 10


@pytest.mark.parametrize("content", ["a\x00", "a\ud800"])
def test_content_that_cannot_be_stored_is_refused(content: str) -> None:
    files = SharedContext()
    with pytest.raises(InvalidInputError) as refused:
        files.write("/global/a", content)
    assert refused.value.code == "bad_content"
    assert (files.folders(), files.used) == ((), 0)
