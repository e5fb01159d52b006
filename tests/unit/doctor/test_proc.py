"""What /proc and control groups tell: of planted trees, and of this very process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshkit.cli.doctor.facts import Owner, PortFacts, Target
from meshkit.cli.doctor.probe_host import describe_host, family_of, look, measure_copy
from meshkit.cli.doctor.probe_ports import with_pids
from meshkit.cli.doctor.proc import Proc

PID = 42


def write(root: Path, files: dict[str, str]) -> Proc:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "proc").mkdir(exist_ok=True)
    return Proc(root)


def stat_line(state: str = "S", *, pid: int = PID, parent: int = 1, ticks: int = 0) -> str:
    """/proc/PID/stat of a process with an awkward name."""
    fields = [state, str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 6, "5000"]
    return f"{pid} (a ) name) {' '.join(fields)}\n"


def test_the_tightest_limit_of_a_group_and_its_ancestors_counts_in_version_2(tmp_path: Path) -> None:
    proc = write(tmp_path, {
        f"proc/{PID}/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": "1000\n",
        "sys/fs/cgroup/outer/memory.current": "800\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 500\ninactive_file 300\n",
        "sys/fs/cgroup/outer/memory.events": "low 0\noom_kill 2\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/pids.max": "50\n",
        "sys/fs/cgroup/outer/inner/pids.current": "7\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/outer/inner/cpu.stat": "nr_periods 100\nnr_throttled 25\n",
    })  # fmt: skip
    limits = proc.limits_of(PID)
    assert (limits.memory_limit, limits.memory_used, limits.oom_kills) == (1000, 500, 2)
    assert (limits.pids_limit, limits.pids_used) == (50, 7)
    assert (limits.quota_cores, limits.throttled_share) == (1.5, 0.25)


def test_version_1_groups_are_read_by_controller_and_their_huge_number_is_no_limit(tmp_path: Path) -> None:
    proc = write(tmp_path, {
        f"proc/{PID}/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n2:pids:/\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "2000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "900\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    limits = proc.limits_of(PID)
    assert (limits.memory_limit, limits.memory_used) == (2000, 900)
    assert (limits.quota_cores, limits.pids_limit) == (None, None)


def test_a_process_is_told_with_its_state_files_memory_threads_and_processors(tmp_path: Path) -> None:
    proc = write(tmp_path, {
        f"proc/{PID}/stat": stat_line("T"),
        f"proc/{PID}/status": "Name:\tx\nVmRSS:\t  10 kB\nVmSwap:\t 3 kB\nCpus_allowed_list:\t0-3,8\n",
        f"proc/{PID}/limits": "Limit  Soft  Hard  Units\nMax open files  64  128  files\n",
        f"proc/{PID}/environ": "A=1\0OMP_NUM_THREADS=6\0",
        f"proc/{PID}/fd/0": "",
        f"proc/{PID}/fd/1": "",
    })  # fmt: skip
    facts = proc.facts_of(PID, owner="o", service="s", kind="service")
    assert (facts.state, facts.open_files, facts.files_limit) == ("T", 2, 64)
    assert (facts.resident, facts.swapped) == (10 * 1024, 3 * 1024)
    assert (facts.threads_wanted, facts.processors) == (6, 5)


def test_a_process_that_is_gone_or_a_zombie_has_no_state(tmp_path: Path) -> None:
    proc = write(tmp_path, {f"proc/{PID}/stat": stat_line("Z")})
    assert proc.state_of(PID) == ""
    assert proc.facts_of(PID + 1, owner="o", service="s", kind="service").state == ""


def test_who_listens_on_a_port_of_this_host_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        owner = Proc().owner_of(f"127.0.0.1:{server.getsockname()[1]}")
    assert owner is not None
    assert owner.pid == os.getpid()
    assert "python" in owner.command


def test_without_a_ready_file_a_services_process_is_ours_that_listens_at_its_address() -> None:
    targets = [Target("a", "gateway", pid=7), Target("b", "scheduler"), Target("c", "gateway")]
    ours, other = Owner(9, "python -m meshkit.cli scheduler"), Owner(8, "nginx")
    ports = [
        PortFacts("a", "grpc", "127.0.0.1:1", owner=ours),
        PortFacts("b", "grpc", "127.0.0.1:2", owner=ours),
        PortFacts("c", "grpc", "127.0.0.1:3", owner=other),
    ]
    assert [target.pid for target in with_pids(targets, ports)] == [7, 9, None]


def test_who_listens_elsewhere_cannot_be_told() -> None:
    assert Proc().owner_of("192.0.2.1:80") is None
    assert Proc().owner_of("unix:/nowhere") is None


def test_the_family_of_a_process_are_its_children_and_theirs(tmp_path: Path) -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 3, 9: 1}
    stats = {f"proc/{pid}/stat": stat_line(pid=pid, parent=parent) for pid, parent in parents.items()}
    proc = write(tmp_path, stats)
    assert family_of(proc, {2}) == {2, 3, 4}


def test_what_others_take_of_the_processors_is_told_by_name(tmp_path: Path) -> None:
    names = {f"proc/{PID}/cmdline": "hog\0--hard\0"}
    proc = write(tmp_path, {**names, f"proc/{PID}/stat": stat_line(ticks=0), "proc/stat": "cpu 0 0 0 0\n"})
    before = look(proc)
    proc = write(tmp_path, {f"proc/{PID}/stat": stat_line(ticks=500), "proc/stat": "cpu 500 0 0 0\n"})
    host = describe_host(proc, before, look(proc), ours=(), copy_rate=1e9, best=None)
    assert [(each.pid, each.command) for each in host.busiest] == [(PID, "hog --hard")]
    assert host.others == pytest.approx(host.busiest[0].processors)


def test_a_busy_process_of_this_host_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as hog:
        try:
            before = look(Proc())
            threading.Event().wait(0.5)
            after = look(Proc())
        finally:
            hog.kill()
    assert after.by_pid[hog.pid] > before.by_pid[hog.pid]
    assert after.busy > before.busy


def test_time_of_our_own_processes_is_not_others_time(tmp_path: Path) -> None:
    proc = write(tmp_path, {"proc/stat": "cpu 100 0 0 0 0 0 0 10\n", f"proc/{PID}/stat": stat_line(ticks=0)})
    before = look(proc)
    write(tmp_path, {"proc/stat": "cpu 400 0 0 900 0 0 0 60\n", f"proc/{PID}/stat": stat_line(ticks=200)})
    after = look(proc)
    host = describe_host(proc, before, after, ours={PID}, copy_rate=1e9, best=None)
    assert host.others / host.stolen == pytest.approx((300 - 200) / 50)


def test_a_copy_of_memory_is_measured_by_our_own_processor_time() -> None:
    ticking = iter(range(100))
    assert measure_copy(lambda: float(next(ticking))) == 2 * 64 * 1024 * 1024
    assert measure_copy() > 1e8
