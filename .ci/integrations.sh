#!/bin/sh
# Run the adapters of inference servers against the servers themselves, on a CPU.
#
#     sh .ci/integrations.sh [PYTEST ARGUMENTS]
#
# The wheels of .ci/integrations.txt (1 GB installed) go without their dependencies into an environment of their own,
# which also sees the packages of $VENV: torch, triton, pytest. Python 3.11 or newer, as vLLM wants it.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
PLACE=${INTEGRATIONS_VENV:-.venv-integrations}
"$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "make test-integrations: vLLM needs Python 3.11 or newer; $VENV has $("$VENV/bin/python" -V)" >&2
  exit 1
}
stamp="$PLACE/.integrations"
if ! cmp -s .ci/integrations.txt "$stamp"; then
  echo "installing the servers into $PLACE (minutes; what pip prints goes to $PLACE/setup.log)" >&2
  [ -x "$PLACE/bin/python" ] || "$VENV/bin/python" -m venv "$PLACE"
  pages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  own=$("$PLACE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$pages')" >"$own/project-environment.pth"
  "$PLACE/bin/python" -m pip install --no-deps -r .ci/integrations.txt >"$PLACE/setup.log" 2>&1 &&
    "$PLACE/bin/python" -m pip install --no-deps --no-build-isolation -e . >>"$PLACE/setup.log" 2>&1 || {
    tail -5 "$PLACE/setup.log" >&2
    exit 1
  }
  cp .ci/integrations.txt "$stamp"
fi
# Each server in a process of its own: both change torch for the whole of it.
for server in vllm sglang; do
  PYTHONPATH=op_tests "$PLACE/bin/python" -m pytest -q -p no:cacheprovider -p helpers.torchvision_operators \
    "op_tests/integrations/check_$server.py" "$@"
done
