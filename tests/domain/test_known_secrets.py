"""Secrets among the texts of the settings."""

import pytest
from pydantic import SecretStr

from bottega.settings import Settings, redactor

PASSWORD = "correct-horse"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://clerk:{PASSWORD}@localhost:5432/bottega",
        f"postgresql://clerk@cloud:{PASSWORD}@localhost/bottega",
        f"postgresql:///bottega?user=clerk&password={PASSWORD}&host=localhost",
        f"host=localhost user=clerk password={PASSWORD} sslmode=require",
        f"host=localhost password = '{PASSWORD}'",
    ],
)
def test_database_password_is_a_secret(url: str) -> None:
    clean = redactor(Settings(database_url=SecretStr(url)))
    assert PASSWORD not in clean.text(f"cannot connect to {url}")


def test_password_with_blanks_or_url_characters_is_a_secret() -> None:
    for url, password in (
        ("host=db password='it\\'s a secret'", "it's a secret"),
        ("postgresql://clerk:a/long@secret@db/bottega", "a/long@secret"),
        ("postgresql://clerk:a%20long%20secret@db/bottega", "a long secret"),
    ):
        clean = redactor(Settings(database_url=SecretStr(url)))
        assert "secret" not in clean.text(f"'{password}' is wrong").replace("[secret]", "")


@pytest.mark.parametrize(
    "url",
    [
        "host=localhost port=5432 user=postgres dbname=bottega password='postgres'",
        "host=localhost port=5432 user=bottega sslmode=require password=correct-horse",
        "postgresql://localhost:5432/bottega",
        "postgresql://bottega@localhost:5432/bottega",
        "postgresql://postgres:postgres@localhost:5432/bottega",
    ],
)
def test_rest_of_the_database_address_is_no_secret(url: str) -> None:
    clean = redactor(Settings(database_url=SecretStr(url)))
    text = "postgres: host=localhost port=5432 sslmode=require localhost:5432/bottega user=bottega"
    assert clean.text(text) == text


def test_port_of_a_model_is_no_secret() -> None:
    clean = redactor(Settings(openai_base_url="http://localhost:11434/v1"))
    assert clean.text("see http://localhost:11434/v1") == "see http://localhost:11434/v1"
    clean = redactor(Settings(openai_base_url=f"http://clerk:{PASSWORD}@localhost:11434/v1"))
    assert clean.text(f"{PASSWORD} at localhost:11434/v1") == "[secret] at localhost:11434/v1"
