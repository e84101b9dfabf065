"""The certificate a server makes for itself."""

from __future__ import annotations

import hashlib
import ssl
from datetime import timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from outerstep.errors import ConfigError
from outerstep.security import certificate


def test_it_is_elliptic_lasts_ten_years_and_names_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box")
    key_pem, cert_pem = certificate.make_certificate()
    key, cert = load_pem_private_key(key_pem, None), x509.load_pem_x509_certificate(cert_pem)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp256r1"
    assert key.public_key() == cert.public_key()
    assert cert.not_valid_after_utc - cert.not_valid_before_utc > timedelta(days=3650)
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "gpu-box"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("127.0.0.1"), ip_address("::1")]


@pytest.mark.parametrize("name", ["", "rechner_1", "büro", "-x", "x" * 300])
def test_a_host_name_that_fits_in_no_certificate_is_left_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    cert = x509.load_pem_x509_certificate(certificate.make_certificate()[1])
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]


def test_the_fingerprint_is_that_of_the_first_certificate_in_the_file() -> None:
    first, second = (certificate.make_certificate()[1].decode() for _ in range(2))
    der = x509.load_pem_x509_certificate(first.encode()).public_bytes(Encoding.DER)
    assert der == ssl.PEM_cert_to_DER_cert(first)
    found = certificate.fingerprint_of_pem(f"a chain\n{first}\n{second}", "chain.pem")
    assert found == hashlib.sha256(der).hexdigest() != certificate.fingerprint_of_pem(second, "x")


def test_what_is_no_certificate_is_named() -> None:
    broken = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----"
    with pytest.raises(ConfigError, match=r"^x\.pem is not a certificate in PEM form"):
        certificate.fingerprint_of_pem(broken, "x.pem")
