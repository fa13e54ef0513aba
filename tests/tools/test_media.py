"""Media types, sizes of images and pages of PDFs, from bytes."""

import struct
import zlib
from time import process_time

import pytest

from bottega.tools.media import PageCount, is_text, media_type_of, pixels_of


def png(width: int, height: int) -> bytes:
    """Return an image of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(width + 1) * height)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


JPEG = (
    b"\xff\xd8\xff\xe1" + struct.pack(">H", 5000) + bytes(4998)
    + b"\xff\xc0" + struct.pack(">HBHHB", 17, 8, 30, 40, 3) + bytes(20)
)  # fmt: skip
WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
WEBP = b"RIFF\x00\x00\x00\x00WEBPVP8X" + bytes(8) + b"\x13\x00\x00\x09\x00\x00"


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (png(3, 2), "image/png"),
        (JPEG, "image/jpeg"),
        (b"GIF89a\x01\x00\x01\x00", "image/gif"),
        (WEBP, "image/webp"),
        (b"BM\x00\x00\x00\x00\x00\x00\x00\x00", "image/bmp"),
        (b"\x00\x00\x00\x18ftypheic", "image/heic"),
        (b"\x00\x00\x00\x18ftypisom", "video/mp4"),
        (b"\x00\x00\x00\x18ftypM4A ", "audio/mp4"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio/wav"),
        (b"ID3\x04", "audio/mpeg"),
        (b"\xff\xfb\x90\x00", "audio/mpeg"),
        (b"%PDF-1.7\n", "application/pdf"),
        (b"PK\x03\x04....word/document.xml", WORD),
        (b"PK\x03\x04...readme", "application/zip"),
        (b"just words", "text/plain"),
        ("Grüße".encode(), "text/plain"),
        (b" <!DOCTYPE html><p>", "text/html"),
        (b'<?xml version="1.0"?><svg xmlns="x">', "image/svg+xml"),
        (b"\x00\x01\x02", "application/octet-stream"),
        (b"\xfe\xedbinary", "application/octet-stream"),
        (b"", "text/plain"),
    ],
)  # fmt: skip
def test_bytes_show_the_type(head: bytes, found: str) -> None:
    assert media_type_of(head) == found


@pytest.mark.parametrize(
    ("head", "declared", "found"),
    [
        (b"a,b\n1,2\n", "text/csv; charset=utf-8", "text/csv"),
        (b'{"a": 1}', "application/json", "application/json"),
        (b"just words", "image/png", "text/plain"),
        (b"<html>", "text/plain", "text/html"),
        (png(1, 1), "text/html", "image/png"),
    ],
)
def test_a_client_names_only_the_kind_of_a_text(head: bytes, declared: str, found: str) -> None:
    assert media_type_of(head, declared) == found


def test_a_character_cut_in_two_is_text() -> None:
    assert media_type_of("ü".encode()[:1]) == "text/plain"


@pytest.mark.parametrize(
    ("head", "pixels"),
    [
        (png(300, 200), 60_000),
        (JPEG, 1200),
        (JPEG[:100], None),
        (WEBP, 200),
        (b"GIF89a\x0a\x00\x14\x00", 200),
        (b"GIF89a", None),
        (b"words", None),
        (b"\xff\xd8\xff\xe1\x00", None),
    ],
)
def test_an_image_says_its_size(head: bytes, pixels: int | None) -> None:
    assert pixels_of(head) == pixels


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_pages_are_counted_across_pieces(size: int) -> None:
    pdf = b"%PDF-1.7 /Type /Pages " + b"<< /Type /Page >> << /Type/Page/Parent 1 0 R>>" * 3
    count = PageCount()

    for start in range(0, len(pdf), size):
        count.feed(pdf[start : start + size])

    assert count.pages == 6


def test_texts_are_readable_as_they_are() -> None:
    assert is_text("text/csv")
    assert is_text("application/json")
    assert not is_text("application/pdf")


def test_many_comments_take_no_time() -> None:
    began = process_time()
    assert media_type_of(b"<!---->" * 580 + b"x") == "text/plain"
    assert media_type_of(b"<!-- a --> <!-- b -->\n<svg>") == "image/svg+xml"
    assert process_time() - began < 1
