"""Addresses and keys of the environment, as people paste them."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from bottega.settings import Settings


@pytest.mark.parametrize("name", ["OPENAI_BASE_URL", "BOTTEGA_EMBEDDING_BASE_URL"])
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://a.example/v1\nhttp://b.example/v1", "within the URL"),
        ("http://a.example/v1 http://b.example/v1", "within the URL"),
        ("http://a.example/\tv1", "within the URL"),
        ("a.example/v1", "http"),
        ("ftp://a.example", "http"),
        ("http://", "http"),
        ("http://[::1", "not a valid URL"),
        ("http://a.example:port", "not a valid URL"),
    ],
)
def test_a_wrong_address_is_named(
    name: str, url: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(ValidationError) as caught:
        Settings()
    (problem,) = caught.value.errors()
    assert why in problem["msg"]
    assert problem["loc"][0] in (name, "embedding_base_url", name.lower())


def test_white_space_around_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", " http://a.example/v1\r\n")
    monkeypatch.setenv("OPENAI_API_KEY", "key\n")
    settings = Settings()
    assert settings.openai_base_url == "http://a.example/v1"
    assert settings.openai_api_key is not None
    assert settings.openai_api_key.get_secret_value() == "key"
    monkeypatch.setenv("OPENAI_API_KEY", "one\ntwo")
    with pytest.raises(ValidationError, match="headers may not have"):
        Settings()


@pytest.mark.deep
def test_a_file_of_settings_in_another_encoding_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"BOTTEGA_PORT=8400\nBOTTEGA_MODEL=caf\xe9\n")
    command = [sys.executable, "-m", "bottega.cli.commands", "settings"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 2
    said = (done.stdout + done.stderr).decode()
    assert said == "error: .env: line 2 is not UTF-8: save the file as UTF-8\n"
