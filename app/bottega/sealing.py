"""Encryption of stored secrets: AES-256-GCM (NIST SP 800-38D). Pure except for random nonces.

A sealed text: id of the key (8 bytes), nonce (12 bytes), ciphertext, tag (16 bytes).
"""

import os
from base64 import b64decode
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple
from uuid import UUID

from pydantic_core import to_json

_ID_BYTES = 8
_NONCE_BYTES = 12


class Place(NamedTuple):
    """The row in which a sealed text is stored. The text can be opened only for this row."""

    tenant_id: UUID
    name: str
    version: int


class CannotOpenError(Exception):
    """A sealed text was changed, or was sealed with an unknown key or for a different row."""


class Keyring:
    """The operator's keys: the first key encrypts (seals), and all keys can decrypt (open).

    Raises:
        ValueError: there is no key, a key does not have 32 bytes, or two keys are equal.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if not keys or any(len(key) != 32 for key in keys) or len({*keys}) < len(keys):
            raise ValueError("expected one or more different keys of 32 bytes")
        self._first = _id_of(keys[0])
        self._keys = {_id_of(key): AESGCM(key) for key in keys}

    @classmethod
    def parse(cls, text: str) -> "Keyring":
        """Parse a list of base64 keys, separated by commas.

        Raises:
            ValueError: the text is not a list of keys in base64.
        """
        return cls([b64decode(key.strip(), validate=True) for key in text.split(",")])

    def seal(self, text: str, place: Place) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._keys[self._first].encrypt(nonce, text.encode(), _about(place))
        return self._first + nonce + sealed

    def open(self, sealed: bytes, place: Place) -> str:
        """Return the decrypted text.

        Raises:
            CannotOpenError: the text was changed, or was not sealed by one of these keys for this
                row.
        """
        from cryptography.exceptions import InvalidTag

        key = self._keys.get(sealed[:_ID_BYTES])
        nonce, rest = sealed[_ID_BYTES:][:_NONCE_BYTES], sealed[_ID_BYTES + _NONCE_BYTES :]
        if key is None or len(rest) < _NONCE_BYTES:
            raise CannotOpenError
        try:
            return key.decrypt(nonce, rest, _about(place)).decode()
        except InvalidTag:
            raise CannotOpenError from None

    def opens(self, sealed: bytes) -> bool:
        """Return true if the text's first 8 bytes are the id of one of the keys."""
        return sealed[:_ID_BYTES] in self._keys

    def is_current(self, sealed: bytes) -> bool:
        """Return true if the first key, which seals new texts, sealed this text."""
        return sealed.startswith(self._first)


def _id_of(key: bytes) -> bytes:
    return sha256(b"bottega: id of a key of secrets\n" + key).digest()[:_ID_BYTES]


def _about(place: Place) -> bytes:
    return to_json([str(place.tenant_id), place.name, place.version])
