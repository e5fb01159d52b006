#!/usr/bin/env bash
# Makes .venv with everything at the versions of constraints.txt. Needs Python >= 3.10 and nothing else; safe to run again.
# CHIPMESH_PYTHON names the interpreter to use instead of the first suitable one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
PY="$VENV/bin/python"
STAMP="$VENV/.chipmesh-setup"
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*"; }

fail() {
    echo "setup: $*" >&2
    exit 1
}

# What decides the environment's content; the interpreter is part of it, through the folder it made.
wanted_stamp() { cat pyproject.toml constraints.txt scripts/setup.sh | cksum; }

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${CHIPMESH_PYTHON:-python3 python python3.13 python3.12 python3.11 python3.10 python3.14}; do
        if command -v "$candidate" >/dev/null 2>&1 && suitable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python >= 3.10 with the venv module found (tried ${CHIPMESH_PYTHON:-python3, python, python3.10 to 3.14});" \
        "install one (Debian, Ubuntu: apt-get install python3-venv) or set CHIPMESH_PYTHON"
}

make_environment() {
    if [ -x "$PY" ] && suitable "$PY" && "$PY" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python
    python="$(find_python)"
    say "creating $VENV with $("$python" --version) ($python)"
    "$python" -m venv --clear "$VENV"
}

# -qq: pip warns once per package about index folders that lack it, and errors still show.
pip_install() { "$PY" -m pip install -qq --disable-pip-version-check --constraint constraints.txt "$@"; }

# Older pips (Ubuntu 22.04 brings 22.0) know no --dry-run.
update_pip() {
    if ! "$PY" -m pip install --help | grep -q -- --dry-run; then
        say "updating pip"
        "$PY" -m pip install --quiet --disable-pip-version-check --upgrade pip
    fi
}

torch_pin() { sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt; }

# Version of a torch that pip has on this machine's disk (its find-links); nothing is downloaded. Empty when there is none.
torch_on_disk() {
    "$PY" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --ignore-installed --dry-run \
        --report - "torch==$(torch_pin)" 2>/dev/null |
        "$PY" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null || true
}

cpu_index_reachable() {
    "$PY" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=8).close()' "$CPU_INDEX/torch/" \
        >/dev/null 2>&1
}

torch_has_pin() {
    "$PY" -c 'import sys, importlib.metadata as m; sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' "$(torch_pin)" \
        >/dev/null 2>&1
}

install_torch() {
    local pin found
    pin="$(torch_pin)"
    if torch_has_pin; then
        TORCH_SOURCE="already installed"
        return
    fi
    found="$(torch_on_disk)"
    if [[ "$found" == *+cpu ]]; then
        TORCH_SOURCE="the CPU build on this machine's disk"
        say "installing torch $found from $TORCH_SOURCE"
        pip_install --no-index --no-deps "torch==$pin"
    elif cpu_index_reachable; then
        TORCH_SOURCE="PyTorch's CPU index ($CPU_INDEX)"
        say "installing torch $pin from $TORCH_SOURCE: a download of about 200 MB"
        pip_install --no-deps --index-url "$CPU_INDEX" "torch==$pin"
    else
        TORCH_SOURCE="the default package index ($CPU_INDEX cannot be reached)"
        say "WARNING: installing torch $pin from $TORCH_SOURCE; on Linux that can be the CUDA build: several GB"
        pip_install "torch==$pin"
    fi
}

torch_line() {
    "$PY" - <<'EOF'
import importlib.metadata as metadata
from pathlib import Path
files = metadata.files("torch") or []
size = sum(Path(file.locate()).stat().st_size for file in files if Path(file.locate()).exists())
print(f"torch {metadata.version('torch')}, {size / 1e6:,.0f} MB on disk")
EOF
}

if [ -x "$PY" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(wanted_stamp)" ]; then
    say "$VENV is up to date"
    exit 0
fi
SECONDS=0
make_environment
rm -f "$STAMP"
update_pip
install_torch
say "installing chipmesh and its libraries at the versions of constraints.txt"
pip_install hatchling editables setuptools
# No isolated build: the build tools are the pinned ones just installed, and nothing else is fetched. One library (forbiddenfruit)
# comes as source: what a fresh environment brings of setuptools cannot build it, and pip's cache hides that.
pip_install --no-build-isolation --editable ".[cpu,dev]"
wanted_stamp >"$STAMP"
say "took $(torch_line), from ${TORCH_SOURCE}"
say "$VENV ready in ${SECONDS} s ($(du -sh "$VENV" | cut -f1))"
