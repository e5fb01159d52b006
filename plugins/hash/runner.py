"""Runs the hash model: every token is computed from what is read back through the slot's page table."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from meshkit.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from meshkit.modelstore import default_cache_dir, open_model
from plugins.hash.cells import CELL_BYTES, TOKEN_BYTES, CellPages
from plugins.hash.digest import SEED, extend, token_of
from plugins.hash.faults import ChipFaults
from plugins.hash.options import HashOptions
from plugins.hash.ranks import HashRanks
from plugins.sdk.runner import (
    DecodeRows,
    FloatArray,
    IntArray,
    LoadedModel,
    LoadOptions,
    ModelRunner,
    PrefillRow,
    Progress,
    SlotAdmission,
    StepBatch,
    StepOutput,
)

DEFAULT_VOCAB_SIZE = 32_000
DEFAULT_CONTEXT_TOKENS = 131_072
KV_LAYOUT = "hash_cells"
KV_DTYPE = "uint8"
NUMERIC_CLASS = "exact"


class _SlotState:
    """One request: its last token, and the digest re-derived from its pages so far."""

    __slots__ = ("derived_digest", "derived_tokens", "last_token", "logprobs")

    def __init__(self, *, logprobs: bool) -> None:
        self.logprobs = logprobs
        self.last_token = b""
        self.derived_tokens = b""
        self.derived_digest = SEED

    def derive(self, tokens: bytes) -> list[bytes]:
        """Digests after each of `tokens` (4 bytes each) that follows those derived before.

        Deriving is a pure function of the tokens, so it goes on from the longest run that was derived, if
        that is still what the pages hold; else from the start. Returns the digests of the new tokens.
        """
        if not tokens.startswith(self.derived_tokens):
            self.derived_tokens, self.derived_digest = b"", SEED
        digest = self.derived_digest
        digests: list[bytes] = []
        for offset in range(len(self.derived_tokens), len(tokens), TOKEN_BYTES):
            digest = extend(digest, tokens[offset : offset + TOKEN_BYTES])
            digests.append(digest)
        self.derived_tokens, self.derived_digest = tokens, digest
        return digests


class HashRunner(ModelRunner):
    """The hash model. Sampling parameters have no effect: there is one token that can follow.

    Ranks of a set have the whole model each, and after every step all must have made the same tokens: that
    they got the same plans in the same order is what a set of them proves.
    """

    takes_ranks: ClassVar[bool] = True

    def __init__(self, options: HashOptions) -> None:
        self._options = options
        self._faults = ChipFaults(options)
        self._model: LoadedModel | None = None
        self._cells: CellPages | None = None
        self._slots: dict[int, _SlotState] = {}
        self._logprob_slots = 0
        self._vocab_size = DEFAULT_VOCAB_SIZE
        self._ranks: HashRanks | None = None

    def load(self, options: LoadOptions, progress: Progress) -> LoadedModel:
        """Read vocab_size and context length from `options.model_path`; "" means 32000 and 131072."""
        self._faults.before_load()
        progress("model description", 0.0)
        vocab_size, context_tokens = _read_sizes(options, progress)
        unknown = next((token for token in self._options.eos if token >= vocab_size), None)
        if unknown is not None:
            raise InvalidArgument(
                f"backend_options.eos names token {unknown}; the model has {vocab_size}",
                field="backend_options.eos",
            )
        if options.quantization:
            raise InvalidArgument(
                f"quantization is {options.quantization!r}; the hash model has no weights: leave it out",
                field="quantization",
            )
        self._vocab_size = vocab_size
        self._model = LoadedModel(
            architecture="HashModel",
            vocab_size=vocab_size,
            context_tokens=context_tokens,
            kv_bytes_per_token=CELL_BYTES,
            weight_bytes=0,
            weights_version=f"sha256-{vocab_size}",
            numeric_class=NUMERIC_CLASS,
            kv_cache_dtype=_only(options.kv_cache_dtype, KV_DTYPE, "kv_cache_dtype"),
            kv_layout=KV_LAYOUT,
            eos_token_ids=self._options.eos,
        )
        progress("model description", 1.0)
        if options.parallel is not None:
            self._ranks = HashRanks(options.parallel)
        return self._model

    def allocate_kv_cache(self, *, page_count: int, page_size: int, max_slots: int) -> int:
        """Allocate cells; `max_slots` costs nothing here."""
        if self._model is None:
            raise FailedPrecondition("no model is loaded; call LoadModel first")
        try:
            self._cells = CellPages(page_count=page_count, page_size=page_size)
        except (MemoryError, ValueError) as error:
            wanted = page_count * page_size * CELL_BYTES
            raise ResourceExhausted(
                f"{page_count} pages of {page_size} tokens take {wanted} bytes: {error}", field="page_count"
            ) from error
        self.reset()
        return self._cells.nbytes

    def admit(self, admission: SlotAdmission, page_ids: IntArray) -> None:
        """Derive the digest of the cached prefix from its pages."""
        self._faults.admitted(admission.slot)
        state = _SlotState(logprobs=admission.sampling.logprobs)
        if admission.cached_tokens:
            state.derive(self._pages.read_tokens(page_ids, admission.cached_tokens))
        self._slots[admission.slot] = state
        self._logprob_slots += state.logprobs

    def release(self, slot: int) -> None:
        """Forget the slot."""
        state = self._slots.pop(slot)
        self._logprob_slots -= state.logprobs

    def run_step(self, batch: StepBatch) -> StepOutput:
        """Extend each row by its tokens; takes at least the modelled time. ResourceExhausted on request."""
        start = time.monotonic()
        self._faults.before_step(batch)
        slots: list[int] = []
        tokens: list[int] = []
        if batch.decode is not None:
            slots += batch.decode.slots.tolist()
            tokens += self._decode(batch.decode)
        for row in batch.prefill:
            token = self._prefill(row)
            if row.samples:
                slots.append(row.slot)
                tokens.append(token)
        self._wait_for_model_time(start, batch)
        self._agree(slots, tokens)
        return StepOutput(
            slots=np.array(slots, dtype=np.int32),
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=self._logprobs(len(slots)),
        )

    def reset(self) -> None:
        """Forget all slots; the cells keep what they hold."""
        self._slots.clear()
        self._logprob_slots = 0

    def unload(self) -> None:
        """Free the cells."""
        self.reset()
        self._cells = None
        self._model = None
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def exchange(self, text: str) -> Sequence[str]:
        """By the set's sockets."""
        return (text,) if self._ranks is None else self._ranks.exchange(text)

    def _agree(self, slots: list[int], tokens: list[int]) -> None:
        if self._ranks is None:
            return
        said = self._ranks.exchange(json.dumps([slots, tokens]))
        if len(set(said)) > 1:
            raise RuntimeError(f"the ranks of a set differ in what a step made: {'; '.join(said)}"[:500])

    @property
    def _pages(self) -> CellPages:
        if self._cells is None:
            raise FailedPrecondition("no KV cache is allocated; call AllocateKvCache first")
        return self._cells

    def _decode(self, rows: DecodeRows) -> list[int]:
        """Write each slot's last token at its position and compute the next one, in row order."""
        pages, slots, vocab_size = self._pages, self._slots, self._vocab_size
        # A decode row always has a token before it: the prompt holds at least one.
        before = pages.cells(rows.page_table, rows.positions - 1).tolist()
        cells = pages.cells(rows.page_table, rows.positions).tolist()
        fills = ((rows.positions + 1) % pages.page_size == 0).tolist()
        tokens: list[int] = []
        for index, slot in enumerate(rows.slots.tolist()):
            state = slots[slot]
            digest = extend(pages.read_digest(before[index]), state.last_token)
            pages.write(cells[index], state.last_token, digest)
            if fills[index]:
                digest = self._derive_again(state, rows.page_table[index], int(rows.positions[index]) + 1)
                pages.write(cells[index], state.last_token, digest)
            token = token_of(digest, vocab_size)
            state.last_token = token.to_bytes(TOKEN_BYTES, "big")
            tokens.append(token)
        return tokens

    def _derive_again(self, state: _SlotState, page_ids: IntArray, count: int) -> bytes:
        state.derive(self._pages.read_tokens(page_ids, count))
        return state.derived_digest

    def _prefill(self, row: PrefillRow) -> int:
        """Write a run of tokens and their digests; returns the token that follows it."""
        pages, state = self._pages, self._slots[row.slot]
        end = row.start + len(row.token_ids)
        pages.write_tokens(row.page_ids, row.start, row.token_ids)
        digests = state.derive(pages.read_tokens(row.page_ids, end))
        # After a wrong page the derivation starts over and returns more than the run: its end is what is new.
        pages.write_digests(row.page_ids, row.start, digests[-len(row.token_ids) :])
        token = token_of(state.derived_digest, self._vocab_size)
        state.last_token = token.to_bytes(TOKEN_BYTES, "big")
        return token

    def _logprobs(self, count: int) -> FloatArray | None:
        """The token had probability one: log 0."""
        return np.zeros(count, dtype=np.float32) if self._logprob_slots else None

    def _wait_for_model_time(self, start: float, batch: StepBatch) -> None:
        seconds = self._options.step_ms / 1000
        rate = self._options.prefill_tokens_per_s
        if rate:
            seconds += sum(len(row.token_ids) for row in batch.prefill) / rate
        left = start + seconds - time.monotonic()
        if left > 0:
            time.sleep(left)


def _read_sizes(options: LoadOptions, progress: Progress) -> tuple[int, int]:
    """vocab_size and context length, in tokens."""
    if not options.model_path:
        return DEFAULT_VOCAB_SIZE, DEFAULT_CONTEXT_TOKENS
    described = Path(options.model_path).expanduser() / "config.json"
    if described.is_file():
        return _sizes_of_config(described)
    cache_dir = Path(options.cache_dir) if options.cache_dir else default_cache_dir()
    folder = open_model(options.model_path, cache_dir=cache_dir, progress=progress, need_weights=False)
    return folder.vocab_size, folder.context_length


def _sizes_of_config(file: Path) -> tuple[int, int]:
    """The two numbers of a config.json: of any architecture, since no weights are read."""
    try:
        config = json.loads(file.read_bytes())
        vocab_size = int(config.get("vocab_size", DEFAULT_VOCAB_SIZE))
        context_tokens = int(config.get("max_position_embeddings", DEFAULT_CONTEXT_TOKENS))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"model_path: {file} cannot be read: {error}", field="model_path") from error
    if vocab_size < 1 or context_tokens < 1:
        raise InvalidArgument(
            f"model_path: {file} has vocab_size {vocab_size} and max_position_embeddings {context_tokens}; "
            "both must be at least 1",
            field="model_path",
        )
    return vocab_size, context_tokens


def _only(requested: str, offered: str, field: str) -> str:
    if requested not in {"auto", offered}:
        raise InvalidArgument(f"{field} is {requested!r}; this chip offers {offered!r}", field=field)
    return offered
