"""A certificate for 127.0.0.1 that is its own authority, as files."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_self_signed(folder: Path) -> bytes:
    """Write certificate.pem and key.pem, over those that are there; returns the certificate, for clients."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder(
            issuer_name=name, subject_name=name, public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(hours=1), not_valid_after=now + timedelta(hours=1),
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for file, content in (("key.pem", private), ("certificate.pem", pem)):
        temporary = folder / f".{file}"
        temporary.write_bytes(content)
        temporary.replace(folder / file)
    return pem
