"""Frames that nobody would send: random messages of each method's own type, most of them damaged. Pure."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from chipmesh.device.v1alpha1 import (
    collective_pb2,
    device_pb2,
    execution_pb2,
    memory_pb2,
    operator_pb2,
    plugin_pb2,
)
from chipmesh.inference.v1alpha1 import inference_pb2
from chipmesh.scheduler.v1alpha1 import admin_pb2, registry_pb2, session_pb2

DEEPEST = 4
MOST_ITEMS = 4
SHARE_SET, SHARE_DAMAGED = 0.7, 0.6
MOST_MESSAGES = 8
"""Frames of one call, where a method takes a stream."""

COMMANDS = frozenset({
    "UnloadModel", "LoadModel", "AllocateKvCache", "Attach", "Profile", "SelfTest", "InitGroup", "SwapChip",
    "DrainWorker", "SetGroup",
})  # fmt: skip
"""Methods of orders that a peer of this port may give, and that end, stop or slow what runs: a frame that
parses may be obeyed rightly. They get frames only that do not parse."""

PORTS: dict[str, Sequence[FileDescriptor]] = {
    "gateway": (inference_pb2.DESCRIPTOR,),
    "scheduler": (admin_pb2.DESCRIPTOR, registry_pb2.DESCRIPTOR, session_pb2.DESCRIPTOR),
    "executor": tuple(
        module.DESCRIPTOR
        for module in (collective_pb2, device_pb2, execution_pb2, memory_pb2, operator_pb2, plugin_pb2)
    ),
}

_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 5e-324, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "hash", "default", "worker-0", "x" * 300, "\x00", "\u202e\u00e4\U0001f600", "../..", "%s{0}")
_BITS = {
    FieldDescriptor.TYPE_INT32: (32, True), FieldDescriptor.TYPE_SINT32: (32, True),
    FieldDescriptor.TYPE_SFIXED32: (32, True), FieldDescriptor.TYPE_INT64: (64, True),
    FieldDescriptor.TYPE_SINT64: (64, True), FieldDescriptor.TYPE_SFIXED64: (64, True),
    FieldDescriptor.TYPE_UINT32: (32, False), FieldDescriptor.TYPE_FIXED32: (32, False),
    FieldDescriptor.TYPE_UINT64: (64, False), FieldDescriptor.TYPE_FIXED64: (64, False),
    FieldDescriptor.TYPE_ENUM: (32, True),
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """One RPC of a port. path: "/package.Service/Method"."""

    port: str
    path: str
    descriptor: MethodDescriptor

    @property
    def takes_stream(self) -> bool:
        """Whether a call carries many requests."""
        return bool(self.descriptor.client_streaming)


def all_methods(port: str) -> list[Method]:
    """All that a port offers of ours."""
    return [
        Method(port, f"/{service.full_name}/{method.name}", method)
        for file in PORTS[port]
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def frames(method: Method, draw: random.Random) -> list[bytes]:
    """The frames of one call: one, or up to MOST_MESSAGES of a stream."""
    count = draw.randint(1, MOST_MESSAGES) if method.takes_stream else 1
    return [_frame(method, draw) for _ in range(count)]


def _frame(method: Method, draw: random.Random) -> bytes:
    kind = method.descriptor.input_type
    raw = _random_message(kind, draw, depth=0).SerializePartialToString()
    if method.descriptor.name in COMMANDS:
        return _broken(kind, raw, draw)
    return _damage(raw, draw) if draw.random() < SHARE_DAMAGED else raw


def _broken(kind: Descriptor, raw: bytes, draw: random.Random) -> bytes:
    """Damaged until it does not parse."""
    while _parses(kind, raw):
        raw = _damage(raw, draw)
    return raw


def _parses(kind: Descriptor, raw: bytes) -> bool:
    try:
        GetMessageClass(kind).FromString(raw)
    except DecodeError:
        return False
    return True


# ---------------------------------------------------------------- messages


def _random_message(kind: Descriptor, draw: random.Random, *, depth: int) -> Message:
    message: Message = GetMessageClass(kind)()
    for field in kind.fields:
        if draw.random() < SHARE_SET:
            _fill(message, field, draw, depth=depth)
    return message


def _fill(message: Any, field: FieldDescriptor, draw: random.Random, *, depth: int) -> None:
    if field.message_type is not None and depth >= DEEPEST:
        return
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(message, field, draw, depth=depth)
        return
    count = draw.randint(0, MOST_ITEMS) if field.is_repeated else 1
    for _ in range(count):
        if field.message_type is not None:
            target = getattr(message, field.name)
            target = target.add() if field.is_repeated else target
            target.CopyFrom(_random_message(field.message_type, draw, depth=depth + 1))
        elif field.is_repeated:
            getattr(message, field.name).append(_scalar(field, draw))
        else:
            setattr(message, field.name, _scalar(field, draw))


def _fill_map(message: Any, field: FieldDescriptor, draw: random.Random, *, depth: int) -> None:
    entry = field.message_type
    assert entry is not None
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    target = getattr(message, field.name)
    for _ in range(draw.randint(0, MOST_ITEMS)):
        if value.message_type is not None:
            target[_scalar(key, draw)].CopyFrom(_random_message(value.message_type, draw, depth=depth + 1))
        else:
            target[_scalar(key, draw)] = _scalar(value, draw)


def _scalar(field: FieldDescriptor, draw: random.Random) -> Any:
    if field.type in _BITS:
        return _integer(*_BITS[field.type], draw)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.randrange(64))
    number = draw.choice((*_FLOATS, draw.uniform(-100, 100)))
    return (
        struct.unpack("f", struct.pack("f", number))[0]
        if field.type == FieldDescriptor.TYPE_FLOAT
        else number
    )


def _integer(bits: int, is_signed: bool, draw: random.Random) -> int:
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    return draw.choice((0, 1, 2, 16, least, most, draw.randrange(1000), draw.randint(least, most)))


# ---------------------------------------------------------------- damage


def _damage(raw: bytes, draw: random.Random) -> bytes:
    """One to four strokes."""
    for _ in range(draw.randint(1, 4)):
        raw = draw.choice(_STROKES)(raw, draw)
    return raw


def _place(raw: bytes, draw: random.Random) -> int:
    return draw.randint(0, len(raw))


def _flip(raw: bytes, draw: random.Random) -> bytes:
    if not raw:
        return draw.randbytes(1)
    at = draw.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << draw.randrange(8))]) + raw[at + 1 :]


def _cut(raw: bytes, draw: random.Random) -> bytes:
    return raw[: _place(raw, draw)]


def _insert(raw: bytes, draw: random.Random) -> bytes:
    at = _place(raw, draw)
    return raw[:at] + draw.randbytes(draw.randint(1, 16)) + raw[at:]


def _repeat(raw: bytes, draw: random.Random) -> bytes:
    at, to = sorted((_place(raw, draw), _place(raw, draw)))
    return raw[:to] + raw[at:to] * draw.randint(1, 4) + raw[to:]


def _lie_about_length(raw: bytes, draw: random.Random) -> bytes:
    """A field that says to hold up to gigabytes."""
    at = _place(raw, draw)
    tag = bytes([(draw.randint(1, 15) << 3) | 2])
    return raw[:at] + tag + bytes([0xFF, 0xFF, 0xFF, 0xFF, draw.choice((0x03, 0x07, 0x0F))]) + raw[at:]


def _nest(raw: bytes, draw: random.Random) -> bytes:
    """Deeper than any parser wants to go."""
    for _ in range(draw.randint(1, 120)):
        raw = bytes([0x0A, *_varint(len(raw))]) + raw
    return raw


def _noise(raw: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(200))


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield (value & 0x7F) | 0x80
        value >>= 7
    yield value


_STROKES: Sequence[Callable[[bytes, random.Random], bytes]] = (
    _flip, _cut, _insert, _repeat, _lie_about_length, _nest, _noise,
)  # fmt: skip
