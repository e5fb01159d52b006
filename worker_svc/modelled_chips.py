"""Chips that are not here, described in a file: what a plan is made for before they are bought."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import yaml  # type: ignore[import-untyped]
from pydantic import BeforeValidator, Field

from meshkit.config import FrozenConfig, parse_config
from meshkit.errors import InvalidArgument
from plugins.sdk.capabilities import CapabilityReport, Coverage, LinkCapability, OperatorCapability
from plugins.sdk.report_checks import find_in_precisions, find_in_sizes

FLAG = "--chips"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?)?B?(?:/s)?")
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS |= {f"{prefix}i": 1 << (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_KV_OPERATORS = ("write_kv", "attention_prefill", "attention_decode")


def read_bytes(value: object) -> int:
    """A size: a number of bytes, or a text with a unit. 40 GB is 40 x 10^9, 32 GiB is 32 x 2^30; "/s" may
    follow.

    Raises:
        ValueError: anything else, and what is no whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = Decimal(match[1]) * _FACTORS.get(match[2] or "", 0) if match else Decimal(-1)
    if size < 0 or size != int(size):
        raise ValueError(f"{value!r} is no size; write bytes, or a unit: 40 GB (10^9), 32 GiB (2^30)")
    return int(size)


Bytes = Annotated[int, BeforeValidator(read_bytes), Field(ge=0)]


class ModelledLink(FrozenConfig):
    """A link to another device of the same name."""

    peer_device: int = Field(ge=0)
    bandwidth_bytes_per_second: Bytes


class ModelledChip(FrozenConfig):
    """What such a chip would report, by the report's own names.

    memory_free_bytes: left out: all. kv_cache_dtypes: left out: as it computes. Sizes of steps: 0: no
    preference.
    """

    memory_total_bytes: Bytes = Field(gt=0)
    memory_free_bytes: Bytes | None = None
    chip: str = ""
    compute_dtypes: tuple[str, ...] = Field(default=("bfloat16",), min_length=1)
    kv_cache_dtypes: tuple[str, ...] = ()
    page_sizes_tokens: tuple[int, ...] = ()
    preferred_chunk_tokens: int = Field(default=0, ge=0)
    preferred_batch_size: int = Field(default=0, ge=0)
    graph_capture: bool = False
    links: tuple[ModelledLink, ...] = ()

    def report(self, name: str) -> CapabilityReport:
        """As its plugin would give it. Its own operators are those that convert to its KV dtypes.

        Raises:
            InvalidArgument: (--chips) it contradicts itself, as a dtype that nobody knows.
        """
        report = CapabilityReport(
            chip=self.chip or name,
            operators=[OperatorCapability(each, Coverage.NATIVE) for each in _KV_OPERATORS],
            kv_layout="modelled",
            compute_dtypes=self.compute_dtypes,
            kv_cache_dtypes=self.kv_cache_dtypes or self.compute_dtypes,
            graph_capture=self.graph_capture,
            page_sizes_tokens=self.page_sizes_tokens,
            preferred_chunk_tokens=self.preferred_chunk_tokens,
            preferred_batch_size=self.preferred_batch_size,
            links=[LinkCapability(each.peer_device, each.bandwidth_bytes_per_second) for each in self.links],
        )
        if found := [*find_in_precisions(report), *find_in_sizes(report)]:
            raise InvalidArgument(f"{FLAG}: chip {name!r}: {'; '.join(found)}", field=FLAG)
        return report


class ModelledChips(FrozenConfig):
    """The file: chips by the name that `--device-groups` uses: `NAME` is all of them, `NAME:INDEX` one."""

    chips: dict[str, ModelledChip]

    def find(self, backend: str, index: int) -> ModelledChip:
        """The one of that index, else the one of that name.

        Raises:
            InvalidArgument: (--device-groups) the file has neither.
        """
        chip = self.chips.get(f"{backend}:{index}") or self.chips.get(backend)
        if chip is None:
            raise InvalidArgument(
                f"--device-groups: {backend}:{index} is not in the file of {FLAG}; it has "
                f"{', '.join(self.chips) or 'no chip'}",
                field="--device-groups",
            )
        return chip


def read_modelled_chips(file: Path) -> ModelledChips:
    """Read a YAML (or JSON) file.

    Raises:
        InvalidArgument: (--chips) it cannot be read, or the place in it that is wrong.
    """
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(f"{FLAG}: {file} cannot be read: {error}", field=FLAG) from error
    try:
        return parse_config(ModelledChips, document, source=str(file))
    except InvalidArgument as error:
        raise InvalidArgument(f"{FLAG}: {error.message}", field=FLAG) from error
