"""Address and key of the commands that talk to a server."""

from pathlib import Path

import pytest

from bottega.cli.client import ClientSettings


@pytest.mark.parametrize("key", [None, "k" * 40])
def test_a_file_sends_no_key_of_the_environment_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    (tmp_path / ".env").write_text("BOTTEGA_URL=http://strange.example\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BOTTEGA_URL", raising=False)
    if key is None:
        monkeypatch.delenv("BOTTEGA_KEY", raising=False)
    else:
        monkeypatch.setenv("BOTTEGA_KEY", key)
    monkeypatch.delenv("BOTTEGA_PORT", raising=False)
    settings = ClientSettings()
    assert settings.address == (
        "http://strange.example" if key is None else "http://127.0.0.1:8400"
    )
