"""Put on PYTHONPATH it audits each Python process from its start on: what is unpickled, compiled, executed,
imported or opened and is neither ours nor installed goes into a file of the process, one JSON object a line.

AUDIT_DIR: where these files go. AUDIT_ROOTS: folders whose code is ours or installed, with os.pathsep between
them. AUDIT_MODEL: the model folder. AUDIT_MARK: a word that stands in all text that a test has planted.
"""

from __future__ import annotations

import json
import os
import sys
from types import CodeType, FrameType
from typing import Any

_ENVIRONMENT = 3  # where subprocess.Popen has it, with this mark in it
_MARK = os.environ["AUDIT_MARK"]
_MODEL = os.environ["AUDIT_MODEL"]
_ROOTS = tuple(os.environ["AUDIT_ROOTS"].split(os.pathsep))
_CODE = (".py", ".pyc", ".so", ".bin", ".pt", ".pkl")
_LOG = os.open(
    os.path.join(os.environ["AUDIT_DIR"], f"{os.getpid()}.jsonl"),
    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    0o600,
)


def _tell(event: str, **facts: Any) -> None:
    os.write(_LOG, (json.dumps({"event": event, **facts}, default=repr) + "\n").encode())


def _caller() -> str:
    """File of the code that compiles, executes, opens or looks up."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def _is_marked(code: object) -> bool:
    if isinstance(code, CodeType):
        return any(_is_marked(constant) for constant in code.co_consts) or any(map(_is_marked, code.co_names))
    if isinstance(code, tuple):
        return any(map(_is_marked, code))
    return _MARK in (code.decode("utf-8", "replace") if isinstance(code, bytes) else str(code))


def _is_foreign(filename: str) -> bool:
    return not filename.startswith(("<", *_ROOTS))


def _on_code(event: str, code: object, filename: str) -> None:
    if _is_foreign(filename) or (filename.startswith("<") and _is_marked(code)):
        _tell(event, filename=filename, caller=_caller())


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec":
        code = arguments[0]
        _on_code(event, code, code.co_filename if isinstance(code, CodeType) else "<no code>")
    elif event == "compile":
        source, filename = arguments
        _on_code(event, source if source is not None else "", os.fsdecode(filename or "<none>"))
    elif event == "pickle.find_class":
        _tell(event, name=f"{arguments[0]}.{arguments[1]}", caller=_caller())
    elif event == "import" and arguments[1] is not None and _is_foreign(str(arguments[1])):
        _tell(event, filename=str(arguments[1]), caller=_caller())
    elif event == "open":
        path = str(arguments[0])
        if path.startswith(_MODEL) and path.endswith(_CODE):
            _tell(event, filename=path, caller=_caller())
    elif event in ("os.mkdir", "os.system", "subprocess.Popen") and _MARK in str(arguments[:_ENVIRONMENT]):
        _tell(event, filename=str(arguments[0]), caller=_caller())


sys.addaudithook(_audit)
_tell("begins", argv=sys.orig_argv)
