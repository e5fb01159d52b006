#!/usr/bin/env bash
# All checks that run no test: lint, format, types, import law, generated code, contract lint. Every part runs, then the sum.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh || exit 1

BIN=.venv/bin
failed=()

part() {
    local name="$1" started=$SECONDS
    shift
    echo "check: $name"
    if "$@"; then
        echo "check: $name passed in $((SECONDS - started)) s"
    else
        echo "check: $name FAILED after $((SECONDS - started)) s ($*)" >&2
        failed+=("$name")
    fi
}

part "lint" "$BIN/ruff" check --quiet .
part "format" "$BIN/ruff" format --check --quiet .
part "types" "$BIN/mypy"
part "types of the generator" "$BIN/mypy" protos/generate.py
part "import law" "$BIN/lint-imports" --no-logo
part "generated code" "$BIN/python" protos/generate.py --check
part "contract lint" "$BIN/buf" lint protos

if [ ${#failed[@]} -gt 0 ]; then
    echo "check: failed after ${SECONDS} s: ${failed[*]}" >&2
    exit 1
fi
echo "check: everything passed in ${SECONDS} s"
