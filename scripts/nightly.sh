#!/usr/bin/env bash
# The long property tests: the same tests with hypothesis' `nightly` profile, plus those marked `nightly`. Takes a night or more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
.venv/bin/chipmesh pull smollm2-135m
bash scripts/smg.sh
echo "nightly: the page in a real browser"
bash scripts/test_page.sh
echo "nightly: the whole user's story on a real container engine, where there can be one"
bash scripts/test_compose.sh -m compose || [ $? -eq 77 ]
echo "nightly: meshes over several hosts"
bash scripts/test_hosts.sh -m "nightly or not nightly"
export HYPOTHESIS_PROFILE=nightly
MACHINE=tests/unit/scheduler_core/test_batcher_machine.py
# No per-test timeout: a property test of the nightly profile runs for as long as its examples need.
echo "nightly: a million random steps over the scheduler's tree, ledger and batcher"
.venv/bin/python -m pytest --timeout=0 "$MACHINE"
echo "nightly: the fault scoreboard in full counts (six hours or more)"
.venv/bin/chipmesh chaos all --full
echo "nightly: an hour of load, and what each service's memory grows by"
.venv/bin/python -m benchmarks.memory --json --seconds 3600 --even-if-busy
echo "nightly: all tests with many more examples per property"
.venv/bin/python -m pytest --timeout=0 -m "nightly or not nightly" --ignore="$MACHINE" --ignore=tests/browser "$@"
