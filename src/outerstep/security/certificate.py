"""The server's certificate: self-signed, created once, identified by the fingerprint that the join string carries."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
import ssl
from datetime import UTC, datetime, timedelta

from ..errors import ConfigError

YEARS = 10
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def fingerprint_of(der: bytes) -> str:
    """SHA-256 over the certificate as it travels: `openssl x509 -fingerprint -sha256` shows the same digits."""
    return hashlib.sha256(der).hexdigest()


def fingerprint_of_pem(pem: str, where: str) -> str:
    """Of the first certificate in a PEM file: the server's own, before those of its authorities."""
    first = re.search(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", pem, re.DOTALL)
    try:
        if first is None:
            raise ValueError("no certificate in it")
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(first[0]))
    except ValueError as error:
        raise ConfigError(f"{where} is not a certificate in PEM form: {error}") from error


def validity_of(der: bytes) -> tuple[datetime, datetime]:
    """From when to when a certificate is valid."""
    from cryptography import x509

    certificate = x509.load_der_x509_certificate(der)
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def make_certificate() -> tuple[bytes, bytes]:
    """(private key, certificate), both PEM. EC P-256; for this machine's name and the loopback addresses, so that tools
    that check names work too. Our own clients check only the fingerprint."""
    # Imported here: only a server's first start needs it, and loading it takes longer than a worker takes to connect.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "outerstep")])
    now = datetime.now(UTC)
    names: list[x509.GeneralName] = [x509.DNSName(host) for host in _host_names()]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # a worker's clock may be behind
        .not_valid_after(now + timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret, certificate.public_bytes(pem)


def _host_names() -> list[str]:
    """The names for the certificate; a host name that no certificate can hold is left out."""
    own = socket.gethostname()
    usable = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", own)
    return ["localhost", *([own] if usable and own != "localhost" else [])]
