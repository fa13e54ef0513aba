"""Secrets at rest: only the right key opens them, and only in their own place."""

from base64 import b64encode
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.sealing import CannotOpenError, Keyring, Place

OLD, NEW = bytes(32), bytes(range(32))
PLACE = Place(UUID(int=1), "KEY", 3)
OTHERS = [
    PLACE._replace(tenant_id=UUID(int=2)),
    PLACE._replace(name="KEYS"),
    PLACE._replace(version=4),
]


def in_base64(*keys: bytes) -> str:
    return ",".join(b64encode(key).decode() for key in keys)


@given(st.text(max_size=100))
def test_what_is_sealed_is_hidden_and_can_be_opened(text: str) -> None:
    ring = Keyring([NEW])
    sealed = ring.seal(text, PLACE)
    assert ring.open(sealed, PLACE) == text
    assert len(text) < 8 or text.encode() not in sealed
    assert ring.seal(text, PLACE) != sealed


@pytest.mark.parametrize("place", OTHERS)
def test_in_another_place_it_cannot_be_opened(place: Place) -> None:
    ring = Keyring([NEW])
    with pytest.raises(CannotOpenError):
        ring.open(ring.seal("a long secret", PLACE), place)


@pytest.mark.parametrize("at", [0, 8, 20, -1])
def test_a_changed_text_cannot_be_opened(at: int) -> None:
    ring = Keyring([NEW])
    sealed = bytearray(ring.seal("a long secret", PLACE))
    sealed[at] ^= 1
    with pytest.raises(CannotOpenError):
        ring.open(bytes(sealed), PLACE)
    for length in (0, 8, 20, 30):
        with pytest.raises(CannotOpenError):
            ring.open(bytes(sealed[:length]), PLACE)


def test_the_first_key_seals_and_all_open() -> None:
    before, both, after = Keyring([OLD]), Keyring([NEW, OLD]), Keyring([NEW])
    sealed = before.seal("a long secret", PLACE)
    assert both.open(sealed, PLACE) == "a long secret"
    assert not both.is_current(sealed)
    again = both.seal("a long secret", PLACE)
    assert both.is_current(again)
    assert after.open(again, PLACE) == "a long secret"
    for ring, other in ((after, sealed), (before, again)):
        with pytest.raises(CannotOpenError):
            ring.open(other, PLACE)


def test_keys_are_32_bytes_in_base64() -> None:
    assert Keyring.parse(f" {in_base64(NEW)} , {in_base64(OLD)}").is_current(
        Keyring([NEW]).seal("x", PLACE)
    )
    for wrong in ("", "x", in_base64(b"short"), in_base64(NEW, NEW), in_base64(NEW) + ","):
        with pytest.raises(ValueError, match=r".*"):
            Keyring.parse(wrong)
