"""Golden greedy tokens of SmolLM2 in float32, by the reference implementation, and the near-tie rule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NEAR_TIE = 1e-3
"""Tokens need only agree up to a step whose two best logits lie within this (docs/architecture.md)."""

_REPOSITORY = Path(__file__).resolve().parents[2]
_SHARED = _REPOSITORY.parent / "shared" / "data" / "golden_smollm2.jsonl"
_COMMITTED = _REPOSITORY / "tests" / "data" / "golden_smollm2.jsonl"


@dataclass(frozen=True)
class Golden:
    """One prompt with its greedy continuation; `gaps`: the distance of the two best logits at each step."""

    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    gaps: list[float]

    def binding_tokens(self) -> list[int]:
        """The tokens that everybody must reproduce: all before the first near tie."""
        for index, gap in enumerate(self.gaps):
            if gap <= NEAR_TIE:
                return self.token_ids[:index]
        return self.token_ids

    def check(self, token_ids: Sequence[int], *, where: str = "") -> None:
        """Raise AssertionError unless `token_ids` agree up to the first near tie, else to the end."""
        binding = self.binding_tokens()
        assert list(token_ids[: len(binding)]) == binding, (
            f"{where}: tokens of {self.prompt!r} differ from the reference"
        )
        if len(binding) == len(self.token_ids):
            assert len(token_ids) == len(binding), (
                f"{where}: {self.prompt!r} went on after the reference's end"
            )


def load_golden() -> list[Golden]:
    """All 24 prompts where the shared data lies beside the checkout, else the few that are committed."""
    source = _SHARED if _SHARED.exists() else _COMMITTED
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    return [
        Golden(row["prompt"], row["prompt_token_ids"], row["token_ids"], row["text"], row["top2_logit_gap"])
        for row in rows
    ]
