"""Options for a device plugin as people type them: KEY=VALUE."""

from __future__ import annotations

from collections.abc import Sequence

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
