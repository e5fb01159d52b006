#!/usr/bin/env bash
# Everything that decides whether a change may land: environment, checks, then all tests. Arguments go to pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "test: 1/5 environment"
bash scripts/setup.sh || exit 1
echo "test: 2/5 the small real model that some tests run on (about 85 MB, once)"
.venv/bin/chipmesh pull smollm2-135m || exit 1
echo "test: 3/5 checks (lint, format, types, import law, generated code), beside the tests"
log="$(mktemp)"
bash scripts/check.sh >"$log" 2>&1 &
checking=$!
trap 'kill $checking 2>/dev/null; rm -f "$log"' EXIT
echo "test: 4/5 tests, after ${SECONDS} s"
# A file is one process's own: its meshes and its order. Processes are for two cores, as on CI.
.venv/bin/python -m pytest -n 2 --dist loadfile --durations=5 "$@"
tests=$?
wait $checking
checks=$?
cat "$log"
echo "test: 5/5 a mesh over several hosts, after ${SECONDS} s"
if unshare --net true 2>/dev/null; then
    bash scripts/test_hosts.sh || tests=1
else
    echo "test: SKIPPED: network namespaces stand for the hosts, and only root may make them"
fi
if [ "$checks" -ne 0 ]; then
    echo "test: the checks failed (see above, or run scripts/check.sh)" >&2
    exit 1
fi
exit "$tests"
