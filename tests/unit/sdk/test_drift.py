"""A class that drifts from the contract cannot be defined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from plugins.sdk.backend import Backend
from plugins.sdk.drift import ContractDrift
from plugins.sdk.memory import Buffer, MemoryManager, PooledMemory
from plugins.sdk.operators import OperatorSet


def test_a_public_method_that_is_not_on_the_contract_is_rejected() -> None:
    with pytest.raises(ContractDrift, match=r"Extra\.warm_up is not on the contract"):

        class Extra(Backend):
            def warm_up(self) -> None: ...


def test_a_public_method_of_a_mixin_is_rejected_too() -> None:
    class Mixin:
        def warm_up(self) -> None: ...

    with pytest.raises(ContractDrift, match="warm_up"):

        class Mixed(Mixin, Backend):
            pass


def test_another_signature_is_rejected() -> None:
    with pytest.raises(ContractDrift, match=r"allocate.*differs from the contract"):

        class Renamed(PooledMemory):
            def allocate(
                self, size: Sequence[int], dtype: str, device: int | None = None, *, zeroed: bool = False
            ) -> Buffer:
                raise NotImplementedError


def test_another_default_is_rejected() -> None:
    with pytest.raises(ContractDrift, match="allocate"):

        class Defaulted(MemoryManager):
            def allocate(
                self, shape: Sequence[int], dtype: str, device: int | None = 0, *, zeroed: bool = False
            ) -> Buffer:
                raise NotImplementedError


def test_a_method_in_place_of_a_property_is_rejected() -> None:
    with pytest.raises(ContractDrift, match="property"):

        class Called(Backend):
            def devices(self) -> Any: ...  # type: ignore[override]


def test_private_names_and_annotations_are_the_plugins_own() -> None:
    class Fine(OperatorSet):
        def _helper(self) -> int:
            return 1

        def silu_mul(self, gate_up: Any) -> Any:
            return gate_up

    assert Fine.silu_mul is not OperatorSet.silu_mul
