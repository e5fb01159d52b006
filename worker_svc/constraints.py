"""Which tokens the slots with a constraint may take next, and how their outputs go on.

Runs on the device thread, save the compiling of a form and the replay of an output, which a thread of their
own does: both are due only when the slot samples. No torch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshkit.constraints.form import Constraint
from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.telemetry.logging import get_logger
from plugins.sdk.runner import (
    AllowedTokens,
    IntArray,
    LoadedModel,
    RowFailure,
    SlotAdmission,
    StepBatch,
    StepOutput,
    WordArray,
)

if TYPE_CHECKING:  # imported where a model is loaded: an executor without llguidance serves all else
    from meshkit.constraints.matching import ConstraintCompiler, Matcher

log = get_logger(__name__)

START_LIMIT_S = 10.0
"""For compiling and replay together: a gateway lets pass what takes a fraction of a second."""
MAX_COMPILED = 64
"""Forms whose beginnings are kept: many requests share one."""
UNSUPPORTED = "CONSTRAINT_UNSUPPORTED"
FAILED = "CONSTRAINT_FAILED"


class StepConstraints:
    """The constraints of all slots of one loaded model.

    reason: why there are none here, "" where there are. seconds: spent since `take_seconds` was called last.
    """

    def __init__(
        self,
        compiler: ConstraintCompiler | None = None,
        *,
        reason: str = "no model is loaded",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._compiled = None if compiler is None else _CompiledForms(compiler)
        self.reason = "" if compiler is not None else reason
        self._clock = clock
        self._slots: dict[int, _Follower] = {}
        self._seconds: float | None = None

    def __repr__(self) -> str:
        return f"<StepConstraints {self.reason or f'{len(self._slots)} slots'}>"

    @classmethod
    def of(cls, model: LoadedModel, *, runner_takes_them: bool) -> StepConstraints:
        """Those of a model that was loaded; takes some tenths of a second for a large vocabulary."""
        if not runner_takes_them:
            return cls(reason="this chip's runner samples by itself and takes no constraints")
        if not model.tokenizer_file:
            return cls(reason="the model has no tokenizer.json")
        try:
            from meshkit.constraints.matching import ConstraintCompiler  # noqa: PLC0415
        except (ImportError, AttributeError, TypeError) as error:  # not there, or another release's interface
            return cls(reason=f"llguidance cannot be used by this executor's Python: {error}")
        try:
            compiler = ConstraintCompiler(
                Path(model.tokenizer_file), vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
            )
        except FailedPrecondition as error:
            log.warning("outputs cannot be constrained", reason=error.message)
            return cls(reason=error.message)
        return cls(compiler)

    def admit(self, admission: SlotAdmission) -> None:
        """A request enters a slot; its form is compiled, and its output so far replayed, meanwhile."""
        self._slots.pop(admission.slot, None)
        constraint = admission.sampling.constraint
        if constraint is None:
            return
        if self._compiled is None:
            failure = RowFailure(admission.slot, UNSUPPORTED, f"no constraint can be followed: {self.reason}")
            self._slots[admission.slot] = _Follower(admission, failure=failure)
        else:
            start = self._compiled.start(constraint, admission.output_token_ids)
            self._slots[admission.slot] = _Follower(admission, start=start)

    def release(self, slot: int) -> None:
        """The request of a slot has left."""
        self._slots.pop(slot, None)

    def reset(self) -> None:
        """All have left."""
        self._slots.clear()
        self._seconds = None

    def close(self) -> None:
        """The model is unloaded."""
        self.reset()
        if self._compiled is not None:
            self._compiled.close()

    def apply(self, batch: StepBatch) -> StepBatch:
        """The batch with what its constrained rows may take. Costs nothing where no slot is constrained."""
        if not self._slots:
            return batch
        slots = _sampling_slots(batch)
        bound = [row for row, slot in enumerate(slots) if slot in self._slots]
        if not bound or self._compiled is None:
            return batch
        began = self._clock()
        rows: IntArray = np.full(len(slots), -1, dtype=np.int32)
        words = self._compiled.new_words(len(bound))
        for index, row in enumerate(bound):
            if self._slots[slots[row]].fill(words[index]):
                rows[row] = index
        self._spent(began)
        return replace(batch, allowed=AllowedTokens(rows, words)) if (rows >= 0).any() else batch

    def follow(self, output: StepOutput) -> StepOutput:
        """Go on by what was sampled. A slot whose constraint cannot be followed fails, and its token is
        nobody's.
        """
        if not self._slots:
            return output
        began = self._clock()
        slots, token_ids = output.slots.tolist(), output.token_ids.tolist()
        failures = list(output.failures)
        kept = np.ones(len(slots), dtype=np.bool_)
        for row, (slot, token_id) in enumerate(zip(slots, token_ids, strict=True)):
            follower = self._slots.get(slot)
            if follower is not None and (failure := follower.take(token_id)) is not None:
                kept[row] = False
                failures.append(failure)
        self._spent(began)
        if kept.all():
            return output
        logprobs = None if output.logprobs is None else output.logprobs[kept]
        return StepOutput(output.slots[kept], output.token_ids[kept], logprobs, failures)

    def take_seconds(self) -> float | None:
        """What the constraints of a step cost; None where it had none."""
        seconds, self._seconds = self._seconds, None
        return seconds

    def _spent(self, began: float) -> None:
        self._seconds = (self._seconds or 0.0) + self._clock() - began


class _Follower:
    """One slot's place in its form."""

    def __init__(
        self,
        admission: SlotAdmission,
        *,
        start: Future[Matcher] | None = None,
        failure: RowFailure | None = None,
    ) -> None:
        self._slot = admission.slot
        self._suppressed = np.asarray(admission.sampling.suppressed_token_ids, dtype=np.int64)
        self._suppressed_for = admission.sampling.min_tokens - admission.output_count
        """Tokens that come before the suppressed ones may."""
        self._start = start
        self._matcher: Matcher | None = None
        self._failure = failure

    def fill(self, words: WordArray) -> bool:
        """Set the bits of what may come next; False where the slot has failed."""
        if self._failure is not None:
            return False
        try:
            self._begun().fill(words)
        except (InvalidArgument, FutureTimeoutError) as error:
            self._fail(error)
            return False
        if self._suppressed_for > 0 and self._suppressed.size:
            _clear_unless_all(words, self._suppressed)
        return True

    def take(self, token_id: int) -> RowFailure | None:
        """Go on by a token; why that is not possible."""
        if self._failure is None:
            self._suppressed_for -= 1
            try:
                self._begun().consume((token_id,))
            except (InvalidArgument, FutureTimeoutError) as error:
                self._fail(error)
        return self._failure

    def _begun(self) -> Matcher:
        if self._matcher is None and self._start is not None:
            self._matcher, self._start = self._start.result(START_LIMIT_S), None
        if self._matcher is None:
            raise RuntimeError(f"slot {self._slot} has no matcher and no start of one")
        return self._matcher

    def _fail(self, error: InvalidArgument | FutureTimeoutError) -> None:
        cause = (
            error.message
            if isinstance(error, InvalidArgument)
            else f"it was not compiled within {START_LIMIT_S:g} s"
        )
        self._failure = RowFailure(self._slot, FAILED, cause)


@dataclass(frozen=True)
class _Start:
    compiler: ConstraintCompiler
    beginnings: OrderedDict[Constraint, Matcher]
    """Used by the one thread that compiles."""

    def run(self, constraint: Constraint, output_token_ids: Sequence[int]) -> Matcher:
        beginning = self.beginnings.get(constraint)
        if beginning is None:
            beginning = self.beginnings[constraint] = self.compiler.compile(constraint)
            if len(self.beginnings) > MAX_COMPILED:
                self.beginnings.popitem(last=False)
        self.beginnings.move_to_end(constraint)
        matcher = beginning.copy()
        try:
            matcher.consume(output_token_ids)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"the {len(output_token_ids)} output tokens so far are not of the form: {error.message}",
                field=error.field,
                reason=error.reason,
            ) from error
        return matcher


class _CompiledForms:
    """Starts matchers on a thread of its own."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self.new_words = compiler.new_words
        self._start = _Start(compiler, OrderedDict())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    def start(self, constraint: Constraint, output_token_ids: Sequence[int]) -> Future[Matcher]:
        """A matcher of the form, after that output."""
        return self._pool.submit(self._start.run, constraint, output_token_ids)

    def close(self) -> None:
        """No more are started."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _sampling_slots(batch: StepBatch) -> list[int]:
    """As the rows of AllowedTokens: decode rows, then sampling prefill rows."""
    slots: list[int] = [] if batch.decode is None else batch.decode.slots.tolist()
    return slots + [row.slot for row in batch.prefill if row.samples]


def _clear_unless_all(words: WordArray, token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    """Clear the bits of `token_ids`, if others are left: a complete output may end before min_tokens."""
    left = words.copy()
    np.bitwise_and.at(left, token_ids // 32, ~(np.uint32(1) << (token_ids % 32).astype(np.uint32)))
    if left.any():
        words[:] = left
