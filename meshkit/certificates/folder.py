"""The folder that `chipmesh certs` keeps: an authority, and below it one folder for each peer.

authority.pem            those that are trusted: the present authority first, a former one while it goes
authority.key            0600, of the present one
ROLE-NAME/               all that one service needs, and the only thing that it gets
    certificate.pem  key.pem (0600)  authority.pem
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from meshkit.certificates.issuing import KeyedCertificate, check_name, make_authority, make_leaf
from meshkit.certificates.reading import (
    CertificateFacts,
    describe_certificate,
    is_signed_by,
    peers_of,
    read_certificates,
    read_key,
    read_keyed,
)
from meshkit.errors import FailedPrecondition, MeshError
from meshkit.rpc.policy import Peer

AUTHORITY_LIFETIME = timedelta(days=3650)
RENEWED_BELOW = 1 / 3
"""Share of its life that a leaf must have left, or it is made anew."""


@dataclass(frozen=True)
class Made:
    """What one run has done, by the names of folders; "authority" is the authority itself."""

    written: tuple[str, ...]
    kept: tuple[str, ...]


class CertificateFolder:
    """One authority and its leaves. Each call holds a lock: two one-shot steps may start at once.

    now: of all that it does.
    """

    def __init__(self, root: Path, *, now: datetime | None = None) -> None:
        self._root = root
        self._now = now or datetime.now(timezone.utc)
        self._bundle_file = root / "authority.pem"
        self._key_file = root / "authority.key"

    def __repr__(self) -> str:
        return f"<CertificateFolder {self._root}>"

    def create(self, peers: Sequence[Peer], *, lifetime: timedelta) -> Made:
        """Make what is missing: the authority, and a leaf of each peer that has none, or one that another
        authority has signed, or that has less than a third of its life left. The rest stays as it is.

        Raises:
            InvalidArgument: a name of no proper form.
            FailedPrecondition: the folder cannot be written, or the authority there cannot be used.
        """
        for peer in peers:
            check_name(peer.name, field=f"--{peer.role.value}")
        with self._locked():
            is_new = not self._key_file.exists()
            authority = self._new_authority([]) if is_new else self._authority()
            outcome = {folder_name(peer): self._keep_or_make(peer, authority, lifetime) for peer in peers}
        written = (*(("authority",) if is_new else ()), *(name for name, made in outcome.items() if made))
        return Made(written, tuple(name for name, made in outcome.items() if not made))

    def rotate(self, *, lifetime: timedelta, new_authority: bool = False) -> Made:
        """New leaves, with new keys, for all peers of the folder.

        new_authority: a new authority signs them; the former one is trusted, too, until `retire`.

        Raises:
            FailedPrecondition: as `create`, or there is no authority yet.
        """
        with self._locked():
            peers = self._peers()
            if new_authority:
                former = self._read_authority().certificate
                authority = self._new_authority([former] if former.not_valid_after_utc > self._now else [])
                # First everybody trusts the new authority, then the first leaf is signed by it.
                for peer in peers:
                    self._hand_out_bundle(peer)
            else:
                authority = self._authority()
            for peer in peers:
                self._make(peer, authority, lifetime)
        changed = tuple(folder_name(peer) for peer in peers)
        return Made((("authority", *changed) if new_authority else changed), ())

    def retire(self) -> Made:
        """Trust the present authority alone. Former ones' certificates are refused from now on.

        Raises:
            FailedPrecondition: a leaf is still signed by a former one, or as `rotate`.
        """
        with self._locked():
            authority = self._authority()
            peers = self._peers()
            for peer in peers:
                leaf = read_certificates(self._file(peer, "certificate.pem"))[0]
                if not is_signed_by(leaf, authority.certificate):
                    raise FailedPrecondition(
                        f"{folder_name(peer)} is still signed by a former authority; rotate first",
                        reason="STILL_IN_USE",
                    )
            write_file(self._bundle_file, authority.certificate_pem, mode=0o644)
            for peer in peers:
                self._hand_out_bundle(peer)
        return Made(("authority",), ())

    def describe(self) -> dict[str, CertificateFacts]:
        """What the certificates say, by folder; "authority" and "authority former N" are those trusted.

        Raises:
            InvalidArgument: one of them cannot be read.
        """
        trusted = read_certificates(self._bundle_file)
        facts = {
            ("authority" if index == 0 else f"authority former {index}"): describe_certificate(each)
            for index, each in enumerate(trusted)
        }
        for peer in self._peers():
            leaf = read_certificates(self._file(peer, "certificate.pem"))[0]
            signed_by = next((each for each in trusted if is_signed_by(leaf, each)), None)
            known = signed_by.fingerprint(hashes.SHA256()).hex() if signed_by is not None else ""
            facts[folder_name(peer)] = replace(describe_certificate(leaf), authority_fingerprint=known)
        return facts

    # ---- authority

    def _read_authority(self) -> KeyedCertificate:
        if not self._key_file.exists():
            raise FailedPrecondition(
                f"{self._root} holds no authority; `chipmesh certs create {self._root} ...` makes one",
                reason="NO_AUTHORITY",
            )
        key = read_key(self._key_file)
        # Not simply the first one: a run may have been interrupted between the two files.
        for certificate in read_certificates(self._bundle_file):
            if certificate.public_key() == key.public_key():
                return KeyedCertificate(certificate, key)
        raise FailedPrecondition(
            f"{self._key_file} is the key of no certificate in {self._bundle_file}; restore the two, or "
            "begin with an empty folder",
            reason="KEY_MISMATCH",
        )

    def _authority(self) -> KeyedCertificate:
        authority = self._read_authority()
        if authority.certificate.not_valid_after_utc <= self._now:
            raise FailedPrecondition(
                f"the authority in {self._root} has expired; "
                f"`chipmesh certs rotate {self._root} --authority` makes another one",
                reason="AUTHORITY_EXPIRED",
            )
        return authority

    def _new_authority(self, former: Sequence[x509.Certificate]) -> KeyedCertificate:
        authority = make_authority(lifetime=AUTHORITY_LIFETIME, now=self._now)
        bundle = authority.certificate_pem + b"".join(
            each.public_bytes(serialization.Encoding.PEM) for each in former
        )
        write_file(self._bundle_file, bundle, mode=0o644)
        write_file(self._key_file, authority.key_pem, mode=0o600)
        return authority

    # ---- leaves

    def _peers(self) -> list[Peer]:
        """Those that have a folder here, by what their certificates say."""
        found = []
        for file in sorted(self._root.glob("*/certificate.pem")):
            peers = peers_of(read_certificates(file)[0])
            if len(peers) == 1 and folder_name(peers[0]) == file.parent.name:
                found += peers
        return found

    def _keep_or_make(self, peer: Peer, authority: KeyedCertificate, lifetime: timedelta) -> bool:
        """Whether a leaf was made."""
        if self._is_good(peer, authority):
            if self._file(peer, "authority.pem").read_bytes() != self._bundle_file.read_bytes():
                self._hand_out_bundle(peer)
            return False
        self._make(peer, authority, lifetime)
        return True

    def _is_good(self, peer: Peer, authority: KeyedCertificate) -> bool:
        try:
            leaf = read_keyed(self._file(peer, "certificate.pem"), self._file(peer, "key.pem")).certificate
        except MeshError:
            return False
        left = leaf.not_valid_after_utc - self._now
        life = leaf.not_valid_after_utc - leaf.not_valid_before_utc
        return (
            peers_of(leaf) == [peer]
            and is_signed_by(leaf, authority.certificate)
            and left > life * RENEWED_BELOW
            and self._file(peer, "authority.pem").exists()
        )

    def _make(self, peer: Peer, authority: KeyedCertificate, lifetime: timedelta) -> None:
        leaf = make_leaf(peer, authority=authority, lifetime=lifetime, now=self._now)
        self._file(peer, "").mkdir(mode=0o700, exist_ok=True)
        self._hand_out_bundle(peer)
        write_file(self._file(peer, "key.pem"), leaf.key_pem, mode=0o600)
        write_file(self._file(peer, "certificate.pem"), leaf.certificate_pem, mode=0o644)

    def _hand_out_bundle(self, peer: Peer) -> None:
        write_file(self._file(peer, "authority.pem"), self._bundle_file.read_bytes(), mode=0o644)

    def _file(self, peer: Peer, name: str) -> Path:
        return self._root / folder_name(peer) / name

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._root.mkdir(mode=0o755, parents=True, exist_ok=True)
            with (self._root / ".lock").open("w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise FailedPrecondition(
                f"{error.filename or self._root} cannot be used: {error.strerror}", reason="FOLDER_UNUSABLE"
            ) from error


def folder_name(peer: Peer) -> str:
    """Of the folder of one peer."""
    return f"{peer.role.value}-{peer.name}"


def write_file(path: Path, content: bytes, *, mode: int) -> None:
    """Replace a file in one step: a reader sees the old content or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
