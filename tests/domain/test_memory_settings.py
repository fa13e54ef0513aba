"""Settings of episodes, from environment variables."""

from dataclasses import asdict
from typing import Any

import pytest
from pydantic import ValidationError

from bottega.memory.episodes.options import MemoryOptions
from bottega.settings import Settings


def given(**values: Any) -> MemoryOptions:
    return Settings(_env_file=None, **values).memory_options


def flat(options: MemoryOptions) -> dict[str, Any]:
    found = asdict(options)
    return {**found.pop("scoring"), **found}


def test_defaults_are_those_of_the_library() -> None:
    assert given() == MemoryOptions()


@pytest.mark.parametrize("name", flat(MemoryOptions()))
def test_each_option_can_be_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = flat(MemoryOptions())[name]
    texts = {"normalisation": "raw"}
    # The ages must rise, and the doubled value is valid for every option except a cosine.
    factor = 0.5 if "cosine" in name else 1.25 if name == "mature_days" else 2
    value = texts.get(name) or str(type(usual)(usual * factor))
    monkeypatch.setenv(f"BOTTEGA_MEMORY_{name.upper()}", value)
    chosen = flat(given())
    assert chosen[name] != usual
    assert chosen == flat(MemoryOptions()) | {name: chosen[name]}


def test_the_ages_must_rise() -> None:
    with pytest.raises(ValidationError, match="MATURE_DAYS"):
        given(memory_active_days=200.0)
    at_once = given(memory_active_days=0.0, memory_mature_days=0.0, memory_aged_days=0.0)
    assert at_once.aged_days == 0.0
