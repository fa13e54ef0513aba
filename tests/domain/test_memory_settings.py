"""Settings of episodes, from environment variables."""

import pytest
from pydantic import ValidationError

from bottega.memory.episodes.scope import LearningOptions, MemoryOptions
from bottega.memory.episodes.scoring import ScoringOptions
from bottega.settings import Settings


def test_defaults_are_those_of_the_library() -> None:
    settings = Settings(_env_file=None)
    assert settings.memory_options == MemoryOptions()
    assert settings.learning_options == LearningOptions()


def test_weights_are_set_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTEGA_MEMORY_WEIGHTS", '{"success": 0.5, "domain": 0}')
    scoring = Settings(_env_file=None).memory_options.scoring
    assert scoring == ScoringOptions(success=0.5, domain=0.0)


@pytest.mark.parametrize("text", ['{"success": -1}', '{"recency_days": 3}', '{"domain": "much"}'])
def test_other_weights_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTEGA_MEMORY_WEIGHTS", text)
    with pytest.raises(ValidationError, match="memory_weights"):
        Settings(_env_file=None)
