"""Structured output as a router asks for it: the one place where its four kinds become the mesh's own."""

from __future__ import annotations

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from meshkit.errors import InvalidArgument


def apply_constraint(params: sgl.SamplingParams, asked: pb.GenerateRequest) -> None:
    """Put what the output has to match into `asked`.

    Raises:
        InvalidArgument: the mesh does not enforce constraints of that kind.
    """
    kind = params.WhichOneof("constraint")
    if kind == "json_schema":
        asked.sampling.constraint.json_schema = params.json_schema
    elif kind == "regex":
        asked.sampling.constraint.regex = params.regex
    elif kind == "ebnf_grammar":
        asked.sampling.constraint.grammar = params.ebnf_grammar
    elif kind is not None:
        raise InvalidArgument(
            f"sampling_params.{kind}: this mesh does not enforce it; leave it out",
            field=f"sampling_params.{kind}",
            reason="UNSUPPORTED_VALUE",
        )
