"""Certificates in files: what is refused at the start, and what happens when they are replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshkit.config import ServiceConfig, TlsConfig
from meshkit.errors import InvalidArgument
from meshkit.rpc.channel import open_channel
from meshkit.rpc.exposure import check_exposure
from meshkit.rpc.policy import Role
from meshkit.rpc.tls import PemFiles, service_files
from meshkit.telemetry.metrics import Metrics
from tests.support.certificates import LIFETIME, Pki


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def tls(pki: Pki) -> TlsConfig:
    return pki.good(Role.WORKER, "a")


def test_files_are_read_again_only_when_they_were_replaced(pki: Pki, tls: TlsConfig) -> None:
    files = service_files(tls)
    first = files.read()
    assert files.read_if_changed() is None
    pki.folder.rotate(lifetime=LIFETIME)
    second = files.read_if_changed()
    assert second is not None
    assert (second.certificate, second.key) != (first.certificate, first.key)
    assert second.authority == first.authority
    assert files.read_if_changed() is None


def test_a_half_changed_pair_is_not_used_and_is_read_when_it_is_whole(pki: Pki, tls: TlsConfig) -> None:
    files = service_files(tls)
    old_certificate = files.read().certificate
    pki.folder.rotate(lifetime=LIFETIME)
    new_certificate = tls.certificate.read_bytes()
    tls.certificate.write_bytes(old_certificate)
    assert files.read_if_changed() is None
    tls.certificate.write_bytes(new_certificate)
    pems = files.read_if_changed()
    assert pems is not None
    assert pems.certificate == new_certificate


def test_files_that_vanish_for_a_while_leave_what_was_read_in_use(tls: TlsConfig) -> None:
    files = service_files(tls)
    files.read()
    content = tls.key.read_bytes()
    tls.key.unlink()
    assert files.read_if_changed() is None
    tls.key.write_bytes(content)
    assert files.read_if_changed() is not None


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_missing_file_is_refused_by_its_field(tls: TlsConfig, name: str) -> None:
    path: Path = getattr(tls, name)
    path.unlink()
    with pytest.raises(InvalidArgument) as caught:
        service_files(tls).read()
    assert caught.value.field == f"tls.{name}"
    assert str(path) in caught.value.message
    assert "chipmesh certs create" in caught.value.message


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_file_of_something_else_is_refused_by_its_field(tls: TlsConfig, name: str) -> None:
    getattr(tls, name).write_text("no PEM")
    with pytest.raises(InvalidArgument) as caught:
        service_files(tls).read()
    assert caught.value.field in (f"tls.{name}", "tls.key")


def test_another_certificates_key_is_refused(pki: Pki, tls: TlsConfig) -> None:
    shutil.copy(pki.good(Role.WORKER, "b").key, tls.key)
    with pytest.raises(InvalidArgument, match="does not belong") as caught:
        service_files(tls).read()
    assert caught.value.field == "tls.key"


def test_a_listener_for_everybody_needs_no_authority(tls: TlsConfig) -> None:
    files = PemFiles(certificate=tls.certificate, key=tls.key, authority=None, field="listen_tls")
    assert files.read().authority is None
    tls.key.unlink()
    with pytest.raises(InvalidArgument) as caught:
        files.read()
    assert caught.value.field == "listen_tls.key"


def test_whoever_dials_with_a_certificate_says_whom_it_expects(tls: TlsConfig) -> None:
    with pytest.raises(ValueError, match="role"):
        open_channel("127.0.0.1:1", tls=tls)


BEYOND = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "scheduler:50061"]


@pytest.mark.parametrize("address", BEYOND)
def test_plain_text_beyond_this_host_is_refused_with_both_ways_out(address: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_exposure(ServiceConfig(), {"executor.listen": address}, metrics=Metrics())
    assert caught.value.field == "executor.listen"
    for word in (address, "tls", "certs create", "insecure_network"):
        assert word in caught.value.message


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:1", "[::1]:1", "unix:/tmp/x"])
def test_plain_text_within_this_host_is_fine(address: str) -> None:
    metrics = Metrics()
    check_exposure(ServiceConfig(), {"listen": address}, metrics=metrics)
    assert metrics.registry.get_sample_value("chipmesh_insecure_network") == 0


def test_a_trusted_network_is_said_at_each_start_and_seen_as_a_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    check_exposure(ServiceConfig(insecure_network=True), {"listen": BEYOND[0]}, metrics=metrics)
    assert metrics.registry.get_sample_value("chipmesh_insecure_network") == 1
    assert "insecure_network" in caplog.text
    assert BEYOND[0] in caplog.text


def test_a_certificate_allows_every_address(tls: TlsConfig) -> None:
    metrics = Metrics()
    check_exposure(ServiceConfig(tls=tls, insecure_network=True), {"listen": BEYOND[0]}, metrics=metrics)
    assert metrics.registry.get_sample_value("chipmesh_insecure_network") == 0
