"""Behind `chipmesh plan`: how a model would run on a chip, and why. Reads no weights, starts no mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from meshkit.cli.backend_options import read_backend_options
from meshkit.cli.terminal import EXIT_OK, print_json
from meshkit.errors import InvalidArgument
from meshkit.modelstore import default_cache_dir, open_model
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.planning import Choice, ExecutionPlan, PlanRequest, plan_execution
from plugins.sdk.registry import load_backend
from plugins.sdk.runner import OperatorDecision

_FLAGS = {"model_path": "--model", "chunk_tokens": "--chunked-prefill-size"}
"""Where a flag is not called as its field."""
_COLUMNS = ("operator", "where", "calls", "sizes", "choice", "reason")


def main(*, model: str, backend: str, options: Sequence[str], request: dict[str, Any], as_json: bool) -> int:
    """Plan, print, and return the exit code.

    Raises:
        InvalidArgument: (--model, --backend, --option and the flags of `request`) a wrong command line.
        MeshError: the back end does not start, or refuses the model; the cause is named.
    """
    settings = read_backend_options(options, flag="--option")
    try:
        plan = make_plan(load_backend(backend, settings), model, PlanRequest(**request))
    except InvalidArgument as error:
        raise _about_a_flag(error) from error
    if as_json:
        print_json({"model": model, "backend": backend, **plan.to_json(), "counts": count_choices(plan)})
    else:
        print_plan(plan, model, Console(highlight=False))
    return EXIT_OK


def _about_a_flag(error: InvalidArgument) -> InvalidArgument:
    """The same error about what was typed: a wrong command line has an exit code of its own."""
    field = error.field or ""
    if field.startswith("backend_options."):
        flag = "--emulate" if field.endswith(".emulate") else "--option"
    else:
        flag = _FLAGS.get(field, f"--{field.replace('_', '-')}")
    return InvalidArgument(f"{flag}: {error.message}", field=flag, reason=error.reason, **error.metadata)


def make_plan(backend: Backend, model: str, request: PlanRequest) -> ExecutionPlan:
    """The plan of a back end; without operators where it brings a runner of its own.

    Raises:
        MeshError: as plugins.sdk.planning.plan_execution, and for a model that cannot be read.
    """
    report = backend.capabilities()
    if backend.create_runner(RunnerContext()) is not None:
        return plan_execution(report, [], request)
    # Only here, since they import the tensor framework: a plugin with a runner of its own needs none.
    from worker_svc.call_sites import collect_call_sites  # noqa: PLC0415
    from worker_svc.layers.quantization import QuantizationPolicy  # noqa: PLC0415
    from worker_svc.models.registry import find_architecture  # noqa: PLC0415
    from worker_svc.program_runs import describe_shape  # noqa: PLC0415

    folder = open_model(model, cache_dir=default_cache_dir(), need_weights=False)
    policy = QuantizationPolicy(request.quantization)
    sites = collect_call_sites(folder.config, vocab_size=folder.vocab_size, policy=policy)
    architecture, _ = find_architecture(folder.config)
    shape = describe_shape(architecture, folder.config, vocab_size=folder.vocab_size)
    return plan_execution(report, sites, request, shape=shape)


def count_choices(plan: ExecutionPlan) -> dict[str, int]:
    """Operator calls of a forward pass by how they run."""
    counts: dict[str, int] = {}
    for decision in plan.served_by():
        counts[decision.choice] = counts.get(decision.choice, 0) + decision.calls
    return counts


def print_plan(plan: ExecutionPlan, model: str, console: Console) -> None:
    """Settings, then operators, for a person."""
    emulated = " (emulated)" if plan.emulated else ""
    settings = Table(title=f"{model} on {plan.chip}{emulated}")
    for column in ("setting", "value", "reason"):
        settings.add_column(column)
    for name, choice in vars(plan).items():
        if isinstance(choice, Choice):
            value = "none" if choice.value in ("", None) else str(choice.value)
            settings.add_row(name, value, choice.reason)
    console.print(settings)
    if not plan.operators:
        console.print("operators: the plugin brings a runner of its own, which the framework does not plan")
        return
    operators = Table(title="operators")
    for column in _COLUMNS:
        operators.add_column(column, overflow="fold")
    for decision in plan.served_by():
        operators.add_row(*_row(decision))
    console.print(operators)


def _row(decision: OperatorDecision) -> tuple[str, ...]:
    sizes = " ".join(f"{symbol}={size}" for symbol, size in decision.sizes.items())
    where = decision.where.replace("model.", "")
    return decision.name, where, str(decision.calls), sizes, decision.choice, decision.reason
