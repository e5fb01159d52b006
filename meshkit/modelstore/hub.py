"""Models of the Hugging Face hub, or of the mirror that HF_ENDPOINT names, under their ids `org/name`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.errors import NotFound, Unavailable
from meshkit.modelstore.layouts import complete_config
from meshkit.modelstore.progress import Progress

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONFIG = "config.json"
_ENDINGS = (".json", ".jinja", ".safetensors")


def is_hub_id(reference: str) -> bool:
    """Whether `reference` has the form org/name."""
    return _ID.fullmatch(reference) is not None


def fill_from_hub(repo: str, folder: Path, *, downloads: Path, progress: Progress) -> None:
    """Put the model's files into `folder`, as links into `downloads`, where an interrupted download goes on.

    Of its newest revision: configuration, tokenizer and safetensors at its top. The configuration comes
    first, so that a model that we do not run costs no gigabytes.

    Raises:
        InvalidArgument: (model_path) a configuration that we do not run.
        NotFound: (name) no such model, one that needs a token, or one without safetensors.
        Unavailable: the hub cannot be reached, or may not be (HF_HUB_OFFLINE).
    """
    with _hub_errors(repo):
        listing = _list_files(repo)
        config = _fetch(listing, _CONFIG, downloads, _unwatched)
        complete_config(json.loads(config.read_bytes()), source=repo)
        total, done = max(1, sum(listing.sizes.values())), 0
        for name, size in listing.sizes.items():

            def report(nbytes: float, before: int = done) -> None:
                progress("downloading", min(1.0, (before + nbytes) / total))

            file = _fetch(listing, name, downloads, report)
            (folder / name).symlink_to(file.resolve())
            done += size
            report(size)


@dataclass(frozen=True)
class _Listing:
    """One revision of a model. sizes: bytes by name, of the files that are wanted."""

    repo: str
    revision: str
    sizes: dict[str, int]


def _list_files(repo: str) -> _Listing:
    from huggingface_hub import HfApi  # noqa: PLC0415 - half a second that only pulls pay

    info = HfApi().model_info(repo, files_metadata=True)
    found: Sequence[Any] = info.siblings or ()
    sizes = {
        each.rfilename: int(each.size or 0)
        for each in sorted(found, key=lambda each: str(each.rfilename))
        # What lies in folders are other forms of the same model.
        if each.rfilename.endswith(_ENDINGS) and "/" not in each.rfilename
    }
    if _CONFIG not in sizes or not any(name.endswith(".safetensors") for name in sizes):
        raise NotFound(
            f"{repo} has no {_CONFIG} with safetensors at its top; its files: "
            f"{', '.join(each.rfilename for each in found[:20]) or 'none'}. A GGUF is opened by its path: "
            "fetch that file",
            field="name",
            reason="MODEL_UNKNOWN",
            name=repo,
        )
    return _Listing(repo, str(info.sha), sizes)


def _fetch(listing: _Listing, name: str, downloads: Path, report: Callable[[float], None]) -> Path:
    """A file in `downloads`. report: called with the bytes that have come."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    more: dict[str, Any] = {}
    if "tqdm_class" in inspect.signature(hf_hub_download).parameters:
        more["tqdm_class"] = _reporting_bar(report)
    return Path(hf_hub_download(listing.repo, name, revision=listing.revision, cache_dir=downloads, **more))


def _unwatched(nbytes: float) -> None:
    del nbytes


def _reporting_bar(report: Callable[[float], None]) -> type[Any]:
    """A progress bar of the hub's library that draws nothing."""
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            report(self.n)

    return ReportingBar


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """What the hub's library raises, as ours."""
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise NotFound(
            f"the hub has no model {repo!r} for us: it does not exist, or it needs a token (HF_TOKEN) of "
            f"somebody who accepted its terms: {_in_short(error)}",
            field="name",
            reason="MODEL_UNKNOWN",
            name=repo,
        ) from error
    except _failures() as error:
        raise Unavailable(
            f"{repo!r} could not be fetched from the hub: {_in_short(error)}. Set HF_ENDPOINT to a mirror "
            "that can be reached from here, or copy the model's folder and give its path",
            reason="MODEL_DOWNLOAD_FAILED",
        ) from error


def _failures() -> tuple[type[BaseException], ...]:
    """OSError, and the base of the HTTP client that the hub's library uses: it changed over its versions."""
    from huggingface_hub import errors  # noqa: PLC0415

    bases: Sequence[type[BaseException]] = errors.HfHubHTTPError.__mro__[:-1]
    return (OSError, *(base for base in bases if base.__name__ in ("HTTPError", "RequestException")))


def _in_short(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
