"""Addresses in requests: the service refuses what their schema refuses, and nothing else."""

import re
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from bottega.api.schemas.base import WebAddress, WebhookUrl

ACCEPTED = (
    "https://example.com",
    "HTTP://example.com:8080/a/b?c=d&e=@",
    "https://[2001:db8::1]/hook",
    "https://münchen.example/straße",
    "http://10.0.0.1/x",
)
REFUSED = (
    "",
    "example.com/hook",
    "ftp://example.com",
    "http:///path",
    "https://user:secret@example.com/",
    "https://example.com/a b",
    " https://example.com",
    "https://example.com\n",
    "https://example.com\\@evil.example",
    f"https://example.com/{'a' * 2000}",
)


@pytest.mark.parametrize("kind", [WebAddress, WebhookUrl], ids=["part", "webhook"])
@pytest.mark.parametrize("url", [*ACCEPTED, *REFUSED, "https://example.com/#top"])
def test_an_address_is_accepted_if_its_schema_says_so(kind: Any, url: str) -> None:
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    says = bool(re.search(schema["pattern"], url)) and len(url) <= schema["maxLength"]
    try:
        accepts = adapter.validate_python(url) == url
    except ValidationError:
        accepts = False
    if url.endswith("\n"):  # "$" is the very end in ECMA-262, the rule of JSON Schema
        says = False
    expected = url in ACCEPTED or (url.endswith("#top") and kind is WebAddress)
    assert (accepts, says) == (expected, expected)
