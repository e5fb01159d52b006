"""What `chipmesh certs` makes, keeps, replaces and shows."""

from __future__ import annotations

import json
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509

from meshkit.certificates.folder import CertificateFolder, folder_name
from meshkit.certificates.reading import is_signed_by, read_certificates, read_keyed, read_peer
from meshkit.cli.certs import create_certificates, rotate_certificates, show_certificates
from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError
from meshkit.rpc.policy import Peer, Role

PEERS = [Peer(Role.GATEWAY, "gateway"), Peer(Role.SCHEDULER, "scheduler"), Peer(Role.WORKER, "worker-a"),
         Peer(Role.OPERATOR, "admin")]  # fmt: skip
DAYS = timedelta(days=90)
NOW = datetime.now(timezone.utc)


def at(root: Path, days: float = 0) -> CertificateFolder:
    """The folder, so many days from now."""
    return CertificateFolder(root, now=NOW + timedelta(days=days))


def content(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*.*") if file.name != ".lock"
    }


def leaf(root: Path, peer: Peer) -> x509.Certificate:
    return read_certificates(root / folder_name(peer) / "certificate.pem")[0]


def test_each_peer_gets_a_folder_with_all_that_it_needs_and_nothing_else(tmp_path: Path) -> None:
    made = at(tmp_path).create(PEERS, lifetime=DAYS)
    assert made.written == (
        "authority",
        "gateway-gateway",
        "scheduler-scheduler",
        "worker-worker-a",
        "operator-admin",
    )
    authority = read_keyed(tmp_path / "authority.pem", tmp_path / "authority.key").certificate
    for peer in PEERS:
        folder = tmp_path / folder_name(peer)
        assert sorted(file.name for file in folder.iterdir()) == [
            "authority.pem",
            "certificate.pem",
            "key.pem",
        ]
        certificate = read_keyed(folder / "certificate.pem", folder / "key.pem").certificate
        assert is_signed_by(certificate, authority)
        assert read_peer(folder / "certificate.pem") == peer
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
            f"chipmesh://{peer.role.value}/{peer.name}"
        ]
        assert names.get_values_for_type(x509.DNSName) == [
            f"{peer.role.value}.chipmesh.internal", f"{peer.name}.{peer.role.value}.chipmesh.internal",
        ]  # fmt: skip
        assert timedelta(days=89) < certificate.not_valid_after_utc - NOW <= DAYS


def test_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    keys = [tmp_path / "authority.key", *tmp_path.glob("*/key.pem")]
    assert len(keys) == 1 + len(PEERS)
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    before = content(tmp_path)
    made = at(tmp_path, days=50).create(PEERS, lifetime=DAYS)
    assert made.written == ()
    assert set(made.kept) == {folder_name(peer) for peer in PEERS}
    assert content(tmp_path) == before


def test_a_leaf_with_less_than_a_third_of_its_life_left_is_made_anew_with_a_new_key(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    before = content(tmp_path)
    made = at(tmp_path, days=65).create([*PEERS, Peer(Role.WORKER, "worker-b")], lifetime=DAYS)
    assert made.kept == ()
    assert "authority" not in made.written
    after = content(tmp_path)
    for peer in PEERS:
        for name in ("certificate.pem", "key.pem"):
            file = f"{folder_name(peer)}/{name}"
            assert after[file] != before[file]
    assert after["authority.pem"] == before["authority.pem"]


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem", "authority.pem"])
def test_a_folder_that_lost_a_file_or_mixed_them_up_is_made_whole(tmp_path: Path, name: str) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    file = tmp_path / folder_name(PEERS[2]) / name
    file.unlink()
    assert at(tmp_path).create(PEERS, lifetime=DAYS).written == (folder_name(PEERS[2]),)
    if name == "key.pem":
        file.write_bytes((tmp_path / folder_name(PEERS[0]) / name).read_bytes())
        assert at(tmp_path).create(PEERS, lifetime=DAYS).written == (folder_name(PEERS[2]),)
    read_keyed(file.parent / "certificate.pem", file.parent / "key.pem")
    assert (file.parent / "authority.pem").read_bytes() == (tmp_path / "authority.pem").read_bytes()


def test_rotate_gives_everybody_a_new_leaf_of_the_same_authority(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    before = content(tmp_path)
    assert set(at(tmp_path).rotate(lifetime=DAYS).written) == {folder_name(peer) for peer in PEERS}
    after = content(tmp_path)
    assert {name for name in before if before[name] == after[name]} == {
        "authority.pem", "authority.key", *(f"{folder_name(peer)}/authority.pem" for peer in PEERS)
    }  # fmt: skip


def test_a_new_authority_is_trusted_beside_the_former_one_until_that_is_retired(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    (first,) = read_certificates(tmp_path / "authority.pem")
    at(tmp_path).rotate(lifetime=DAYS, new_authority=True)
    second, former = read_certificates(tmp_path / "authority.pem")
    assert former == first
    for peer in PEERS:
        assert is_signed_by(leaf(tmp_path, peer), second)
        assert not is_signed_by(leaf(tmp_path, peer), first)
        assert read_certificates(tmp_path / folder_name(peer) / "authority.pem") == [second, first]
    at(tmp_path).retire()
    for bundle in (tmp_path / "authority.pem", *tmp_path.glob("*/authority.pem")):
        assert read_certificates(bundle) == [second]
    assert at(tmp_path).create(PEERS, lifetime=DAYS).written == ()


def test_an_authority_whose_leaves_are_in_use_is_not_retired(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    kept = (tmp_path / "worker-worker-a" / "certificate.pem").read_bytes()
    at(tmp_path).rotate(lifetime=DAYS, new_authority=True)
    (tmp_path / "worker-worker-a" / "certificate.pem").write_bytes(kept)
    with pytest.raises(FailedPrecondition, match="worker-worker-a"):
        at(tmp_path).retire()


def test_an_interrupted_change_of_the_authority_leaves_the_former_one_working(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    key = (tmp_path / "authority.key").read_bytes()
    at(tmp_path).rotate(lifetime=DAYS, new_authority=True)
    (tmp_path / "authority.key").write_bytes(key)
    assert set(at(tmp_path).create(PEERS, lifetime=DAYS).written) == {folder_name(peer) for peer in PEERS}
    former = read_certificates(tmp_path / "authority.pem")[1]
    assert all(is_signed_by(leaf(tmp_path, peer), former) for peer in PEERS)


def test_an_expired_authority_is_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    later = at(tmp_path, days=3700)
    with pytest.raises(FailedPrecondition, match=r"rotate .* --authority"):
        later.create(PEERS, lifetime=DAYS)
    later.rotate(lifetime=DAYS, new_authority=True)
    assert len(read_certificates(tmp_path / "authority.pem")) == 1, "an expired authority helps nobody"


def test_a_leaf_never_outlives_its_authority(tmp_path: Path) -> None:
    at(tmp_path).create(PEERS, lifetime=DAYS)
    at(tmp_path, days=3640).create(PEERS, lifetime=DAYS)
    authority = read_certificates(tmp_path / "authority.pem")[0]
    assert leaf(tmp_path, PEERS[0]).not_valid_after_utc == authority.not_valid_after_utc


@pytest.mark.parametrize(
    "name", ["*", "", "Worker", "a b", "a/b", "-a", "a..b", "a*", "é", "x" * 201, "../a"]
)
def test_a_name_that_could_mean_another_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        create_certificates(tmp_path, {Role.WORKER: [name]})
    assert caught.value.field == "--worker"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match="file"):
        at(tmp_path / "file" / "certs").create(PEERS, lifetime=DAYS)


def test_rotating_what_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="certs create"):
        rotate_certificates(tmp_path)


def test_the_commands_say_what_they_did_and_show_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {Role.SCHEDULER: ["scheduler"], Role.WORKER: ["worker-a", "worker-b"]}
    create_certificates(tmp_path, names, days=30, as_json=True)
    made = json.loads(capsys.readouterr().out)
    assert made == {
        "written": ["authority", "scheduler-scheduler", "worker-worker-a", "worker-worker-b"], "kept": [],
    }  # fmt: skip
    rotate_certificates(tmp_path, new_authority=True)
    assert "written worker-worker-b" in capsys.readouterr().out
    show_certificates(tmp_path, as_json=True)
    shown = {each.pop("folder"): each for each in json.loads(capsys.readouterr().out)["certificates"]}
    assert list(shown) == [
        "authority", "authority former 1", "scheduler-scheduler", "worker-worker-a", "worker-worker-b",
    ]  # fmt: skip
    worker = shown["worker-worker-b"]
    assert (worker["role"], worker["name"]) == ("worker", "worker-b")
    assert worker["authority_fingerprint"] == shown["authority"]["fingerprint"]
    assert int(worker["serial"], 16) > 0
    assert datetime.fromisoformat(worker["from"]) < NOW < datetime.fromisoformat(worker["until"])
    show_certificates(tmp_path)
    table = capsys.readouterr().out
    assert worker["serial"][:16] in table
    assert "authority former 1" in table


@pytest.mark.parametrize("days", [0, -1, 3651])
def test_a_lifetime_that_nobody_means_is_refused(tmp_path: Path, days: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        create_certificates(tmp_path, {Role.WORKER: ["a"]}, days=days)
    assert caught.value.field == "--days"


def test_nobody_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--worker"):
        create_certificates(tmp_path, {})
