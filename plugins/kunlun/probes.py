"""Start-up trials: open points of the runtime are found out, and each operator compared with the reference.

An operator that differs in any dtype, or changes an input that is not its own, is declined: the framework
runs its reference instead, and the report, the log and the loaded model's decisions say why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshkit.telemetry.logging import get_logger
from plugins.kunlun.decode import find_decode_variants
from plugins.kunlun.operators import DTYPES, KV_LAYOUT, PAGE_SIZES, Findings, KunlunOperators
from plugins.kunlun.quantised import PRODUCTS
from plugins.kunlun.runtime import Runtime
from plugins.sdk.capabilities import Coverage
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.declined import declined_at_start
from plugins.sdk.memory import MemoryManager
from plugins.sdk.trials import (
    EXPERT_CHOICES,
    TRIALS,
    Inputs,
    MakeInputs,
    OperatorTrials,
    TrialMaker,
    TrialSizes,
)

log = get_logger(__name__)

_DEVICE = 0
_SIZES = (
    TrialSizes(page=PAGE_SIZES[0], experts=7, chosen=3),
    TrialSizes(page=PAGE_SIZES[1], experts=13, chosen=4),
)
"""Numbers of experts that divide by nothing."""
_INT8_WIDTH = 272
"""More than two blocks of 128: a build whose int8 kernels want one maximum a block is told apart. By 16, as
the kernels want it.
"""


def start_operators(memory: MemoryManager, runtime: Runtime) -> KunlunOperators:
    """The operators of a runtime, settled and compared."""
    return _Start(memory, runtime).run()


class _Start:
    """One start: trials with what they found."""

    def __init__(self, memory: MemoryManager, runtime: Runtime) -> None:
        self._memory = memory
        self._runtime = runtime
        device = runtime.torch_device(_DEVICE)
        self._trials = OperatorTrials(
            memory=memory,
            place=lambda tensor: tensor.to(device, copy=True),
            synchronize=lambda: runtime.synchronize(_DEVICE),
            sizes=_SIZES,
            layout=KV_LAYOUT,
            own=_OWN,
        )

    @torch.inference_mode()
    def run(self) -> KunlunOperators:
        self._runtime.synchronize(_DEVICE)
        findings = self._settle()
        trial = self._operators(findings)
        covered = [name for name in CATALOGUE if trial.coverage(name) is Coverage.NATIVE]
        declined = {
            name: declined_at_start(problem) for name in covered if (problem := self._problem(trial, name))
        }
        for name, reason in declined.items():
            log.warning("operator is denied: it failed its comparison at load", operator=name, reason=reason)
        return self._operators(findings, declined)

    def _settle(self) -> Findings:
        """Open points by trial, in the likeliest order; where nothing agrees, the first choice is compared
        again with all others, and declined.
        """
        variants = find_decode_variants(self._runtime.ops)
        causal = [
            choice for choice in (True, False) if self._agrees("attention_prefill", Findings(choice, None))
        ]
        decodes = [each for each in variants if self._agrees("attention_decode", Findings(True, each))]
        products = [each for each in PRODUCTS if self._agrees("linear_w8a8", Findings(True, None, each))]
        return Findings(
            prefix_is_causal=causal[0] if causal else True,
            decode=next(iter(decodes or variants), None),
            int8_product=(products or PRODUCTS)[0],
        )

    def _agrees(self, name: str, findings: Findings) -> bool:
        return not self._problem(self._operators(findings), name)

    def _problem(self, operators: KunlunOperators, name: str) -> str:
        return self._trials.find_problem(operators, name, operators.dtypes.get(name, DTYPES))

    def _operators(self, findings: Findings, declined: Mapping[str, str] | None = None) -> KunlunOperators:
        return KunlunOperators(self._memory, self._runtime, findings, declined=declined)


def _route_among_many(make: TrialMaker) -> Inputs:
    """As many experts as models have."""
    return {"router_logits": make.random(1, 1, 60, factor=1.5).round(), "top_k": 4, "renormalize": 1}


def _linear_w8a8(rows: int) -> MakeInputs:
    """Rows of different magnitude; of several the last one is zeros. A single one has no bias."""

    def made(make: TrialMaker) -> Inputs:
        x = make.random(1, rows, _INT8_WIDTH) * torch.arange(1, rows + 1).unsqueeze(1)
        if rows > 1:
            x[-1] = 0
        return {
            "x": x,
            "weight": make.int8(2, 48, _INT8_WIDTH),
            "scale": make.positive(3, 48),
            "bias": make.random(4, 48) if rows > 1 else None,
        }

    return made


def _moe_experts_w8a8(choose: MakeInputs) -> MakeInputs:
    def made(make: TrialMaker) -> Inputs:
        experts, choice = make.sizes.experts, choose(make)
        return {
            "x": make.random(1, len(choice["expert_ids"]), _INT8_WIDTH),
            "gate_up": make.int8(2, experts, 96, _INT8_WIDTH),
            "gate_up_scale": make.positive(3, experts, 96),
            "down": make.int8(4, experts, _INT8_WIDTH, 48),
            "down_scale": make.positive(5, experts, _INT8_WIDTH),
            **choice,
        }

    return made


_OWN: Mapping[str, Sequence[MakeInputs]] = {
    "moe_route": (*TRIALS["moe_route"], _route_among_many),
    "linear_w8a8": (_linear_w8a8(5), _linear_w8a8(1)),
    "moe_experts_w8a8": tuple(_moe_experts_w8a8(choose) for choose in EXPERT_CHOICES),
}
"""int8 products by the widths that the kernels take. Their results are bfloat16, beside whose rounding one
step of int8, where a value lay next to a tie, is nothing.
"""
