"""Certificates as `chipmesh certs create` writes them, and as they go wrong."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from meshkit.certificates.folder import CertificateFolder
from meshkit.cli.doctor.check_certificates import check_certificates
from meshkit.cli.doctor.facts import CertificateFacts, Facts, Target
from meshkit.cli.doctor.probe_certificates import CertificateFiles, read_authority, read_set, sets_in, sets_of
from meshkit.rpc.policy import Peer, Role

NOW = datetime.now(timezone.utc)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one mesh, made today."""
    peers = [Peer(Role.SCHEDULER, "s"), Peer(Role.WORKER, "a"), Peer(Role.OPERATOR, "admin")]
    CertificateFolder(tmp_path / "certs", now=NOW).create(peers, lifetime=timedelta(days=90))
    return tmp_path / "certs"


def said(*facts: CertificateFacts | None, now: datetime = NOW) -> list[str]:
    found = tuple(each for each in facts if each is not None)
    findings = check_certificates(Facts(now=now, own_version="", certificates=found)).findings
    return [finding.found for finding in findings]


def files_of(
    folder: Path, name: str, *, role: str | None = None, owner: str | None = None
) -> CertificateFiles:
    each = folder / name
    return CertificateFiles(each / "certificate.pem", each / "key.pem", each / "authority.pem", role, owner)


def test_what_certs_create_makes_is_right(folder: Path) -> None:
    sets = list(sets_in(folder))
    assert [Path(each.certificate).parent.name for each in sets] == [
        "operator-admin",
        "scheduler-s",
        "worker-a",
    ]
    assert said(read_authority(folder), *(read_set(each) for each in sets)) == []


def test_a_peers_own_folder_is_a_set_and_no_authority(folder: Path) -> None:
    own = folder / "worker-a"
    assert [each.certificate.parent for each in sets_in(own)] == [own]
    assert read_authority(own) is None


def test_a_certificate_that_has_expired_is_told_with_the_hour(folder: Path) -> None:
    (text,) = said(read_set(files_of(folder, "worker-a")), now=NOW + timedelta(days=91))
    assert "has expired at" in text


def test_a_key_that_everybody_may_read_is_told(folder: Path) -> None:
    (folder / "worker-a/key.pem").chmod(0o644)
    (text,) = said(read_set(files_of(folder, "worker-a")))
    assert "mode 0644" in text


def test_an_authoritys_key_that_its_group_may_read_is_told(folder: Path) -> None:
    (folder / "authority.key").chmod(0o640)
    (text,) = said(read_authority(folder))
    assert "mode 0640" in text


def test_a_key_of_another_certificate_is_told(folder: Path) -> None:
    (folder / "worker-a/key.pem").write_bytes((folder / "scheduler-s/key.pem").read_bytes())
    (text,) = said(read_set(files_of(folder, "worker-a")))
    assert "is not the key of" in text


def test_an_authority_of_another_mesh_is_told(folder: Path, tmp_path: Path) -> None:
    CertificateFolder(tmp_path / "other").create([Peer(Role.WORKER, "a")], lifetime=timedelta(days=9))
    bundle = (tmp_path / "other/authority.pem").read_bytes()
    (folder / "worker-a/authority.pem").write_bytes(bundle)
    (text,) = said(read_set(files_of(folder, "worker-a")))
    assert "not signed by" in text


def test_the_certificate_of_another_worker_or_role_is_told(folder: Path) -> None:
    assert (
        "of worker a, where b shows it"
        in said(read_set(files_of(folder, "worker-a", role="worker", owner="b")))[0]
    )
    assert (
        "of role worker, where a gateway" in said(read_set(files_of(folder, "worker-a", role="gateway")))[0]
    )


def test_a_missing_and_a_damaged_file_are_told_by_their_path(folder: Path) -> None:
    (folder / "worker-a/key.pem").unlink()
    assert str(folder / "worker-a/key.pem") in said(read_set(files_of(folder, "worker-a")))[0]
    (folder / "scheduler-s/certificate.pem").write_text("none")
    assert "certificate.pem" in said(read_set(files_of(folder, "scheduler-s")))[0]


def test_configurations_name_sets_with_their_role_and_a_worker_its_name(folder: Path) -> None:
    def tls(name: str) -> dict[str, str]:
        names = ("certificate", "key", "authority")
        return {each: str(folder / name / f"{each}.pem") for each in names}

    scheduler = Target("scheduler", "scheduler", config={"tls": tls("scheduler-s")})
    worker = Target("a", "worker", config={"tls": tls("worker-a")})
    public = {
        "certificate": str(folder / "scheduler-s/certificate.pem"),
        "key": str(folder / "scheduler-s/key.pem"),
    }
    gateway = Target("gateway", "gateway", config={"listen_tls": public})
    sets = list(sets_of([scheduler, worker, gateway]))
    assert [(each.role, each.name) for each in sets] == [("scheduler", None), ("worker", "a"), (None, None)]
    assert said(*(read_set(each) for each in sets)) == []
