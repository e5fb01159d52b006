"""Checks of what the host grants to the mesh's processes, before one of them dies of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshkit.cli.doctor.facts import Facts, HostFacts, ProcessFacts, Target
from meshkit.cli.doctor.finding import Finding, Verdict, fault, named, skipped, verdict, warning

MIB = 1 << 20
LEAST_FILES = 256
"""What a service may open by itself: libraries, sockets of peers, files of a model."""
NEARLY_ALL = 0.9
SWAPPED_SHARE = 0.05
LEAST_SHM = 64 * MIB
"""What container engines give by default."""
THROTTLED_SHARE = 0.05


def check_open_files(facts: Facts) -> Verdict:
    """Each process may open as many files and connections as it is to serve."""
    if not facts.processes:
        return skipped("no process of the mesh is known on this host")
    targets = {target.name: target for target in facts.targets}
    findings = [
        finding
        for process in facts.processes
        if (finding := _files_finding(process, targets[process.service])) is not None
    ]
    return verdict(f"{len(facts.processes)} processes may open enough files", findings)


def _files_finding(process: ProcessFacts, target: Target) -> Finding | None:
    limit, used = process.files_limit, process.open_files or 0
    if limit is None:
        return None
    mend = (
        f"raise it: of the running process by prlimit --pid {process.pid} --nofile=65536:65536, of the next "
        "one by `ulimit -n`, LimitNOFILE= (systemd), ulimits (compose)"
    )
    if limit < LEAST_FILES or used > NEARLY_ALL * limit:
        return fault(
            process.owner, f"may open {limit} files and has {used}: it will refuse connections", mend
        )
    streams = int(target.config.get("max_live_requests") or 0) if process.kind == "service" else 0
    if limit < streams + LEAST_FILES:
        text = f"may open {limit} files; {streams} live requests may each come by a connection of its own"
        return warning(process.owner, text, f"{mend}; or lower max_live_requests")
    return None


def check_pids(facts: Facts) -> Verdict:
    """Control groups have room for more processes and threads."""
    limited = [each for each in facts.processes if each.groups.pids_limit is not None]
    if not facts.processes:
        return skipped("no process of the mesh is known on this host")
    findings = [
        fault(
            each.owner,
            f"{each.groups.pids_used} of {each.groups.pids_limit} processes and threads of its control group "
            "are used: the next one is refused",
            "raise pids_limit (compose) or TasksMax= (systemd)",
        )
        for each in limited
        if each.groups.pids_limit is not None and each.groups.pids_used > NEARLY_ALL * each.groups.pids_limit
    ]
    return verdict(f"{len(limited)} of {len(facts.processes)} processes are limited, none nearly", findings)


def check_memory(facts: Facts) -> Verdict:
    """Weights, KV cache and what else is used fit into the limit that ends the process."""
    if facts.host is None or not facts.processes:
        return skipped("no process of the mesh is known on this host")
    findings = [*_limit_findings(facts.processes), *_need_findings(facts, facts.host)]
    limits = {each.groups.memory_limit for each in facts.processes if each.groups.memory_limit}
    text = (
        named([_gib(limit) for limit in sorted(limits)])
        if limits
        else f"the host's {_gib(facts.host.memory)}"
    )
    return verdict(f"the mesh's processes fit into {text}", findings)


def _limit_findings(processes: Iterable[ProcessFacts]) -> Iterator[Finding]:
    """One for each control group, under the name of the process in it that takes most."""
    folders: dict[str, ProcessFacts] = {}
    for each in sorted(processes, key=lambda process: process.resident):
        folders[each.groups.memory_file] = each
    for each in folders.values():
        groups = each.groups
        used, limit = groups.memory_used or 0, groups.memory_limit
        mend = "raise the limit (mem_limit, resources.limits.memory), or lower max_total_tokens"
        if limit and used > NEARLY_ALL * limit:
            text = f"{_gib(used)} of the {_gib(limit)} of its control group are used"
            yield fault(each.owner, f"{text}: the kernel ends it at the limit", mend)
        elif groups.oom_kills:
            text = (
                f"the kernel has ended {groups.oom_kills} processes of its control group for want of memory"
            )
            yield warning(each.owner, text, mend)


def _need_findings(facts: Facts, host: HostFacts) -> Iterator[Finding]:
    """Weights and KV cache of workers whose device is the host, by the limit that they share."""
    limits = {each.service: each.groups.memory_limit or host.memory for each in facts.processes}
    shared: dict[int, list[str]] = {}
    needs = {need.worker: need for need in facts.needs if need.worker in limits}
    for worker in needs:
        shared.setdefault(limits[worker], []).append(worker)
    for limit, workers in shared.items():
        weights = sum(needs[worker].weights for worker in workers)
        cache = sum(needs[worker].kv_cache for worker in workers)
        if limit and weights + cache > NEARLY_ALL * limit:
            yield fault(
                named(workers),
                f"need {_gib(weights)} for weights and {_gib(cache)} for the KV cache, of {_gib(limit)}",
                "lower max_total_tokens or mem_fraction_static, say executors_on_host, or give more memory",
            )


def check_shared_memory(facts: Facts) -> Verdict:
    """/dev/shm has room: processes of one model exchange tensors there."""
    host = facts.host
    if host is None or host.shm is None or host.shm_free is None:
        return skipped("/dev/shm cannot be looked at")
    mend = (
        "give it more: shm_size (compose), an emptyDir with medium Memory, mount -o remount,size=1g /dev/shm"
    )
    findings = []
    if host.shm_free < (1 - NEARLY_ALL) * host.shm:
        text = f"{_gib(host.shm_free)} of {_gib(host.shm)} are free"
        findings.append(fault("/dev/shm", text, f"{mend}; or remove what ended processes left there"))
    elif host.shm < LEAST_SHM:
        findings.append(warning("/dev/shm", f"it has {_gib(host.shm)} only", mend))
    return verdict(f"/dev/shm has {_gib(host.shm_free)} free of {_gib(host.shm)}", findings)


def check_swap(facts: Facts) -> Verdict:
    """Nothing of the mesh is swapped out: a step that waits for a disk takes a thousand times as long."""
    if facts.host is None:
        return skipped("this host was not looked at")
    findings = [
        (fault if each.swapped > SWAPPED_SHARE * max(1, each.resident + each.swapped) else warning)(
            each.owner,
            f"{_gib(each.swapped)} of it are swapped out",
            "turn swap off for it (memory.swap.max=0; compose: memswap_limit equal to mem_limit), give it "
            "more memory, and start it again",
        )
        for each in facts.processes
        if each.swapped > 0
    ]
    on = f"swap is on ({_gib(facts.host.swap)}), unused by the mesh" if facts.host.swap else "swap is off"
    return verdict(on, findings)


def check_processors(facts: Facts) -> Verdict:
    """Compute threads of executors fit the processors that they are granted."""
    executors = [each for each in facts.processes if each.kind == "executor" and _is_on_host(facts, each)]
    if not executors or facts.host is None:
        return skipped("no executor that computes on this host is known")
    findings: list[Finding] = []
    wanted = 0
    for each in executors:
        granted = each.processors or facts.host.processors
        threads = each.threads_wanted or granted
        wanted += threads
        findings += _quota_findings(each, threads)
    if wanted > facts.host.processors:
        findings.append(
            warning(
                named([each.owner for each in executors]),
                f"run {wanted} compute threads on {facts.host.processors} processors: they wait in turn",
                "set executors_on_host to their number, or executor.threads to a share for each",
            )
        )
    return verdict(f"{wanted} compute threads of executors, {facts.host.processors} processors", findings)


def _quota_findings(process: ProcessFacts, threads: int) -> Iterator[Finding]:
    groups = process.groups
    if groups.quota_cores is None:
        return
    mend = "set executor.threads to the quota's processors, or raise it (cpus, resources.limits.cpu)"
    if threads > groups.quota_cores:
        text = f"runs {threads} compute threads on a quota of {groups.quota_cores:g} processors"
        yield warning(process.owner, f"{text}: they wait for each other while they are held", mend)
    elif groups.throttled_share > THROTTLED_SHARE:
        share = f"{groups.throttled_share:.0%} of its periods"
        text = f"its quota of {groups.quota_cores:g} processors cut {share} short"
        yield warning(process.owner, text, mend)


def _is_on_host(facts: Facts, process: ProcessFacts) -> bool:
    """Whether its device computes on the host's processors; an executor that did not say does."""
    told = [each.on_host for each in facts.executors if each.target.name == process.service]
    return told[0] is not False if told else True


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / MIB:.0f} MiB"
