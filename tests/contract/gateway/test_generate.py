"""What a client sees of a generation that goes well."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from chipmesh.scheduler.v1alpha1 import session_pb2
from tests.contract.gateway.gateway_client import Mesh, MeshFactory, Stream, request_of
from tests.unit.gateway.tiny_model import BOS, CONTEXT_TOKENS, IM_END, VOCAB_SIZE, tokens_of, write_tiny_model

STOP = session_pb2.RequestFinished.REASON_STOP
LENGTH = session_pb2.RequestFinished.REASON_LENGTH


async def test_a_generation_is_accepted_then_streamed_then_finished(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello")
    request = await session.submitted()
    request.queued()
    accepted = await stream.start()
    assert accepted.model == "tiny"
    assert list(accepted.prompt_token_ids) == tokens_of("hello") == list(request.submit.prompt_token_ids)
    request.placed(cached_tokens=3)
    request.tokens(0, tokens_of("wo"))
    assert (await stream.output()).text == "wo"
    request.tokens(2, [*tokens_of("rld"), IM_END])
    request.finished(STOP)
    finished = await stream.end()
    assert stream.text == "world"
    assert stream.token_ids == [*tokens_of("world"), IM_END]
    assert finished.reason == pb.Finished.REASON_STOP
    assert finished.matched_stop == ""
    assert finished.usage == pb.Usage(prompt_tokens=5, completion_tokens=6, cached_tokens=3)
    assert finished.placement == pb.Placement(
        group="default", worker="worker-0", chip="hash", numeric_class="exact"
    )


async def test_accepted_waits_until_the_scheduler_has_the_request(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello")
    request = await session.submitted()
    assert stream.call.done() is False
    request.queued()
    await stream.start()


async def test_what_the_client_leaves_out_is_filled_in_and_told(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello")
    request = await session.accepts()
    accepted = await stream.start()
    effective = accepted.effective_sampling
    assert effective == pb.SamplingOptions(
        temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1, presence_penalty=0,
        frequency_penalty=0, seed=effective.seed,
    )  # fmt: skip
    assert accepted.effective_stop == pb.StopOptions(max_tokens=CONTEXT_TOKENS - 5, min_tokens=0)
    assert request.submit.sampling.seed == effective.seed > 0
    assert request.submit.sampling.top_p == 1
    assert request.submit.max_output_tokens == CONTEXT_TOKENS - 5
    assert list(request.submit.stop_token_ids) == [IM_END]
    assert len(accepted.request_id) == 32


async def test_what_the_client_sets_counts(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate(
        [1, 2, 3],
        request_id="mine",
        logprobs=True,
        sampling={"temperature": 0.5, "top_k": -1, "seed": 0, "logit_bias": {7: -100.0}},
        stop={"max_tokens": 1000, "stop_token_ids": [9, 9, IM_END], "min_tokens": 4},
    )
    request = await session.accepts()
    accepted = await stream.start()
    assert accepted.request_id == "mine" == request.submit.request_id
    assert accepted.effective_sampling.temperature == request.submit.sampling.temperature == 0.5
    assert accepted.effective_sampling.HasField("seed")
    assert request.submit.sampling.seed == 0
    assert request.submit.sampling.top_k == 0
    assert dict(request.submit.sampling.logit_bias) == {7: -100.0}
    assert request.submit.sampling.logprobs
    assert accepted.effective_stop.max_tokens == CONTEXT_TOKENS - 3
    assert list(request.submit.stop_token_ids) == [IM_END, 9]
    assert list(request.submit.sampling.suppressed_token_ids) == [IM_END, 9]
    assert request.submit.sampling.min_tokens == 4


async def test_ignore_eos_leaves_only_the_clients_own_end_tokens(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", stop={"ignore_eos": True, "stop_token_ids": [9]})
    request = await session.accepts()
    await stream.start()
    assert list(request.submit.stop_token_ids) == [9]


async def test_cached_tokens_are_of_the_first_placement_and_the_place_is_of_the_last(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello")
    request = await session.submitted()
    request.queued()
    request.placed(cached_tokens=2, worker="worker-0")
    request.tokens(0, tokens_of("ab"))
    request.placed(cached_tokens=6, worker="worker-1", chip="other")
    request.tokens(2, tokens_of("c"))
    request.finished(LENGTH)
    finished = await stream.end()
    assert finished.usage.cached_tokens == 2
    assert finished.usage.completion_tokens == 3
    assert finished.placement.worker == "worker-1"
    assert finished.placement.chip == "other"


@pytest.mark.parametrize("text", ["naïve 漢字 👩‍👩‍👧 ok", "🙂"])
async def test_no_cut_between_tokens_breaks_a_character(mesh: Mesh, text: str) -> None:
    session = await mesh.session()
    tokens = tokens_of(text)
    for cut in range(len(tokens) + 1):
        stream = mesh.generate("hello")
        request = await session.accepts()
        await stream.start()
        if cut:
            request.tokens(0, tokens[:cut])
            first = await stream.output()
            assert "\ufffd" not in first.text
            assert text.startswith(first.text)
        request.tokens(cut, tokens[cut:])
        request.finished()
        await stream.end()
        assert stream.text == text
        assert stream.token_ids == tokens


async def test_half_a_character_at_the_end_is_one_replacement_character(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello")
    request = await session.accepts()
    request.tokens(0, tokens_of("ok🙂")[:-1])
    request.finished(LENGTH)
    await stream.end()
    assert stream.text == "ok\ufffd"


async def test_a_stop_string_over_several_tokens_is_cut_off_and_stops_the_scheduler(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", stop={"stop_strings": ["DEFGHIJ", "never"]}, logprobs=True)
    request = await session.accepts()
    for index, token in enumerate(tokens_of("abcDEFGHIJ")):
        request.tokens(index, [token], [-float(index)])
    assert await request.ended_by_gateway() == "stop"
    request.tokens(10, tokens_of("dropped"))  # Made before the scheduler knew.
    request.finished(session_pb2.RequestFinished.REASON_CANCELLED)
    finished = await stream.end()
    assert stream.text == "abc"
    assert stream.token_ids == tokens_of("abcDEFGHIJ")
    assert stream.logprobs == [-float(index) for index in range(10)]
    assert finished.reason == pb.Finished.REASON_STOP
    assert finished.matched_stop == "DEFGHIJ"
    assert finished.usage.completion_tokens == 10


async def test_tokens_after_a_stop_string_in_one_batch_are_dropped(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", stop={"stop_strings": ["\n\n"]}, logprobs=True)
    request = await session.accepts()
    request.tokens(0, tokens_of("a\n\nbcd"), [0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
    finished = await stream.end()
    assert stream.text == "a"
    assert stream.token_ids == tokens_of("a\n\n")
    assert stream.logprobs == [0.0, -1.0, -2.0]
    assert finished.usage.completion_tokens == 3


async def test_what_only_looked_like_a_stop_string_comes_out(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", stop={"stop_strings": ["DEFG"]})
    request = await session.accepts()
    await stream.start()
    request.tokens(0, tokens_of("abDE"))
    assert (await stream.output()).text == "ab"
    request.tokens(4, tokens_of("x"))
    assert (await stream.output()).text == "DEx"
    request.tokens(5, tokens_of("DEF"))
    request.finished()
    await stream.end()
    assert stream.text == "abDExDEF"


async def test_a_stop_string_before_min_tokens_does_not_stop(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", stop={"stop_strings": ["."], "min_tokens": 4})
    request = await session.accepts()
    request.tokens(0, tokens_of("a.b.c"))
    finished = await stream.end()
    assert stream.text == "a.b"
    assert finished.usage.completion_tokens == 4


async def test_special_tokens_are_in_the_ids_and_not_in_the_text(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", stop={"ignore_eos": True})
    request = await session.accepts()
    request.tokens(0, [*tokens_of("a"), IM_END, *tokens_of("b")])
    request.finished()
    await stream.end()
    assert stream.text == "ab"
    assert stream.token_ids == [97, IM_END, 98]


async def test_a_slow_reader_gets_fewer_and_larger_messages(mesh: Mesh) -> None:
    session = await mesh.session()
    # A client with small buffers, so that what it does not read stays at the gateway.
    small = grpc.aio.insecure_channel(
        mesh.address, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
    )
    slow = Stream(inference_pb2_grpc.InferenceServiceStub(small).Generate(request_of("slow", logprobs=True)))
    request = await session.accepts()
    await slow.start()
    batches, batch = 2_000, tokens_of("x" * 50)
    for index in range(batches):
        request.tokens(index * len(batch), batch, [-1.0] * len(batch))
    request.finished()
    # Another stream goes on meanwhile: nobody waits for the slow reader.
    quick = mesh.generate("quick")
    other = await session.accepts()
    other.tokens(0, tokens_of("y"))
    other.finished()
    await quick.end()
    await slow.end()
    assert slow.text == "x" * 50 * batches
    assert len(slow.logprobs) == 50 * batches
    assert len(slow.outputs) < batches / 2
    await small.close()


async def test_chat_is_rendered_by_the_models_template(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate([("system", "be kind"), ("user", "hi")])
    request = await session.accepts()
    await stream.start()
    rendered = (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(request.submit.prompt_token_ids) == await mesh.tokenize(rendered)
    assert request.submit.prompt_token_ids[0] == 256


async def test_special_tokens_written_in_text_count_as_such(mesh: Mesh) -> None:
    await mesh.session()
    assert await mesh.tokenize("a<|im_end|>") == [97, IM_END]


@pytest.mark.parametrize("add_bos_token", [True, False])
async def test_a_bare_text_begins_as_the_models_tokenizer_says(
    run_mesh: MeshFactory, tmp_path: Path, add_bos_token: bool
) -> None:
    folder = write_tiny_model(tmp_path / "model", add_bos_token=add_bos_token)
    async with run_mesh(models=[{"name": "m", "path": str(folder)}]) as mesh:
        assert await mesh.tokenize("a") == ([BOS, 97] if add_bos_token else [97])
        # The template writes its own special tokens.
        assert BOS not in await mesh.tokenize([("user", "a")])


async def test_models_are_listed_with_their_limits(mesh: Mesh) -> None:
    models = (await mesh.stub.ListModels(pb.ListModelsRequest())).models
    assert list(models) == [pb.Model(name="tiny", context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB_SIZE)]


async def test_a_model_without_tokenizer_takes_and_gives_token_ids(
    run_mesh: MeshFactory, token_model: Path
) -> None:
    async with run_mesh(models=[{"name": "tokens", "path": str(token_model)}]) as mesh:
        session = await mesh.session()
        stream = mesh.generate([1, 2], model="tokens")
        request = await session.accepts()
        request.tokens(0, [3, 4])
        request.finished()
        await stream.end()
        assert stream.token_ids == [3, 4]
        assert stream.text == ""
        for refused, field in [
            (mesh.generate("text"), "prompt.text"),
            (mesh.generate([("user", "hi")]), "prompt.chat"),
            (mesh.generate([1], stop={"stop_strings": ["x"]}), "stop.stop_strings"),
        ]:
            error = await refused.error()
            assert error.code.name == "FAILED_PRECONDITION"
            assert error.field == field
            assert "tokenizer.json" in error.message
