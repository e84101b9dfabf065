"""A peer's signature: Ed25519. Its public key, as 64 hexadecimal digits, identifies the peer.

key = open_key(folder / "key.pem")       # created at the first start, then always the same
signature = key.sign(body)
verify(key.public, body, signature)      # True, on any machine that has the 64 digits
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .secret_files import locked, read_secret, write_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEYS_KEPT = 256  # more than there are peers in a run


class SigningKey:
    """The secret half, and the public one as `public`."""

    def __init__(self, secret: Ed25519PrivateKey) -> None:
        self.sign = secret.sign  # body → 64 bytes
        self.public = secret.public_key().public_bytes_raw().hex()


def make_key() -> SigningKey:
    """A new key that is not stored."""
    # Imported here and below: it takes a while to load, and only peers sign.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return SigningKey(Ed25519PrivateKey.generate())


def open_key(file: Path) -> SigningKey:
    """The key in `file` (PEM, mode 0600), created if there is none."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    with locked(file.parent):
        if not file.exists():
            made = Ed25519PrivateKey.generate()
            pem, no_passphrase = serialization.Encoding.PEM, serialization.NoEncryption()
            write_secret(file, made.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_passphrase))
        data = read_secret(file)
    try:
        found = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} must hold a key in PEM form, without a passphrase: {error}") from error
    if not isinstance(found, Ed25519PrivateKey):
        raise ConfigError(f"{file} must hold an Ed25519 key, got {type(found).__name__}")
    return SigningKey(found)


def verify(public: str, body: bytes, signature: bytes) -> bool:
    """Whether the owner of this key signed it."""
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(public).verify(signature, body)
    except (InvalidSignature, ValueError):  # ValueError: not a valid key
        return False
    return True


@lru_cache(maxsize=KEYS_KEPT)
def _public_key(public: str) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
