"""Media types, sizes and page counts of files, from the files' bytes. Pure."""

import codecs
import re
import struct
from collections.abc import Callable

HEAD_BYTES = 4096
"""Number of bytes at the start of a file that are enough to find its type."""

RASTER = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp"})
"""Types of images that a browser shows without executing content of the image."""
UNKNOWN = "application/octet-stream"
_PLAIN = "text/plain"

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"%PDF-", "application/pdf"),
    (b"ID3", "audio/mpeg"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"#!AMR", "audio/amr"),
    (b"\x1aE\xdf\xa3", "video/webm"),
    (b"\x1f\x8b\x08", "application/gzip"),
    (b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "application/x-ole-storage"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = (
    (b"heic", "image/heic"),
    (b"heix", "image/heic"),
    (b"mif1", "image/heif"),
    (b"avif", "image/avif"),
    (b"M4A ", "audio/mp4"),
    (b"qt  ", "video/quicktime"),
)
"""Brands of ISO media files (ISO/IEC 14496-12); files of other brands are videos."""
_OOXML = "application/vnd.openxmlformats-officedocument."
_ZIPPED = (
    (b"word/", _OOXML + "wordprocessingml.document"),
    (b"xl/", _OOXML + "spreadsheetml.sheet"),
    (b"ppt/", _OOXML + "presentationml.presentation"),
)
_ZIP = b"PK\x03\x04"
_MIMETYPE = re.compile(rb"mimetype(application/[a-z0-9.+-]+)")
_TEXT_TYPE = re.compile(r"text/[a-z0-9.+-]{1,80}|application/([a-z0-9.-]{1,60}\+)?(json|xml|yaml)")
_COMMENTS = rb"(?:<!--(?:(?!-->).)*+-->\s*+)*+"  # no backtracking over many comments
_MARKUP = (
    (re.compile(rb"\s*<(!doctype html|html)\b", re.IGNORECASE), "text/html"),
    (re.compile(rb"\s*(<\?xml[^>]*>\s*)?%b<svg\b" % _COMMENTS, re.DOTALL), "image/svg+xml"),
    (re.compile(rb"\s*<\?xml\b"), "application/xml"),
)
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def media_type_of(head: bytes, declared: str | None = None) -> str:
    """Return the media type of a file, without parameters.

    Args:
        head: the first ``HEAD_BYTES`` of the file, or the whole file.
        declared: media type that the client sent; used only for files that are text.
    """
    for magic, media_type in _MAGIC:
        if head.startswith(magic):
            return media_type
    for family in (_riff, _iso, _zip, _bitmap, _mpeg):
        if (known := family(head)) is not None:
            return known
    return _text(head, declared) or UNKNOWN


def is_text(media_type: str) -> bool:
    """Return true for a type of text that a model can read without conversion."""
    return _TEXT_TYPE.fullmatch(media_type) is not None


def _riff(head: bytes) -> str | None:
    return _RIFF.get(head[8:12]) if head.startswith(b"RIFF") else None


def _iso(head: bytes) -> str | None:
    if head[4:8] != b"ftyp":
        return None
    return next((found for brand, found in _BRANDS if head[8:12] == brand), "video/mp4")


def _zip(head: bytes) -> str | None:
    if not head.startswith(_ZIP):
        return None
    if match := _MIMETYPE.search(head, 0, 200):  # OpenDocument and EPUB
        return match[1].decode()
    return next((found for name, found in _ZIPPED if name in head), "application/zip")


def _bitmap(head: bytes) -> str | None:
    return "image/bmp" if head.startswith(b"BM") and head[6:10] == bytes(4) else None


def _mpeg(head: bytes) -> str | None:
    """Return the type of an MPEG audio file without tags, by its first frame (ISO/IEC 11172-3)."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    if head[1] & 0xF6 == 0xF0:
        return "audio/aac"
    is_layer_3 = head[1] & 0x06 == 0x02
    return "audio/mpeg" if is_layer_3 and head[2] & 0xF0 not in (0x00, 0xF0) else None


def _text(head: bytes, declared: str | None) -> str | None:
    if _CONTROL.search(head):
        return None
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return None
    text = head.removeprefix(codecs.BOM_UTF8)
    for pattern, found in _MARKUP:
        if pattern.match(text):
            return found
    claimed = (declared or "").partition(";")[0].strip().lower()
    return claimed if is_text(claimed) else _PLAIN


def pixels_of(head: bytes) -> int | None:
    """Return an image's width times its height, in pixels; ``None``: ``head`` has no size.

    Args:
        head: the start of the file; a JPEG may have its width and height far from the start.
    """
    measure = _MEASURES.get(media_type_of(head[:HEAD_BYTES]))
    try:
        found = measure(head) if measure else None
    except (struct.error, IndexError):
        return None
    return found[0] * found[1] if found else None


def _png(head: bytes) -> tuple[int, int] | None:
    width, height = struct.unpack_from(">II", head, 16)
    return width, height


def _gif(head: bytes) -> tuple[int, int] | None:
    width, height = struct.unpack_from("<HH", head, 6)
    return width, height


def _bmp(head: bytes) -> tuple[int, int] | None:
    width, height = struct.unpack_from("<ii", head, 18)
    return abs(width), abs(height)


def _webp(head: bytes) -> tuple[int, int] | None:
    form = head[12:16]
    if form == b"VP8X":
        width, height = head[24:27], head[27:30]
        return int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
    if form == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width_height = struct.unpack_from("<HH", head, 26)
    return width_height[0] & 0x3FFF, width_height[1] & 0x3FFF


def _jpeg(head: bytes) -> tuple[int, int] | None:
    """Return a JPEG's size, which is in its frame header (T.81, B.2)."""
    at = 2
    # Skip the segments before the frame header. A colour profile or a preview may have hundreds of
    # segments.
    for _ in range(2000):
        if at + 9 > len(head) or head[at] != 0xFF:
            return None
        marker = head[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", head, at + 5)
            return width, height
        at += 2 + struct.unpack_from(">H", head, at + 2)[0]
    return None


_MEASURES: dict[str, Callable[[bytes], tuple[int, int] | None]] = {
    "image/png": _png,
    "image/gif": _gif,
    "image/bmp": _bmp,
    "image/webp": _webp,
    "image/jpeg": _jpeg,
}


class PageCount:
    """Counter of the pages of a PDF that arrives in pieces. It does not see compressed pages."""

    _PAGE = re.compile(rb"/Type\s{0,8}/Page(?![A-Za-z])")
    _OVERLAP = 24

    def __init__(self) -> None:
        self.pages = 0
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        if self.pages >= 100_000:  # further pages are not counted
            return
        data = self._rest + piece
        ends = [found.end() for found in self._PAGE.finditer(data)]
        # A match at the end of a piece may be the start of "/Pages": wait for the next piece.
        self.pages += sum(end < len(data) for end in ends)
        last = max((end for end in ends if end < len(data)), default=0)
        self._rest = data[max(last, len(data) - self._OVERLAP) :]
