#!/bin/sh
# Tests the binding and the decorator under every Python from 3.10 to 3.14 that this machine has, each in an environment
# of its own with the newest torch that pip finds for it (5 GB each with the public index's CUDA build).
#   .ci/pythons.sh [3.10 3.12 ...]     VENVS=.venv-pythons is where the environments are kept
set -u
cd "$(dirname "$0")/.."
VENVS=${VENVS:-.venv-pythons}
TESTS="op_tests/jit/test_abi.py op_tests/jit/test_abi_devices.py op_tests/jit/test_abi_hidden_facts.py
  op_tests/jit/test_abi_fast_ways.py op_tests/jit/test_compile_ops.py op_tests/jit/test_pythons.py"

find_python() {
  for candidate in $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python"$1" 2>/dev/null) "python$1"; do
    "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null || continue
    echo "$candidate"
    return
  done
}

failed=0 passed=0 table=
note() { table="$table  $1: $2
"; }
mkdir -p "$VENVS"
for version in ${*:-3.10 3.11 3.12 3.13 3.14}; do
  python=$(find_python "$version")
  if [ -z "$python" ]; then note "$version" "missing: no python$version on PATH or among pyenv's"; continue; fi
  echo "== $version: $python" >&2
  bin="$VENVS/$version/bin"
  if { [ -x "$bin/python" ] || "$python" -m venv "$VENVS/$version"; } &&
    "$bin/python" -m pip install -q -e '.[compiler]' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' numpy &&
    "$bin/python" -m pytest -q -p no:cacheprovider $TESTS; then
    passed=$((passed + 1)) result=passed
  else
    failed=$((failed + 1)) result=FAILED
  fi
  note "$version" "$result with torch $("$bin/python" -c 'import torch; print(torch.__version__)' 2>&1 | tail -n 1)"
done
printf '%s%d passed, %d failed\n' "$table" "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
