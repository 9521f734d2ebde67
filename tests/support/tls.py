"""Keys and certificates of servers on loopback."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK: tuple[x509.GeneralName, ...] = (
    x509.DNSName("localhost"),
    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
)


class TLS(NamedTuple):
    """Files in PEM. `authority`: what a client must trust; of a self-signed certificate, itself."""

    key: Path
    certificate: Path
    authority: Path


def self_signed(folder: Path, names: tuple[x509.GeneralName, ...] = LOOPBACK) -> TLS:
    """A server's own certificate, which nobody else has signed."""
    key, certificate = _made("server", names)
    return _written(folder, key, certificate, certificate)


def privately_signed(folder: Path) -> TLS:
    """A server's certificate that a private authority has signed."""
    authority = _made("authority", ())
    key, certificate = _made("server", LOOPBACK, authority)
    return _written(folder, key, certificate, authority[1])


Made = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]


def _made(name: str, names: tuple[x509.GeneralName, ...], authority: Made | None = None) -> Made:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if authority is None else authority[1].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signer = key if authority is None else authority[0]
    return key, builder.sign(signer, hashes.SHA256())


def _written(
    folder: Path,
    key: ec.EllipticCurvePrivateKey,
    certificate: x509.Certificate,
    authority: x509.Certificate,
) -> TLS:
    files = TLS(folder / "key.pem", folder / "certificate.pem", folder / "authority.pem")
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    return files
