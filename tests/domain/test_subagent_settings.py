"""Settings of asynchronous sub-agents, as the scheduler gets them."""

from dataclasses import asdict, replace

import pytest
from pydantic import ValidationError

from bottega.settings import Settings
from bottega.subagents.limits import SchedulerOptions, SubagentLimits


def test_defaults_are_the_librarys_except_for_the_pool() -> None:
    settings = Settings(_env_file=None)
    assert settings.subagent_limits == SubagentLimits()
    assert settings.subagent_options == replace(SchedulerOptions(), min_workers=50, max_workers=50)


_SETTINGS = [name for name in Settings.model_fields if name.startswith("subagent_")]


def test_each_setting_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {name.removeprefix("subagent_"): 7.0 for name in _SETTINGS}
    wanted |= {name: 0.5 for name in wanted if name.endswith("_threshold")}
    wanted |= {name: 9 for name in wanted if name == "failure_threshold"}
    for name, value in wanted.items():
        monkeypatch.setenv(f"BOTTEGA_SUBAGENT_{name.upper()}", f"{value:g}")
    settings = Settings(_env_file=None)
    found = asdict(settings.subagent_limits) | asdict(settings.subagent_options)
    assert {name: found[name] for name in wanted} == wanted
    assert found["max_concurrent_global"] == 7  # each task of the pool holds a slot


@pytest.mark.parametrize("name", ["max_concurrent", "min_workers", "max_queue_size"])
@pytest.mark.parametrize("value", ["0", "-1", "1e9", "1.5", "inf", "many"])
def test_count_must_be_a_positive_integer(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"BOTTEGA_SUBAGENT_{name.upper()}", value)
    with pytest.raises(ValidationError, match=f"subagent_{name}"):
        Settings(_env_file=None)


@pytest.mark.parametrize("name", ["max_timeout", "resize_cooldown", "reset_timeout"])
@pytest.mark.parametrize("value", ["-1", "inf", "nan", "1e9"])
def test_time_has_bounds(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"BOTTEGA_SUBAGENT_{name.upper()}", value)
    with pytest.raises(ValidationError, match=f"subagent_{name}"):
        Settings(_env_file=None)


@pytest.mark.parametrize(
    ("lower", "upper", "given"),
    [
        ("min_workers", "max_workers", {"subagent_min_workers": 60}),
        ("scale_down_threshold", "scale_up_threshold", {"subagent_scale_up_threshold": 0.2}),
    ],
)
def test_contradictory_settings_are_refused(
    lower: str, upper: str, given: dict[str, float]
) -> None:
    lower, upper = (f"BOTTEGA_SUBAGENT_{name.upper()}" for name in (lower, upper))
    with pytest.raises(ValidationError, match=f"{lower} is [0-9.]+, more than {upper}"):
        Settings(_env_file=None, **given)  # type: ignore[arg-type]
