#!/usr/bin/env bash
# The user's story on a real container engine: images built offline, `docker-compose up`, streams over gRPC, a worker
# recreated as another chip under them, services stopped, killed and paused, `down`. As root, on Debian (or with dockerd,
# docker-compose and debootstrap there already). Arguments go to pytest: `-m compose` for all of it.
#
# The engine runs in network, process and mount namespaces of its own: it finds all ports free, touches neither the
# machine's engine nor its firewall, and everything that it started ends with this script, however that ends.
#
# Where no engine can start (no root, no namespaces, no packages, no base image) it says so and exits with 77.
#
# CHIPMESH_COMPOSE_CACHE   folder that keeps the base image and the wheels for the next run; by default nothing is kept
# CHIPMESH_DEBIAN_MIRROR   mirror for debootstrap, by default its own
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SUITE=bookworm
WHEELS_PYTHON=3.11 # of that suite
CPU_INDEX=https://download.pytorch.org/whl/cpu
BASE_IMAGE=chipmesh-base:$SUITE
MEMORY_GIB=16
# PROGRAM=PACKAGE, all of Debian's.
NEEDED="dockerd=docker.io docker=docker.io docker-compose=docker-compose debootstrap=debootstrap iptables=iptables ip=iproute2"

say() { echo "compose: $*"; }

SKIPPED=77

skip() {
    echo "compose: SKIPPED, no engine can start here: $*" >&2
    exit $SKIPPED
}

# part NAME COMMAND...: runs it and says how long it took. No `||` here: under one, `set -e` would not hold in COMMAND.
part() {
    PART="$1"
    local started=$SECONDS
    shift
    say "$PART ..."
    "$@"
    say "$PART took $((SECONDS - started)) s"
    PART=""
}

say_what_failed() {
    local status=$?
    if [ $status -ne 0 ] && [ $status -ne $SKIPPED ] && [ -n "${PART:-}" ]; then echo "compose: $PART FAILED ($status)" >&2; fi
}

# ---------------------------------------------------------------- outside: what needs the network

missing_packages() {
    local pair
    for pair in $NEEDED; do
        command -v "${pair%=*}" >/dev/null || echo "${pair#*=}"
    done | sort -u
}

# install_engine PACKAGE...
install_engine() {
    command -v apt-get >/dev/null || skip "lacking, and no apt-get to install it: $*"
    # Installing must not start the packages' own dockerd.
    local policy=/usr/sbin/policy-rc.d ours=no status=0
    if [ ! -e "$policy" ]; then
        ours=yes
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    # --no-remove: another vendor's engine stays, and this is refused where both do not go together.
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-remove --no-install-recommends "$@"; } \
        >"$WORK/apt.log" 2>&1 || status=$?
    if [ $ours = yes ]; then rm -f "$policy"; fi
    if [ $status -ne 0 ]; then
        tail -n 20 "$WORK/apt.log" >&2
        skip "apt-get could not install $*"
    fi
}

# The files of a small Debian with Python, as one tar.
make_base() {
    if [ -e "$CACHE/base.tar" ]; then return 0; fi
    # shellcheck disable=SC2086
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates $SUITE "$WORK/rootfs" \
        ${CHIPMESH_DEBIAN_MIRROR:-} >"$WORK/debootstrap.log" 2>&1 || {
        tail -n 20 "$WORK/debootstrap.log" >&2
        skip "debootstrap could not make the base image"
    }
    rm -rf "$WORK"/rootfs/var/cache/apt/archives/*.deb "$WORK"/rootfs/var/lib/apt/lists/* "$WORK"/rootfs/usr/share/doc
    tar -C "$WORK/rootfs" -cf "$CACHE/base.tar.part" .
    mv "$CACHE/base.tar.part" "$CACHE/base.tar"
    rm -rf "$WORK/rootfs"
}

download() {
    .venv/bin/python -m pip download -qq --disable-pip-version-check --dest "$CACHE/wheels" \
        --constraint constraints.txt --only-binary=:all: --python-version $WHEELS_PYTHON "$@"
}

# The same order as scripts/setup.sh's: this machine's disk, PyTorch's CPU index, never by itself a CUDA build.
download_torch() {
    local pin
    pin="$(sed -n 's/^torch==\([0-9.]*\).*/torch==\1/p' constraints.txt)"
    download --no-deps --no-index "$pin" 2>/dev/null || download --no-deps --index-url "$CPU_INDEX" "$pin"
}

requirements() {
    .venv/bin/python - <<'PYTHON'
from importlib.metadata import requires
from packaging.requirements import Requirement
wanted = [Requirement(text) for text in requires("chipmesh") or []]
print("\n".join(f"{r.name}{r.specifier}" for r in wanted if r.marker is None or r.marker.evaluate({"extra": "cpu"})))
print("hatchling")
PYTHON
}

download_wheels() {
    local stamp
    stamp="$(cat pyproject.toml constraints.txt | cksum)"
    if [ "$(cat "$CACHE/wheels.stamp" 2>/dev/null)" = "$stamp" ]; then return 0; fi
    rm -rf "$CACHE/wheels"
    mkdir -p "$CACHE/wheels"
    download_torch
    requirements >"$WORK/requirements.txt"
    download --find-links "$CACHE/wheels" --requirement "$WORK/requirements.txt"
    echo "$stamp" >"$CACHE/wheels.stamp"
}

# The build's context: what the images are made of, with the wheels, apart from the checkout.
make_context() {
    mkdir "$WORK/context" "$WORK/prefill"
    tar -c --exclude=__pycache__ .dockerignore pyproject.toml constraints.txt README.md LICENSE protos/chipmesh meshkit \
        gateway scheduler_svc worker_svc plugins deploy | tar -x -C "$WORK/context"
    cp -l "$CACHE"/wheels/*.whl "$WORK/context/deploy/docker/wheels/" 2>/dev/null ||
        cp "$CACHE"/wheels/*.whl "$WORK/context/deploy/docker/wheels/"
    mkdir -p "$WORK/prefill/models"
    cp -r "$(.venv/bin/chipmesh pull smollm2-135m --json |
        .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["path"])')" "$WORK/prefill/models/"
    chmod -R a+rX "$WORK/prefill"
}

# Side by side: the one waits for the network, the other for the processor.
prepare() {
    local base wheels status=0
    make_base &
    base=$!
    download_wheels &
    wheels=$!
    # Both, before one of them is reported: nothing may write into a folder that is being removed.
    wait $base || status=$?
    wait $wheels || status=$?
    if [ $status -ne 0 ]; then return $status; fi
    make_context
}

# Engine, images and base in memory where there is plenty: twice as fast, since dpkg and the engine wait for each file.
work_in_memory() {
    local available
    available="$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)"
    if [ "$available" -lt $MEMORY_GIB ]; then
        say "working on disk: less than $MEMORY_GIB GiB of memory are available"
        return
    fi
    mount -t tmpfs -o mode=700 tmpfs "$WORK"
    mkdir -p "$CACHE"
}

outside() {
    trap say_what_failed EXIT
    work_in_memory
    local -a missing
    mapfile -t missing < <(missing_packages)
    if [ ${#missing[@]} -gt 0 ]; then part "installing ${missing[*]}" install_engine "${missing[@]}"; fi
    part "environment" bash scripts/setup.sh
    part "base image's files, wheels, model" prepare
    unshare --net bash scripts/test_compose.sh --inside "$@"
}

# ---------------------------------------------------------------- inside: an engine without a network

start_engine() {
    local folder
    ip link set lo up
    # What the engine reads and writes there whatever it is told: the machine's own settings, keys and sockets stay unseen.
    for folder in /etc/docker /run/containerd /run/docker; do
        mkdir -p "$folder"
        mount -t tmpfs tmpfs "$folder"
    done
    dockerd --data-root "$WORK/data" --exec-root "$WORK/exec" --pidfile "$WORK/dockerd.pid" \
        --host "unix://$WORK/docker.sock" --cgroup-parent "/$CGROUP" >"$WORK/dockerd.log" 2>&1 &
    ENGINE=$!
    for _ in $(seq 150); do
        if docker version >/dev/null 2>&1; then return 0; fi
        kill -0 $ENGINE 2>/dev/null || break
        sleep 0.2
    done
    tail -n 20 "$WORK/dockerd.log" >&2
    skip "dockerd did not come up"
}

stop_engine() {
    say_what_failed
    kill "$ENGINE" 2>/dev/null || true
    wait "$ENGINE" 2>/dev/null || true
}

import_base() { docker import --change "ENV LANG=C.UTF-8" "$CACHE/base.tar" "$BASE_IMAGE" >/dev/null; }

build() {
    docker-compose -f "$WORK/context/deploy/compose.yaml" build "$@" >"$WORK/build.log" 2>&1 || {
        tail -n 40 "$WORK/build.log" >&2
        return 1
    }
}

run_tests() {
    .venv/bin/python -m pytest -m "compose and not nightly" --durations=12 -v tests/compose "$@" || {
        say "the containers' last words:"
        cat "$WORK/containers.log" || true # None, where they did not come up.
        return 1
    } >&2
}

inside() {
    # The daemon's own client goes before another one that may be there.
    PATH="$(dirname "$(command -v docker-compose)"):$PATH"
    export PATH DOCKER_HOST="unix://$WORK/docker.sock"
    export COMPOSE_PROJECT_NAME=chipmesh CHIPMESH_BASE_IMAGE="$BASE_IMAGE" CHIPMESH_PIP_OPTIONS=--no-index
    export CHIPMESH_COMPOSE_TEST="$WORK/context/deploy" CHIPMESH_COMPOSE_PREFILL="$WORK/prefill"
    export CHIPMESH_COMPOSE_LOG="$WORK/containers.log"
    part "starting dockerd" start_engine
    trap stop_engine EXIT
    part "importing the base image" import_base
    # 0: the old builder, which takes about twice as long.
    export DOCKER_BUILDKIT="${DOCKER_BUILDKIT:-1}" COMPOSE_DOCKER_CLI_BUILD=1 BUILDKIT_PROGRESS=plain
    part "building gateway, scheduler, worker-cpu" build --parallel gateway scheduler worker-a
    say "image sizes:"
    docker images --format 'compose:   {{.Repository}} {{.Size}}' | grep -v '<none>'
    part "the story" run_tests "$@"
}

# ---------------------------------------------------------------- around both: what is left at the end

remove_work() {
    if [ -n "${NAMESPACE:-}" ]; then
        kill -KILL "$NAMESPACE" 2>/dev/null || true
        wait "$NAMESPACE" 2>/dev/null || true
    fi
    # Control groups outlive namespaces; these are empty by now.
    find /sys/fs/cgroup -depth -type d -path "*/$CGROUP*" -exec rmdir {} + 2>/dev/null || true
    rm -rf "$WORK"
}

main() {
    local status=0
    [ "$(id -u)" -eq 0 ] || skip "needs root"
    unshare --mount --pid --net --fork true 2>/dev/null || skip "this machine lets nobody make namespaces"
    WORK="$(mktemp -d /tmp/chipmesh-compose.XXXXXX)"
    CGROUP="$(basename "$WORK")"
    CACHE="${CHIPMESH_COMPOSE_CACHE:-$WORK/cache}"
    mkdir -p "$CACHE"
    export WORK CACHE CGROUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap remove_work EXIT
    # When this shell dies, by whatever, so does the first process of the namespace, and with it every other one.
    # In the background, so that a signal is heeded at once.
    setpriv --pdeathsig KILL \
        unshare --mount --pid --fork --kill-child --mount-proc bash scripts/test_compose.sh --outside "$@" &
    NAMESPACE=$!
    wait $NAMESPACE || status=$?
    NAMESPACE=""
    if [ $status -ne 0 ]; then exit $status; fi
    say "everything passed in $SECONDS s"
}

case "${1:-}" in
--outside | --inside)
    stage="${1#--}"
    shift
    "$stage" "$@"
    ;;
*) main "$@" ;;
esac
