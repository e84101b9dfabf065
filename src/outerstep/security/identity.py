"""A server's identity: its certificate and tokens. Created at the first start and never changed, so that a join string
stays valid."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .certificate import fingerprint_of_pem, make_certificate
from .secret_files import locked, read_secret, write_secret
from .tls import server_context
from .tokens import TokenFile


@dataclass(frozen=True)
class ServerIdentity:
    certificate: Path
    key: Path
    fingerprint: str
    tokens: TokenFile

    def context(self) -> ssl.SSLContext:
        return server_context(self.certificate, self.key)


def certificate_file(folder: Path) -> Path:
    return folder / "certificate.pem"


def token_file(folder: Path) -> TokenFile:
    return TokenFile(folder / "tokens.json")


def open_identity(folder: Path, tls_cert: str | None = None, tls_key: str | None = None) -> ServerIdentity:
    """The identity in `folder`, created if there is none; with the operator's own certificate, if given."""
    tokens = token_file(folder)
    tokens.ensure()
    if tls_cert is not None and tls_key is not None:
        certificate, key = Path(tls_cert), Path(tls_key)
        try:
            pem = certificate.read_text(encoding="latin-1")
        except OSError as error:
            raise ConfigError(f"tls_cert {tls_cert!r} cannot be read: {error.strerror}") from error
    else:
        certificate, key = certificate_file(folder), folder / "key.pem"
        with locked(folder):
            if not (certificate.exists() and key.exists()):
                made_key, made_certificate = make_certificate()
                write_secret(key, made_key)
                write_secret(certificate, made_certificate)
        read_secret(key)  # raises if others can read it
        pem = read_secret(certificate).decode("latin-1")
    return ServerIdentity(certificate, key, fingerprint_of_pem(pem, str(certificate)), tokens)


def own_fingerprint(folder: Path) -> str:
    """Raises FileNotFoundError before the first start of a server."""
    file = certificate_file(folder)
    return fingerprint_of_pem(read_secret(file).decode("latin-1"), str(file))
