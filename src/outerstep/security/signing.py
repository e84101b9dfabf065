"""Signatures of peers and workers: Ed25519. A public key, as 64 hexadecimal digits, says who somebody is.

key = open_key(folder / "key.pem")       # a peer's: created at the first start, then always the same
key = derive_key(secret, "left")         # a worker's: one for each id, of one secret that its user has
signature = key.sign(body)
verify(key.public, body, signature)      # True, on any machine that has the 64 digits
"""

from __future__ import annotations

import hmac
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
    # Imported here and below: it takes a while to load, and most commands sign nothing.
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


def derive_key(secret: bytes, worker_id: str) -> SigningKey:
    """The key of this worker id. Nobody can tell from two public keys that they come of the same secret."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = hmac.digest(secret, b"outerstep worker\0" + worker_id.encode(), "sha256")
    return SigningKey(Ed25519PrivateKey.from_private_bytes(seed))


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
