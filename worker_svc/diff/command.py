"""Behind `chipmesh diff`: one input through a model on two back ends, and where they part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, print_json
from meshkit.errors import InvalidArgument
from plugins.sdk.runner import LoadOptions
from worker_svc.diff.sides import OpenSide, SideRequest, open_side

_FLAGS = {
    "model_path": "--model",
    "load_format": "--load-format",
    "dtype": "--dtype",
    "quantization": "--quantization",
}


def main(
    *,
    model: str,
    left: str,
    right: str,
    left_options: Mapping[str, str],
    right_options: Mapping[str, str],
    request: Mapping[str, Any],
    prompt: str | None,
    layers: bool,
    as_json: bool,
) -> int:
    """Compare, print, and return the exit code: 0 where nothing diverges, 1 where something does.

    request: dtype, load_format and quantization, as LoadOptions has them. layers: show each side's statistics
    by layer too.

    Raises:
        InvalidArgument: (a flag) the command line is wrong.
        MeshError: a back end does not start, or cannot run the model; the cause is named.
    """
    # The plugins first: a vendor's runtime may have to come before the tensor framework.
    sides = [open_side(SideRequest("left", left, left_options)),
             open_side(SideRequest("right", right, right_options))]  # fmt: skip
    options = LoadOptions(model, **request)
    try:
        return _compare(sides[0], sides[1], options, prompt, layers=layers, as_json=as_json)
    except InvalidArgument as error:
        flag = _FLAGS.get(error.field or "")
        if flag is None:
            raise
        raise InvalidArgument(error.message, field=flag, reason=error.reason, **error.metadata) from error


def _compare(
    left: OpenSide, right: OpenSide, options: LoadOptions, prompt: str | None, *, layers: bool, as_json: bool
) -> int:
    from worker_svc.diff.report import describe, print_findings  # noqa: PLC0415 - torch, as above
    from worker_svc.diff.session import compare_models, plan_pair  # noqa: PLC0415
    from worker_svc.diff.steps import built_in_prompt, encode_prompt  # noqa: PLC0415

    pair = plan_pair(left, right, options)
    tokens = built_in_prompt(pair.folder.vocab_size) if prompt is None else encode_prompt(prompt, pair.folder)
    findings = compare_models(pair, tokens)
    if as_json:
        print_json(describe(findings, options.model_path, with_statistics=layers))
    else:
        console = Console(highlight=False)
        print_findings(findings, options.model_path, console, with_statistics=layers)
    return EXIT_OK if findings.first_divergence is None else EXIT_FAILED
