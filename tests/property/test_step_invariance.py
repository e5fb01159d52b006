"""The native step kernel, through the runner: whatever the batch and the chunks, the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.runner import LoadOptions, SamplingSettings
from plugins.sdk.step_program import (
    A8,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    ProgramInputs,
    ProgramOutputs,
    StepProgram,
    StoredMatrix,
)
from tests.unit.cpu_plugin.decoder_samples import in_blocks
from tests.unit.models.step_driver import GREEDY, StepDriver, Tracked, sampled
from tests.unit.models.tiny_llama import write_model
from worker_svc.model_runner import OperatorModelRunner

VOCABULARY = 97
PAGE = 16
PAGES = 120
MADE = 5
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
         "max_position_embeddings": 512}  # fmt: skip


@dataclass
class Recorder(StepProgram):
    """A program whose logits are kept: by the first page of their sequence and the position."""

    program: StepProgram
    seen: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        return self.program.weight_bytes

    def attach_cache(self, cache: Any, *, page_count: int, page_size: int) -> None:
        self.program.attach_cache(cache, page_count=page_count, page_size=page_size)

    def run(self, inputs: ProgramInputs) -> ProgramOutputs:
        outputs = self.program.run(inputs)
        for row, index in enumerate(inputs.sampled_rows.tolist()):
            first_page = int(inputs.tables[inputs.sequences[index], 0])
            self.seen[first_page, int(inputs.positions[index])] = outputs.logits[row].tobytes()
        return outputs


class RecordingBackend(CpuBackend):
    """The plugin as it is, its programs recorded."""

    def create_step_program(
        self, shape: DecoderShape, weights: DecoderWeights, *, quantization: str = ""
    ) -> StepProgram:
        if quantization:
            weights = rounded(weights)
        self._recorder = Recorder(super().create_step_program(shape, weights, quantization=quantization))
        return self._recorder


def rounded(weights: DecoderWeights) -> DecoderWeights:
    """Products over blocks, but for one: of 8 bits in the head and `down`, of 4 bits elsewhere."""
    eight, plain = ("down",), ("out",)

    def encode(layer: DecoderLayer) -> DecoderLayer:
        parts = {name: getattr(layer, name) for name in layer.__slots__}
        changed: dict[str, Any] = {
            name: in_blocks(part, "Q8_0" if name in eight else "Q4_1")
            for name, part in parts.items()
            if isinstance(part, StoredMatrix) and name not in plain
        }
        return replace(layer, **changed)

    return replace(weights, layers=map(encode, weights.layers), head=in_blocks(weights.head, "Q8_0"))


@dataclass
class Setup:
    runner: OperatorModelRunner
    recorder: Recorder


@pytest.fixture(scope="module", params=["", A8])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", **SIZES)
    threads = torch.get_num_threads()
    backend = RecordingBackend(CpuOptions(threads=2))
    runner = OperatorModelRunner(backend)
    options = LoadOptions(str(folder), load_format="dummy", dtype="float32", quantization=request.param)
    described = runner.load(options, lambda *_: None)
    assert described.operators[0].name == "llama_step"
    assert described.numeric_class == ("float32+a8" if request.param else "float32")
    runner.allocate_kv_cache(page_count=PAGES, page_size=PAGE, max_slots=16)
    yield Setup(runner, backend._recorder)
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Request:
    """A prompt by its length and seed, and how it samples."""

    length: int
    seed: int
    random: bool

    @property
    def settings(self) -> SamplingSettings:
        return sampled(self.seed, top_k=9) if self.random else GREEDY

    @property
    def prompt(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(VOCABULARY, (self.length,), generator=generator).tolist()


def serve(
    setup: Setup, requests: Sequence[Request], chunks: Sequence[int], starts: Sequence[int]
) -> list[tuple[list[int], list[bytes]]]:
    """Tokens and logits of each request: i enters at step starts[i], its prompt in pieces of chunks[i]."""
    setup.runner.reset()
    setup.recorder.seen.clear()
    driver = StepDriver(setup.runner, page_count=PAGES, page_size=PAGE)
    tracked = [
        driver.admit(slot, request.prompt, room=MADE + 1, settings=request.settings)
        for slot, request in enumerate(requests)
    ]
    step = 0
    while any(len(item.made) < MADE for item in tracked):
        waiting = [
            (item, min(chunks[item.slot], len(item.prompt) - item.done))
            for item in tracked
            if item.done < len(item.prompt) and starts[item.slot] <= step
        ]
        decoding = [item for item in tracked if item.made and len(item.made) < MADE]
        if waiting or decoding:
            driver.step(decoding, waiting)
        step += 1
    return [_outcome(setup, item) for item in tracked]


def _outcome(setup: Setup, item: Tracked) -> tuple[list[int], list[bytes]]:
    page = int(item.pages[0])
    kept = {position: bits for (first, position), bits in setup.recorder.seen.items() if first == page}
    return item.made, [kept[position] for position in sorted(kept)]


REQUESTS = st.builds(Request, st.integers(1, 150) | st.integers(255, 300), st.integers(0, 5), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batch_and_any_chunks_give_the_same_bits(setup: Setup, data: st.DataObject) -> None:
    requests = data.draw(st.lists(REQUESTS, min_size=1, max_size=5))
    count = len(requests)
    chunks = data.draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    starts = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    alone = cache(lambda request: serve(setup, [request], [512], [0])[0])
    expected = [alone(request) for request in requests]
    assert serve(setup, requests, chunks, starts) == expected
