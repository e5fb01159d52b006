"""Chips described in a file: sizes with units, the report's own names, and what is wrong by its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshkit.errors import InvalidArgument
from worker_svc.modelled_chips import ModelledChips, read_bytes, read_modelled_chips


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("40 GB", 40 * 10**9),
        ("32 GiB", 32 * 2**30),
        ("32GiB", 32 * 2**30),
        ("1.5 TB", 1500 * 10**9),
        ("0.1 GB", 10**8),
        ("25 GB/s", 25 * 10**9),
        ("80 G", 80 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_a_unit_of_ten_and_one_of_two_are_told_apart(text: object, nbytes: int) -> None:
    assert read_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "forty GB", "40 GX", "-1 GB", "0.3 B", "40 GB GB", None, True, 1.5])
def test_what_is_no_size_is_refused_with_the_way_out(text: object) -> None:
    with pytest.raises(ValueError, match=r"40 GB \(10\^9\), 32 GiB \(2\^30\)"):
        read_bytes(text)


def read(tmp_path: Path, text: str) -> ModelledChips:
    file = tmp_path / "chips.yaml"
    file.write_text(text, encoding="utf-8")
    return read_modelled_chips(file)


def test_a_chip_reports_what_the_file_says_and_conservative_answers_else(tmp_path: Path) -> None:
    chips = read(
        tmp_path,
        """
        chips:
          a:
            memory_total_bytes: 40 GB
            compute_dtypes: [bfloat16, float16]
            page_sizes_tokens: [64]
            preferred_chunk_tokens: 4096
            links: [{peer_device: 1, bandwidth_bytes_per_second: 300 GB/s}]
          a:3: {memory_total_bytes: 24 GiB, chip: half an a}
        """,
    )
    report = chips.find("a", 0).report("a")
    assert report.chip == "a"
    assert tuple(report.kv_cache_dtypes) == ("bfloat16", "float16")
    assert tuple(report.page_sizes_tokens) == (64,)
    assert report.links[0].bandwidth_bytes_per_second == 300 * 10**9
    assert report.graph_capture is False
    other = chips.find("a", 3)
    assert other.memory_total_bytes == 24 * 2**30
    assert other.report("a").chip == "half an a"
    assert tuple(other.compute_dtypes) == ("bfloat16",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chips: [", ["cannot be read"]),
        ("{}", ["chips"]),
        ("chips: {a: {}}", ["chips.a.memory_total_bytes"]),
        ("chips: {a: {memory_total_bytes: 40 GX}}", ["chips.a.memory_total_bytes", "40 GX"]),
        ("chips: {a: {memory_total_bytes: 0}}", ["chips.a.memory_total_bytes"]),
        ("chips: {a: {memory_total_bytes: 1 GB, memory: 2}}", ["'chips.a.memory' is unknown"]),
    ],
)
def test_a_wrong_file_is_refused_by_the_place_in_it(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read(tmp_path, text)
    assert refused.value.field == "--chips"
    assert all(word in refused.value.message for word in words), refused.value.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere\.yaml"):
        read_modelled_chips(tmp_path / "nowhere.yaml")


def test_a_chip_that_the_file_lacks_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    chips = read(tmp_path, "chips: {a: {memory_total_bytes: 1 GB}}")
    with pytest.raises(InvalidArgument, match="b:0 is not in the file of --chips; it has a"):
        chips.find("b", 0)


def test_a_dtype_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    chips = read(tmp_path, "chips: {a: {memory_total_bytes: 1 GB, compute_dtypes: [bf16]}}")
    with pytest.raises(InvalidArgument, match="bf16"):
        chips.find("a", 0).report("a")
