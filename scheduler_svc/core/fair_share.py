"""How much each owner of requests was served, so that of those who wait the one served least goes next.

One account for each owner (a key of a gateway), in tokens computed for it; an output token counts for
several, as it takes a step of its own. Who comes back after it waited for nothing begins where those who wait
stand: turns are not saved up. (The idea is the virtual token counter of Sheng et al., OSDI 2024.)
"""

from __future__ import annotations

OUTPUT_WEIGHT = 2.0
"""What an output token counts beside one of the prompt; the field charges 2 to 5 times as much for it."""
_MOST_ACCOUNTS = 1024
"""More are kept only while they tell something."""


class FairShare:
    """Accounts of one queue."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._left_at = 0.0
        """The largest account of any that ceased to wait."""

    def __repr__(self) -> str:
        return f"<FairShare of {len(self._served)} owners, {len(self._waiting)} wait>"

    def __len__(self) -> int:
        """Accounts that are kept."""
        return len(self._served)

    def enter(self, owner: str) -> None:
        """It has requests that wait from now on, and had none."""
        own = self._served.get(owner, 0.0)
        self._served[owner] = max(
            own, min(map(self._served.__getitem__, self._waiting), default=self._left_at)
        )
        self._waiting.add(owner)

    def leave(self, owner: str) -> None:
        """None of its requests waits any more."""
        self._waiting.discard(owner)
        self._left_at = max(self._left_at, self._served[owner])
        if len(self._served) > _MOST_ACCOUNTS:
            self._served = {
                each: served
                for each, served in self._served.items()
                if each in self._waiting or served > self._left_at
            }

    def charge(self, owner: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """So much was computed for it, or will be now."""
        own = self._served.get(owner, self._left_at)
        self._served[owner] = own + prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def served(self, owner: str) -> float:
        """The account of one that waits."""
        return self._served[owner]
