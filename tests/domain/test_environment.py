"""Values of variables without what copying added to them."""

from pathlib import Path

import pytest

from bottega.cli.client import ClientSettings
from bottega.settings import Settings


@pytest.mark.parametrize("around", ["{}\n", "  {}\r\n", '"{}"', "'{}'\n", "\t'{} '"])
def test_blanks_line_feeds_and_quotes_around_a_value_are_dropped(
    around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_API_KEY": "sk-a",
        "DATABASE_URL": "postgresql://me:secret@db/x",
        "BOTTEGA_PORT": "8401",
        "BOTTEGA_MEMORY": "read",
        "BOTTEGA_CORS_ORIGINS": "https://a.example,https://b.example",
        "BOTTEGA_MEMORY_WEIGHTS": '{"success": 0.3}',
        "BOTTEGA_URL": "http://127.0.0.1:8401",
        "BOTTEGA_KEY": "btg_1",
    }.items():
        monkeypatch.setenv(name, around.format(value))
    found = Settings()
    assert found.openai_base_url == "http://127.0.0.1:1/v1"
    assert found.openai_api_key is not None
    assert found.openai_api_key.get_secret_value() == "sk-a"
    assert found.server_url == "postgresql://me:secret@db/x"
    assert (found.port, found.memory) == (8401, "read")
    assert found.cors_origins == ["https://a.example", "https://b.example"]
    assert found.memory_weights == {"success": 0.3}
    client = ClientSettings()
    assert client.address == "http://127.0.0.1:8401"
    assert client.key is not None
    assert client.key.get_secret_value() == "btg_1"


def test_what_is_empty_then_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTEGA_PORT", ' "" ')
    assert Settings().port == 8400


def test_a_file_may_begin_with_a_byte_order_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_bytes(b"\xef\xbb\xbfBOTTEGA_PORT=8402\r\n")
    assert Settings().port == 8402
