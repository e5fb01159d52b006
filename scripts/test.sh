#!/usr/bin/env bash
# Everything that decides whether a change may land: environment, checks, then all tests. Arguments go to pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "test: 1/5 environment"
bash scripts/setup.sh || exit 1
echo "test: 2/5 the small real model that some tests run on (about 85 MB, once)"
.venv/bin/chipmesh pull smollm2-135m || exit 1
echo "test: 3/5 checks (lint, format, types, import law, generated code), then a mesh over several hosts, beside the tests"
beside() {
    bash scripts/check.sh || return 1
    if unshare --net true 2>/dev/null; then
        bash scripts/test_hosts.sh
    else
        echo "test: SKIPPED: network namespaces stand for the hosts, and only root may make them"
    fi
}
log="$(mktemp)"
beside >"$log" 2>&1 &
beside=$!
trap 'kill $beside 2>/dev/null; rm -f "$log"' EXIT
echo "test: 4/5 tests, after ${SECONDS} s"
# A file is one process's own: its meshes and its order. Processes are for two cores, as on CI.
.venv/bin/python -m pytest -n 2 --dist loadfile --durations=5 "$@"
tests=$?
echo "test: 5/5 what went beside them, after ${SECONDS} s"
wait $beside
others=$?
cat "$log"
if [ "$others" -ne 0 ]; then
    echo "test: the checks, or the mesh over several hosts, failed (see above; scripts/check.sh, scripts/test_hosts.sh)" >&2
    exit 1
fi
exit "$tests"
