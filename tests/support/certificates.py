"""Certificates of a mesh for tests, and those of peers that must be refused."""

from __future__ import annotations

import enum
from datetime import datetime, timedelta, timezone
from pathlib import Path

from meshkit.certificates.folder import CertificateFolder, folder_name, write_file
from meshkit.certificates.issuing import make_leaf
from meshkit.certificates.reading import read_keyed
from meshkit.config import TlsConfig
from meshkit.rpc.policy import Peer, Role

LIFETIME = timedelta(days=30)


class Bad(enum.Enum):
    """Why a peer must be refused."""

    NO_CERTIFICATE = "no certificate"
    OTHER_AUTHORITY = "another authority's"
    EXPIRED = "an expired one"
    WRONG_ROLE = "a wrong role"
    OTHER_NAME = "the right role, another name"


class Pki:
    """One authority below `root`, and whoever is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root / "mesh"
        self.folder = CertificateFolder(self.root)
        self._others = root / "others"
        self._expired = root / "expired"

    def good(self, role: Role, name: str) -> TlsConfig:
        """What a member of the mesh has."""
        peer = Peer(role, name)
        self.folder.create([peer], lifetime=LIFETIME)
        return self._files(self.root / folder_name(peer))

    def bad(self, kind: Bad, role: Role, name: str, *, wrong: Role) -> TlsConfig:
        """What somebody has who wants to be taken for `name`. It trusts the mesh's authority: that it is
        refused must not be its own doing.
        """
        peer = Peer(role, name)
        if kind is Bad.OTHER_AUTHORITY:
            CertificateFolder(self._others).create([peer], lifetime=LIFETIME)
            return self._files(self._others / folder_name(peer))
        if kind is Bad.EXPIRED:
            return self._make_expired(peer)
        if kind is Bad.WRONG_ROLE:
            return self.good(wrong, name)
        if kind is Bad.OTHER_NAME:
            return self.good(role, f"not-{name}")
        raise ValueError(f"{kind} has no files")

    def _make_expired(self, peer: Peer) -> TlsConfig:
        authority = read_keyed(self.root / "authority.pem", self.root / "authority.key")
        long_ago = datetime.now(timezone.utc) - timedelta(days=60)
        leaf = make_leaf(peer, authority=authority, lifetime=timedelta(days=1), now=long_ago)
        folder = self._expired / folder_name(peer)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "certificate.pem", leaf.certificate_pem, mode=0o644)
        write_file(folder / "key.pem", leaf.key_pem, mode=0o600)
        return self._files(folder)

    def _files(self, folder: Path) -> TlsConfig:
        return TlsConfig(
            certificate=folder / "certificate.pem",
            key=folder / "key.pem",
            authority=self.root / "authority.pem",
        )
