"""`generate`: one question, streamed to the terminal or printed whole as JSON, traced where the mesh is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace

from meshkit.cli.generation import GenerationOptions, GenerationResult, build_request, generate
from meshkit.cli.state import StateDir, require_endpoint, state_dir_from_environment
from meshkit.cli.terminal import print_json
from meshkit.config import TracingConfig, parse_config
from meshkit.telemetry.tracing import configure_tracing, tracer


def ask(flags: Mapping[str, Any], *, endpoint: str | None, timeout_s: float | None, as_json: bool) -> None:
    """Runs one generation; `flags` are the command line's, by typer's names.

    Raises:
        MeshError: what the gateway refused, or that none is there.
    """
    known = {name: value for name, value in flags.items() if name in GenerationOptions.model_fields}
    options = parse_config(
        GenerationOptions, {**known, "stop": tuple(flags["stop"] or ())}, source="chipmesh generate"
    )
    request = build_request(options)
    state = state_dir_from_environment()
    address = require_endpoint(state, kind="gateway", given=endpoint)
    tracing = configure_tracing("chipmesh-cli", _tracing_of(state))
    try:
        with tracer().start_as_current_span("chipmesh.generate") as span:
            on_text = _discard if as_json else _write
            result = asyncio.run(generate(request, endpoint=address, timeout_s=timeout_s, on_text=on_text))
            trace_id = span.get_span_context().trace_id
    finally:
        tracing.shutdown()
    if as_json:
        print_json(_describe(result, trace_id))
    else:
        print(flush=True)


def _tracing_of(state: StateDir) -> TracingConfig:
    """The client's spans go where the mesh sends its own."""
    record = state.read_mesh()
    if record is None or record.otlp_endpoint is None:
        return TracingConfig()
    return TracingConfig(exporter="otlp", endpoint=record.otlp_endpoint)


def _describe(result: GenerationResult, trace_id: int) -> dict[str, Any]:
    traced = {"trace_id": trace.format_trace_id(trace_id)} if trace_id else {}
    return {**result.model_dump(), **traced}


def _write(piece: str) -> None:
    # A terminal that cannot show a character gets a mark for it instead of an error in mid-stream.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(piece.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def _discard(piece: str) -> None:
    del piece
