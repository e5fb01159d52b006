"""Rejects a plugin class that drifts from the contract, when the class is defined rather than when it is
used.
"""

from __future__ import annotations

import abc
import inspect
from typing import Any


class ContractDrift(TypeError):
    """A class has a public method that is not on its contract, or one with another signature."""


class ContractClass(abc.ABC):  # noqa: B024 - its subclasses are the ones with abstract methods
    """Base of the contract's classes. Those say `contract=True`; every other subclass is checked against
    them.

    Public names of a subclass have to be on the contract: what callers may use is what every chip has.
    Methods take the same parameters (names, kinds, defaults) as on the contract; annotations may be narrower.
    """

    _is_contract = False

    def __init_subclass__(cls, *, contract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._is_contract = contract
        if not contract:
            _check(cls)


def _check(cls: type[ContractClass]) -> None:
    contracts = [base for base in cls.__mro__ if base.__dict__.get("_is_contract")]
    offered = {name: member for base in reversed(contracts) for name, member in vars(base).items()}
    for base in cls.__mro__:
        if base in contracts or base in (ContractClass, abc.ABC, object):
            continue
        for name, member in vars(base).items():
            if not name.startswith("_"):
                _check_member(cls, name, member, offered)


def _check_member(cls: type, name: str, member: object, offered: dict[str, object]) -> None:
    if name not in offered:
        names = ", ".join(sorted(known for known in offered if not known.startswith("_")))
        raise ContractDrift(
            f"{cls.__name__}.{name} is not on the contract; prefix it with _ or take one of: {names}"
        )
    expected = offered[name]
    if callable(expected) and callable(member):
        _check_signature(cls, name, member, expected)
    elif isinstance(expected, property) and callable(member):
        raise ContractDrift(f"{cls.__name__}.{name} is a method; on the contract it is a property")
    elif callable(expected) and isinstance(member, property):
        raise ContractDrift(f"{cls.__name__}.{name} is a property; on the contract it is a method")


def _check_signature(cls: type, name: str, member: Any, expected: Any) -> None:
    got, wanted = _parameters(member), _parameters(expected)
    if got != wanted:
        raise ContractDrift(
            f"{cls.__name__}.{name}{inspect.signature(member)} differs from the contract's "
            f"{name}{inspect.signature(expected)}"
        )


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(function).parameters.values()]
