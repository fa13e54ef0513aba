"""Variables that look like settings and are none."""

import pytest

from bottega.cli.terminal import start
from bottega.settings import unknown_variables
from tests.log_entries import capture_logs


def test_unknown_variables_are_named() -> None:
    known = (
        "BOTTEGA_PORT",
        "bottega_port",
        "BOTTEGA_SECRET_ACME",
        "BOTTEGA_URL",
        "HOME",
        "BOTTEGA",
    )
    injected = (
        "BOTTEGA_API_SERVICE_HOST",
        "BOTTEGA_API_SERVICE_PORT_HTTP",
        "BOTTEGA_API_PORT",
        "BOTTEGA_API_PORT_8400_TCP_ADDR",
    )
    assert unknown_variables((*known, *injected, "BOTTEGA_MAX_CRASHES")) == ["BOTTEGA_MAX_CRASHES"]


def test_a_start_warns_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTEGA_MAX_CRASHES", "5")
    monkeypatch.setattr("bottega.logs.configure_logging", lambda *_: None)
    with capture_logs() as lines:
        start()
    assert [line["variables"] for line in lines] == [["BOTTEGA_MAX_CRASHES"]]
