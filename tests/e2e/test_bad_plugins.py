"""A bad plugin ends a worker in one clear error with its cause, in bounded time, and leaves nothing running.

Each case is a package of one file in a site folder of its own, beside those that are installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.child import GRPC_CORE_LINE
from plugins.sdk.registry import ENTRY_POINT_GROUP
from tests.support.hash_model import write_hash_model
from tests.support.mesh import run_cli

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MARK = "CHIPMESH_TEST_MARK"
END_TIMEOUT_S = 30.0
"""What a case may take at most, on a busy machine too."""

HEAD = """
from dataclasses import replace

from plugins.hash.plugin import HashBackend
from plugins.hash.options import HashOptions
from plugins.sdk.backend import PluginInfo
from plugins.sdk.capabilities import CapabilityReport, Coverage, LinkCapability, OperatorCapability
from plugins.sdk.host import HostDevices


def backend(options):
    return Chip(HashOptions())


class Chip(HashBackend):
"""


def chip(body: str) -> str:
    """A plugin whose chip is the hash model's, but for what `body` overrides."""
    return HEAD + "".join(f"    {line}\n" for line in body.strip("\n").splitlines())


def reports(**changes: str) -> str:
    """A chip whose report differs in `changes`, each written in Python."""
    written = ", ".join(f"{name}={value}" for name, value in changes.items())
    return chip(f"def capabilities(self):\n    return replace(super().capabilities(), {written})")


LEAVES_A_THREAD_AND_A_PROCESS = """
import subprocess, threading, time

def backend(options):
    threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
    subprocess.Popen(["sleep", "600"])
    raise RuntimeError("the link is down")
"""
HANGS = """
import subprocess, time

def backend(options):
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
"""
NO_DEVICES = chip("""
class _Nothing(HostDevices):
    def list_devices(self):
        return []

@property
def devices(self):
    return self._Nothing()
""")


@dataclass(frozen=True)
class Case:
    """sources: the plugins' files, each a package that offers the backend `bad`. words: all are in the error,
    patterns of `re`. start_timeout_s: of the executor.
    """

    sources: Sequence[str]
    words: Sequence[str]
    backend: str = "bad"
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 60.0


CASES = {
    "unknown": Case([], ["'nonsense' is unknown", "installed: .*cpu.*hash", ENTRY_POINT_GROUP], "nonsense"),
    "raises at import": Case(
        ["raise RuntimeError('firmware 1.2\\nis too old')"],
        [r"'bad' \(bad_0:backend\) cannot be imported", "RuntimeError: firmware 1.2 is too old"],
    ),
    "drifts from the contract": Case(
        [chip("def compute_faster(self):\n    pass")],
        ["cannot be imported", "ContractDrift: Chip.compute_faster is not on the contract"],
    ),
    "factory raises": Case(
        ["def backend(options):\n    return {}['chip 7']"], ["'bad' failed to start", "KeyError: 'chip 7'"]
    ),
    "factory raises, and leaves a thread and a process": Case(
        [LEAVES_A_THREAD_AND_A_PROCESS], ["'bad' failed to start", "the link is down"]
    ),
    "two of one name": Case(
        [chip("pass"), chip("pass")],
        [
            "offered by several packages",
            "bad_0:backend of bad-0 1.0, bad_1:backend of bad-1 1.0",
            "uninstall",
        ],
    ),
    "another contract": Case(
        [chip("def info(self):\n    return PluginInfo('bad', '3.1', contract_version='2.0')")],
        [r"'bad' 3\.1 was built for contract 2\.0; here it is 1\.0"],
    ),
    "contradicts the catalogue": Case(
        [
            reports(
                operators="[OperatorCapability('conv3d', Coverage.NATIVE), OperatorCapability('linear')]",
                compute_dtypes="('float7', 'float7')",
                links="[LinkCapability(64)]",
                quantization_formats="['q9_9']",
            )
        ],
        [
            "report of backend 'bad' has",
            "'conv3d' is not in the catalogue",
            "linear: .* says not why",
            "'float7', which the contract does not know",
            "'float7' comes 2 times",
            "device 64, which is not",
            "q9_9",
        ],
    ),
    "contradicts itself": Case(
        [
            reports(
                operators="[OperatorCapability('write_kv', Coverage.NATIVE, constraints=('S == 16',)),"
                "OperatorCapability('linear', Coverage.NATIVE, constraints=('T % 8 == 0',))]",
                compute_dtypes="('float32',)",
                accumulation_dtype="'float32'",
                page_sizes_tokens="(16, 32)",
            )
        ],
        [
            "has 3 contradictions",
            "'S == 16' excludes the page size 32",
            "names T, a size of a step",
            "'uint8', which is no compute dtype, and no operator converts to it: attention_prefill, ",
        ],
    ),
    "unknown field": Case(
        [chip("def capabilities(self):\n    return CapabilityReport(chip='bad', warp_size=32)")],
        ["'bad' does not report its capabilities", "TypeError: .* unexpected keyword argument 'warp_size'"],
    ),
    "no devices": Case(
        [NO_DEVICES],
        ["'bad' lists no device", "driver", "visibility variable"],
    ),
    "makes no runner": Case(
        [chip("def create_runner(self, context):\n    raise RuntimeError('out of handles')")],
        ["'bad' does not make its runner", "RuntimeError: out of handles"],
    ),
    "ends the process": Case(
        ["import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"],
        ["the executor was ended by signal 11 while it loaded backend 'bad'"],
    ),
    "hangs": Case(
        [HANGS],
        [r"not ready after 2 s: backend 'bad' still loads or hangs; it was killed", "start_timeout_s"],
        start_timeout_s=2.0,
    ),
    "visibility names what is not there": Case(
        [],
        ["XPU_VISIBLE_DEVICES", r"name 2 devices \(7,8\), but the runtime sees 1"],
        backend="kunlun",
        options={"emulate": "true"},
        environment={"XPU_VISIBLE_DEVICES": "7,8"},
    ),
}


@dataclass(frozen=True)
class Site:
    """A folder of plugins, and how a worker that finds them is started."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def install(self, source: str) -> None:
        """Add a package of one file that offers the backend `bad`; no installer is needed for that."""
        number = len(list(self.folder.glob("*.dist-info")))
        (self.folder / f"bad_{number}.py").write_text(source, encoding="utf-8")
        info = self.folder / f"bad_{number}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: bad-{number}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        points = f"[{ENTRY_POINT_GROUP}]\nbad = bad_{number}:backend\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")

    def start(self, backend: str, **settings: Any) -> subprocess.Popen[str]:
        """`chipmesh worker`, whose scheduler is not there: it is asked when the executor is ready."""
        config = {
            "worker_id": "w0", "model": "hash", "scheduler_address": "127.0.0.1:9", "backend": backend,
            **settings,
        }  # fmt: skip
        file = self.folder / "worker.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, "-m", "meshkit.cli", "worker", "--config", str(file)],
            env={**os.environ, "PYTHONPATH": path, MARK: self.mark},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def running(self) -> list[int]:
        """Processes that a worker of this site has left behind."""
        wanted = f"{MARK}={self.mark}".encode()
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if wanted in _environment(entry)]


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # It has ended, or is another user's.
        return []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for pid in site.running():
        os.kill(pid, signal.SIGKILL)


def finish(worker: subprocess.Popen[str]) -> str:
    """What it said until its end, and until whoever holds its stderr has ended too."""
    try:
        return worker.communicate(timeout=END_TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
        worker.kill()
        raise


def read_log(text: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Plain lines, and logged events."""
    lines = [line for line in text.splitlines() if line.strip() and not GRPC_CORE_LINE.match(line)]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in lines if not line.startswith("{")], events


def check_refusal(site: Site, case: Case) -> None:
    """The worker ends, not with 0, and says why in one line; nothing else in its log is an error."""
    worker = site.start(
        case.backend,
        backend_options=dict(case.options),
        executor={"start_timeout_s": case.start_timeout_s, "environment": dict(case.environment)},
    )
    text = finish(worker)
    plain, events = read_log(text)
    assert worker.returncode == 1, text
    assert len(plain) == 1, text
    assert plain[0].startswith("worker: ")
    for word in case.words:
        assert re.search(word, plain[0]), plain[0]
    assert [event for event in events if event["level"] in ("error", "critical")] == []
    assert site.running() == []


NIGHTLY = ("factory raises", "two of one name", "unknown field", "no devices", "makes no runner")
"""Cases whose like is in every run."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in CASES],
)
def test_a_bad_plugin_is_one_clear_error_and_nothing_runs_on(site: Site, name: str) -> None:
    case = CASES[name]
    for source in case.sources:
        site.install(source)
    check_refusal(site, case)


def test_a_library_with_an_unresolved_symbol_is_named(site: Site) -> None:
    library = site.folder / "libvendor.so"
    load = f"import ctypes\nctypes.CDLL({str(library)!r})\n"
    if (gcc := shutil.which("gcc")) is None:
        load = f"raise ImportError('{library}: undefined symbol: vendor_new_call')\n"
    else:
        source = "int vendor_new_call(void); int use(void) { return vendor_new_call(); }"
        command = [gcc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True)
    site.install(load)
    words = [
        f"{re.escape(str(library))} needs symbol vendor_new_call",
        r"bad-0 1\.0 declares",
        "running here: contract",
    ]
    check_refusal(site, Case([], words))


@pytest.fixture
def contradictory(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with a plugin whose report contradicts itself, found by all that is started from here on."""
    site.install(CASES["contradicts the catalogue"].sources[0])
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    monkeypatch.setenv(MARK, site.mark)
    return site


def test_up_ends_in_the_error_of_its_worker(contradictory: Site, tmp_path: Path) -> None:
    model = write_hash_model(tmp_path)
    failed = run_cli(
        "up", "--detach", "--backend", "bad", "--model-path", str(model), "--load-format", "dummy",
        state_dir=tmp_path / "state",
    )  # fmt: skip
    told = failed.stdout + failed.stderr
    assert failed.returncode == 1, told
    assert told.count("the capability report of backend 'bad' has") == 1
    assert "Traceback" not in told
    assert contradictory.running() == []


def test_conformance_shows_what_is_refused_at_load_by_the_names_of_its_checks(
    contradictory: Site, tmp_path: Path
) -> None:
    done = run_cli("conformance", "--backend", "bad", "--json", "-k", "capabilities/", state_dir=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    faults = {each["name"]: each["fault"] for each in report["results"] if each["status"] == "FAIL"}
    assert faults.pop("capabilities/declared_operators_exist") == "DECLARED_BUT_MISSING"
    names = ("precisions", "sizes", "operator_entries")
    assert faults == {f"capabilities/{name}": "CONTRADICTION" for name in names}
    assert contradictory.running() == []


LATE = """
import os
from plugins.kunlun import backend as kunlun

def backend(options):
    chip = kunlun({"emulate": "true"})
    # The emulator reads a copy of the process' variables, so that it is the copy that changes.
    chip._runtime.environment["XPU_VISIBLE_DEVICES"] = "3"
    return chip
"""


def test_a_visibility_variable_that_changes_too_late_is_reported_as_without_effect(
    site: Site, tmp_path: Path
) -> None:
    site.install(LATE)
    model = write_hash_model(tmp_path)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # The chip has no kernel for the heads of 16 that the tests' model has.
    (model / "config.json").write_text(json.dumps({**config, "head_dim": 64}), encoding="utf-8")
    worker = site.start("bad", model_path=str(model), load_format="dummy", max_total_tokens=512)
    assert worker.stderr is not None
    lines: list[str] = []
    for line in worker.stderr:
        lines.append(line)
        if '"event": "kv_cache"' in line:
            break
    worker.send_signal(signal.SIGTERM)
    text = "".join([*lines, finish(worker)])
    plain, events = read_log(text)
    told = [event for event in events if "no effect until a restart" in event["event"]]
    assert [(event["level"], event["variables"], event["in_effect"]) for event in told] == [
        ("warning", ["XPU_VISIBLE_DEVICES"], "all")
    ]
    assert "Traceback" not in text
    assert (worker.returncode, plain) == (0, [])
    assert site.running() == []
