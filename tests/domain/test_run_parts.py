"""Parts of an input beside what the dialects of a model take."""

from typing import Any

import pytest

from bottega.agents.provider import DialectName
from bottega.errors import InvalidInputError
from bottega.runs.pins import refuse_parts

IMAGE = {"type": "image", "file": "f", "media_type": "image/png"}
WAV = {"type": "audio", "file": "f", "media_type": "audio/wav"}
PDF = {"type": "document", "file": "f", "media_type": "application/pdf"}
TEXT = {"type": "document", "file": "f", "media_type": "text/csv"}


def asking(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic", "gemini"])
def test_images_pdf_and_texts_are_taken_by_all(dialect: DialectName) -> None:
    refuse_parts(asking(IMAGE, PDF, TEXT), [dialect])


@pytest.mark.parametrize("dialect", ["responses", "anthropic"])
def test_a_part_that_one_dialect_lacks_is_refused_at_its_place(dialect: DialectName) -> None:
    with pytest.raises(InvalidInputError) as refused:
        refuse_parts(asking(IMAGE, WAV), ["chat", dialect])

    assert refused.value.code == "unsupported_part"
    assert refused.value.pointer == "/input/0/content/2"


def test_texts_and_unknown_models_are_not_checked() -> None:
    refuse_parts("What?", ["anthropic"])
    refuse_parts([{"role": "user", "content": "What?"}], ["anthropic"])
    refuse_parts(asking(WAV), [])
