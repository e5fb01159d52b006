#!/usr/bin/env bash
# Everything that decides whether a change may land: environment, checks, then all tests. Arguments go to pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "test: 1/3 environment"
bash scripts/setup.sh || exit 1
echo "test: 2/3 checks (lint, format, types, import law, generated code)"
bash scripts/check.sh
checks=$?
echo "test: 3/3 tests, after ${SECONDS} s"
.venv/bin/python -m pytest --durations=5 "$@"
tests=$?
if [ "$checks" -ne 0 ]; then
    echo "test: the checks failed (see above, or run scripts/check.sh)" >&2
    exit 1
fi
exit "$tests"
