"""Options for a device plugin as people type them: KEY=VALUE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshkit.errors import InvalidArgument


def read_backend_options(words: Sequence[str], *, flag: str) -> dict[str, str]:
    """Options by name. flag: where `words` come from, for errors.

    Raises:
        InvalidArgument: a word of another form.
    """
    pairs = [word.partition("=") for word in words]
    for word, (key, equals, _) in zip(words, pairs, strict=True):
        if not key or not equals:
            raise InvalidArgument(f"{flag}: {word!r} has not the form KEY=VALUE", field=flag)
    return {key: value for key, _, value in pairs}


def options_for(backend: str, options: Mapping[str, str]) -> dict[str, str]:
    """Those for all back ends, and those that name this one: `BACKEND.KEY`."""
    chosen: dict[str, str] = {}
    for key, value in options.items():
        scope, dot, name = key.partition(".")
        if not dot:
            chosen[key] = value
        elif scope == backend:
            chosen[name] = value
    return chosen
