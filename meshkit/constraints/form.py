"""The form of an output as plain data, and its wire form between services."""

from __future__ import annotations

from dataclasses import dataclass

from chipmesh.device.v1alpha1.sampling_pb2 import Constraint as ConstraintMessage

JSON_SCHEMA = "json_schema"
REGEX = "regex"
GRAMMAR = "grammar"
KINDS = (JSON_SCHEMA, REGEX, GRAMMAR)
"""The forms, named as in sampling.proto."""
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between the tokens of JSON, where a schema's `x-guidance` says nothing else. Bounded: a small model would
go on with blanks to the end.
"""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A form. kind: one of KINDS. text: a schema as JSON, a regular expression, or Lark or GBNF."""

    kind: str
    text: str

    def to_proto(self) -> ConstraintMessage:
        """The message that scheduler and executor pass on."""
        return ConstraintMessage(**{self.kind: self.text})


def read_constraint(message: ConstraintMessage) -> Constraint | None:
    """The form that a message carries; None where it carries none."""
    kind = message.WhichOneof("form")
    return None if kind is None else Constraint(kind, getattr(message, kind))
