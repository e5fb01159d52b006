"""Weights of groups from a file that somebody else writes, such as a config centre's mount, watched.

A file that cannot be used changes nothing: what is wrong with it, and where, is in the log and a metric.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from meshkit.errors import InvalidArgument
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

Weights = Mapping[str, Mapping[str, float]]
"""By model, then by group."""
Apply = Callable[[Weights], None]
"""Sets the weights of all models named; raises ValueError, and changes nothing, where any is wrong."""


def read_weights(text: str) -> Weights:
    """The weights of `{"MODEL": {"GROUP": WEIGHT, ...}, ...}`.

    Raises:
        InvalidArgument: (traffic_file) with the line, the model or the group at fault.
    """
    try:
        content: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    if not isinstance(content, dict):
        raise _wrong('it holds no object {"MODEL": {"GROUP": WEIGHT}}')
    for model, groups in content.items():
        if not isinstance(groups, dict) or not groups:
            raise _wrong(f'model {model!r} has no object {{"GROUP": WEIGHT}}')
        for group, weight in groups.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e9:
                raise _wrong(f"the weight of {group!r} of model {model!r} is {weight!r}; 0 or more is wanted")
    return content


class TrafficFile:
    """One file, looked at every `interval_s` seconds; applied when its content changed and can be used."""

    def __init__(
        self,
        path: Path,
        apply: Apply,
        *,
        interval_s: float,
        on_error: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._apply = apply
        self._interval_s = interval_s
        self._on_error = on_error
        self._sleep = sleep
        self._seen: str | None = None
        self.problem = ""
        """What is wrong with the present content; "" where it is in effect."""

    def __repr__(self) -> str:
        return f"<TrafficFile {self._path} {self.problem or 'in effect'}>"

    async def watch(self) -> None:
        """Look again and again; returns never."""
        while True:
            await self.look()
            await self._sleep(self._interval_s)

    async def look(self) -> None:
        """Apply the content if it changed since the last look."""
        try:
            text = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._tell(f"cannot be read: {error}", content=None)
            return
        if text == self._seen:
            return
        try:
            weights = read_weights(text)
            self._apply(weights)
        except InvalidArgument as error:
            self._tell(error.message, content=text)
        except ValueError as error:
            # Perhaps a group's first worker has still to come: the same content is tried again.
            self._tell(str(error), content=None)
        else:
            self._seen, self.problem = text, ""
            log.info("traffic file in effect", path=str(self._path), weights=weights)

    def _tell(self, problem: str, *, content: str | None) -> None:
        self._seen = content
        if problem != self.problem:
            self.problem = problem
            self._on_error()
            log.error("traffic file not in effect; the weights stay", path=str(self._path), problem=problem)


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(f"traffic_file: {message}", field="traffic_file")
