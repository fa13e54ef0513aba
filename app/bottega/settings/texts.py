"""Texts of the environment that go into requests: a stray line feed would end them badly."""

import re
from typing import Annotated

import httpx2
from pydantic import AfterValidator, SecretStr
from pydantic_core import PydanticCustomError

_ODD = re.compile(r"[^!-~]")


def _wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("text", "{why}", {"why": why})


def _base_url(url: str) -> str:
    url = url.strip()
    if not url:
        return url
    if odd := re.search(r"[\s\x00-\x1f\x7f]", url):
        raise _wrong(f"has {odd[0]!r} within the URL: write one URL, without quotes and spaces")
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise _wrong(f"is not a valid URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _wrong("must have the form http(s)://host/path")
    return url


def _api_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value().strip()
    if _ODD.search(text):
        raise _wrong(
            "has a space, a line feed or another character that no header takes: copy the key again"
        )
    return SecretStr(text)


BaseUrl = Annotated[str, AfterValidator(_base_url)]
"""Address of a server; white space around it is dropped."""
ApiKey = Annotated[SecretStr, AfterValidator(_api_key)]
"""Key for a header; white space around it is dropped."""
