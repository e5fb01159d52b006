"""Logs: structlog and the standard library in one stream; coloured on a terminal, else JSON lines."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

# What every logger does, configured or not. Tracebacks become text here, by the standard library's plain
# formatter: structlog's pretty one reads source files, which would block the event loop.
_PROCESSORS: list[Processor] = [
    structlog.stdlib.filter_by_level,
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.format_exc_info,
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
]
_FOREIGN_PROCESSORS: list[Processor] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.format_exc_info,
]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A structured logger: `log.info("what", key=value)`. May be made before `configure_logging`."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name), processors=_PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger
    )
    return logger


def configure_logging(service: str, *, level: str = "info", stream: TextIO | None = None) -> None:
    """Set up logging of this process; call it once, in the composition root.

    level: debug, info, warning or error.
    stream: default stderr; a terminal gets coloured lines, anything else JSON lines.
    """
    out = stream if stream is not None else sys.stderr
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_FOREIGN_PROCESSORS,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _adds_service(service),
                _add_trace_id,
                _renderer(out),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _renderer(out: TextIO) -> Processor:
    if out.isatty():
        return structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    return structlog.processors.JSONRenderer()


def _adds_service(service: str) -> Processor:
    def add_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return add_service


def _add_trace_id(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
    return event
