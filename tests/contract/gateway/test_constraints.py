"""Constraints at the gateway: checked before a request goes on, in a bounded time, sent on as they are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chipmesh.device.v1alpha1 import sampling_pb2
from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway.config import ServedModelConfig
from gateway.constraint_checks import ANSWER_LIMIT_S, LIMITS, ConstraintChecks
from gateway.models import ServedModel, open_served_model
from meshkit.constraints.form import GRAMMAR, REGEX, Constraint
from meshkit.errors import FailedPrecondition, InvalidArgument, Unavailable
from tests.contract.gateway.gateway_client import Mesh, MeshFactory
from tests.unit.gateway.tiny_model import IM_END, tokens_of, write_tiny_model

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
CATASTROPHES = [
    Constraint(REGEX, "((((a{1000}){1000}){1000}){1000})"),
    Constraint(GRAMMAR, 'start: T{1,10000000}\nT: "a"{1000000000}'),
    Constraint(REGEX, "a?" * 30000),
]


def constraint(**form: Any) -> dict[str, Any]:
    return {"constraint": pb.OutputConstraint(**form)}


async def test_a_constraint_is_sent_on_and_told_as_it_counts(mesh: Mesh) -> None:
    session = await mesh.session()
    for form, sent in (
        ({"json_schema": SCHEMA}, sampling_pb2.Constraint(json_schema=SCHEMA)),
        ({"regex": "a+"}, sampling_pb2.Constraint(regex="a+")),
        ({"grammar": 'root ::= "x"'}, sampling_pb2.Constraint(grammar='root ::= "x"')),
        (
            {"choice": pb.Choices(texts=["a", "b", "a"])},
            sampling_pb2.Constraint(grammar='start: "a" | "b"\n'),
        ),
    ):
        stream = mesh.generate("hello", sampling=constraint(**form))
        request = await session.accepts()
        assert request.submit.sampling.constraint == sent
        accepted = await stream.start()
        kind = sent.WhichOneof("form") or ""
        told = accepted.effective_sampling.constraint
        assert (told.WhichOneof("form"), getattr(told, kind)) == (kind, getattr(sent, kind))
        request.tokens(0, [IM_END])
        request.finished()
        await stream.end()


async def test_the_effective_sampling_with_its_constraint_goes_on_with_a_stream(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", sampling=constraint(regex="abc"))
    request = await session.accepts()
    effective = (await stream.start()).effective_sampling
    request.finished()
    again = mesh.generate("hello", sampling=effective, output_token_ids=tokens_of("ab"))
    resumed = await session.accepts()
    assert resumed.submit.sampling.constraint.regex == "abc"
    assert list(resumed.submit.output_token_ids) == tokens_of("ab")
    await again.start()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": constraint()}, "sampling.constraint"),
        ({"sampling": constraint(regex="")}, "sampling.constraint.regex"),
        ({"sampling": constraint(regex="(a")}, "sampling.constraint.regex"),
        ({"sampling": constraint(json_schema="{")}, "sampling.constraint.json_schema"),
        ({"sampling": constraint(grammar="start: x")}, "sampling.constraint.grammar"),
        ({"sampling": constraint(choice=pb.Choices())}, "sampling.constraint.choice.texts"),
        ({"sampling": constraint(choice=pb.Choices(texts=["a", ""]))}, "sampling.constraint.choice.texts[1]"),
        ({"sampling": constraint(regex="a" * 262145)}, "sampling.constraint.regex"),
        ({"sampling": constraint(regex="a"), "stop": {"ignore_eos": True}}, "stop.ignore_eos"),
    ],
)
async def test_a_bad_constraint_is_refused_by_its_field(
    mesh: Mesh, fields: dict[str, Any], field: str
) -> None:
    await mesh.session()
    error = await mesh.generate("hello", **fields).error()
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_a_model_of_token_ids_alone_takes_no_constraint(run_mesh: MeshFactory, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "ids", tokenizer=False)
    async with run_mesh(models=[{"name": "tiny", "path": str(folder)}]) as mesh:
        await mesh.session()
        error = await mesh.generate([1, 2], sampling=constraint(regex="a")).error()
        assert isinstance(error, FailedPrecondition)
        assert (error.field, error.reason) == ("sampling.constraint", "MODEL_HAS_NO_TOKENIZER")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> ServedModel:
    return open_served_model(ServedModelConfig(name="tiny", path=str(tiny_model)), cache_dir=tmp_path)


async def test_catastrophes_are_refused_in_time_while_the_loop_goes_on(model: ServedModel) -> None:
    checks = ConstraintChecks(limits=replace(LIMITS, total_s=0.4))
    lag_s = 0.0

    async def beat() -> None:
        nonlocal lag_s
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            lag_s = max(lag_s, time.monotonic() - began)

    beating = asyncio.create_task(beat())
    try:
        for bad in CATASTROPHES:
            with pytest.raises(InvalidArgument) as refused:
                await asyncio.wait_for(checks.check(bad, model), ANSWER_LIMIT_S)
            assert refused.value.reason == "CONSTRAINT_TOO_COMPLEX"
            assert refused.value.field == "sampling.constraint"
        await checks.check(Constraint(REGEX, "fine"), model)
    finally:
        beating.cancel()
        await checks.close()
    assert lag_s < 0.2


async def test_a_verdict_is_remembered_and_shared(model: ServedModel) -> None:
    checks = ConstraintChecks()
    good, bad = Constraint(REGEX, "a"), Constraint(REGEX, "(a")
    await asyncio.gather(*[checks.check(good, model) for _ in range(20)])
    with pytest.raises(InvalidArgument):
        await checks.check(bad, model)
    assert repr(checks) == "<ConstraintChecks 2 remembered, 0 waiting>"
    await checks.close()
    # Nobody is asked any more: there is no process.
    await checks.check(good, model)
    with pytest.raises(InvalidArgument):
        await checks.check(bad, model)


async def test_one_who_waits_may_go_and_a_checker_that_is_killed_is_replaced(model: ServedModel) -> None:
    checks = ConstraintChecks()
    shared = Constraint(REGEX, "a{1,3}")
    first = asyncio.create_task(checks.check(shared, model))
    second = asyncio.create_task(checks.check(shared, model))
    await asyncio.sleep(0)
    first.cancel()
    await second
    process = checks.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await checks.check(Constraint(REGEX, "b"), model)
    await checks.close()


async def test_closing_ends_what_is_being_checked(model: ServedModel) -> None:
    checks = ConstraintChecks()
    await checks.check(Constraint(REGEX, "a"), model)
    running = [asyncio.create_task(checks.check(each, model)) for each in CATASTROPHES]
    await asyncio.sleep(0)
    await checks.close()
    for each in running:
        with pytest.raises((InvalidArgument, Unavailable)):
            await each
    assert checks.process is None


async def test_a_new_scheduler_gets_the_constraint_with_the_output_so_far(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", sampling=constraint(regex="ab+"))
    (await session.accepts()).tokens(0, tokens_of("ab"))
    await stream.start()
    await stream.output()
    session.break_with(None)
    resubmitted = await (await mesh.scheduler.session()).accepts()
    assert resubmitted.submit.sampling.constraint.regex == "ab+"
    assert list(resubmitted.submit.output_token_ids) == tokens_of("ab")
    resubmitted.tokens(2, [IM_END])
    resubmitted.finished()
    await stream.end()
    assert stream.text == "ab"
