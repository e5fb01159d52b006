"""Finds stop strings in streamed text without ever letting a part of one out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshkit.errors import InvalidArgument


@dataclass(frozen=True)
class StopResult:
    """text_to_emit: text that is certainly before any stop string. matched: the stop string that was found,
    or None.
    """

    text_to_emit: str
    matched: str | None


@dataclass
class _Node:
    """A prefix of some stop string. depth: its length. fallback: the longest proper suffix that is a prefix
    too.
    """

    depth: int
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    match: str | None = None


class StopMatcher:
    """Watches text for stop strings (Aho and Corasick's automaton, one step per character).

    The match that is complete first wins, and of those that are complete at the same character the longest.
    So the result does not depend on how the text was cut into pieces. Held back is only the longest end of
    the text that is the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidArgument (stop) for an empty stop string."""
        if "" in stops:
            raise InvalidArgument("stop: a stop string must not be empty", field="stop", reason="STOP_EMPTY")
        self._root = _build(stops)
        self._node = self._root
        self._held = ""
        self._matched: str | None = None

    def __repr__(self) -> str:
        return f"<StopMatcher held={self._held!r} matched={self._matched!r}>"

    @property
    def matched(self) -> str | None:
        """The stop string that was found so far."""
        return self._matched

    def feed(self, text: str) -> StopResult:
        """Take in more text. After a match everything further is dropped and the same match is reported."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._root.children:
            return StopResult(text, None)
        node, pending = self._node, self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            node = self._step(node, char)
            if node.match is not None:
                self._matched, self._held = node.match, ""
                return StopResult(pending[: end - len(node.match)], node.match)
        self._node = node
        cut = len(pending) - node.depth
        self._held = pending[cut:]
        return StopResult(pending[:cut], None)

    def flush(self) -> StopResult:
        """The text ends here: what was held back is no stop string and comes out."""
        held, self._held, self._node = self._held, "", self._root
        return StopResult(held, self._matched)

    def _step(self, node: _Node, char: str) -> _Node:
        following: _Node | None = node
        while following is not None:
            child = following.children.get(char)
            if child is not None:
                return child
            following = following.fallback
        return self._root


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(depth=node.depth + 1))
        node.match = stop
    for char, parent, node in _breadth_first(root):
        _link(node, char, parent, root)
    return root


def _breadth_first(root: _Node) -> Iterator[tuple[str, _Node, _Node]]:
    """Every node below the root with its last character and its parent, shallow ones first."""
    waiting = deque([root])
    while waiting:
        parent = waiting.popleft()
        for char, node in parent.children.items():
            yield char, parent, node
            waiting.append(node)


def _link(node: _Node, char: str, parent: _Node, root: _Node) -> None:
    fallback = parent.fallback
    while fallback is not None and char not in fallback.children:
        fallback = fallback.fallback
    node.fallback = root if fallback is None else fallback.children[char]
    if node.match is None:
        # A shorter stop string that ends here; the node's own would be longer and goes before it.
        node.match = node.fallback.match
