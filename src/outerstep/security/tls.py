"""TLS at both ends. The server uses TLS 1.3 only; a client pins the certificate that the join string names."""

from __future__ import annotations

import hmac
import http.client
import ssl
from pathlib import Path

from ..errors import ConfigError, UntrustedServer
from .certificate import fingerprint_of

# What various versions of OpenSSL report when the other end answers in plain text.
NOT_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"}


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # connections are kept alive, not resumed
    try:
        # For a key with a passphrase OpenSSL would prompt on the terminal, and the server would wait forever.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"certificate {certificate} and key {key} cannot be used: {reason}; they must be PEM files that belong "
            "together, the key without a passphrase"
        ) from error
    return context


def pinning_context() -> ssl.SSLContext:
    """Checks neither names nor authorities: PinnedConnection compares the certificate itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class PinnedConnection(http.client.HTTPSConnection):
    """Compares the peer's certificate with the fingerprint after every handshake, before it sends any request."""

    def __init__(self, host: str, port: int, *, timeout: float, context: ssl.SSLContext, fingerprint: str) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._fingerprint = fingerprint

    def connect(self) -> None:
        super().connect()
        assert isinstance(self.sock, ssl.SSLSocket)
        presented = fingerprint_of(self.sock.getpeercert(binary_form=True) or b"")
        if not hmac.compare_digest(presented, self._fingerprint):
            self.close()
            raise UntrustedServer(
                f"{self.host}:{self.port} shows another certificate than the one known here: expected sha256 "
                f"{self._fingerprint}, got {presented}. Nothing was sent. If the server was moved or its credentials "
                "were recreated, get its join string and run `outerstep join -`; if not, someone is intercepting the "
                "connection"
            )


def explain(error: ssl.SSLError, address: str) -> UntrustedServer | None:
    """What a failed handshake means, if retries cannot fix it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UntrustedServer(
            f"the certificate of {address} is not one that this machine trusts: {error.verify_message}. Nothing was "
            "sent. If the server made its certificate itself, its join string ends with #sha256=…: was it cut off?"
        )
    if error.reason in NOT_TLS:
        return UntrustedServer(
            f"{address} does not speak TLS. Nothing was sent. If it is an outerstep server that was started with "
            f"--insecure, and you trust the network, write http://{address}"
        )
    return None
