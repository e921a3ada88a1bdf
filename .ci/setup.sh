#!/bin/sh
# Makes $VENV with hipforge and its test tools, and makes sure of a HIP compiler. Quick when there is nothing to do.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
PIP_INDEX=${PIP_INDEX:-}
LLVM=22
COMPILER_PACKAGES="clang-$LLVM lld-$LLVM llvm-$LLVM clang-tools-$LLVM"

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

# Installs distribution packages, or says exactly which are missing.
install_packages() {
  wanted=$*
  if ! command -v apt-get >/dev/null 2>&1; then
    fail "missing: $wanted. This system has no apt-get; install these packages (or their equivalents) and run again."
  fi
  sudo=
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || fail "missing: $wanted. Install them as root: apt-get install $wanted"
    sudo=sudo
  fi
  say "installing from the distribution: $wanted"
  # shellcheck disable=SC2086
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $wanted >/dev/null 2>&1 && return
  $sudo apt-get update -qq >/dev/null 2>&1 || true
  # shellcheck disable=SC2086
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $wanted >/dev/null ||
    fail "could not install: $wanted. This release may not carry them; install a ROCm with hipcc, or LLVM >= 20 with" \
      "the packages clang, lld, llvm and clang-tools of one version, and run again."
}

have_rocm() {
  [ -n "${HIPFORGE_HIPCC:-}" ] && return 0
  [ -x "${ROCM_PATH:-/opt/rocm}/bin/hipcc" ] && return 0
  command -v hipcc >/dev/null 2>&1
}

# A clang >= 20 whose lld and offload bundler are of the same version.
have_clang() {
  for version in 24 23 22 21 20; do
    if command -v "clang++-$version" >/dev/null 2>&1 && command -v "ld.lld-$version" >/dev/null 2>&1 &&
      command -v "clang-offload-bundler-$version" >/dev/null 2>&1; then
      return 0
    fi
  done
  return 1
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "hipforge builds kernels on Linux x86-64 only; this is $(uname -sm)"

missing=
command -v "$PYTHON" >/dev/null 2>&1 || missing="python3 python3-venv python3-dev"
command -v g++ >/dev/null 2>&1 || missing="$missing g++"
have_rocm || have_clang || missing="$missing $COMPILER_PACKAGES"
# shellcheck disable=SC2086
[ -z "$missing" ] || install_packages $missing

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$PYTHON is $("$PYTHON" -V 2>&1); Python 3.10 or newer is needed: make ... PYTHON=/path/to/python3.10"
probe=$("$PYTHON" -c '
import importlib.util, pathlib, sysconfig
print("" if importlib.util.find_spec("ensurepip") else "python3-venv", end=" ")
header = pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h"
print("" if header.exists() else "python3-dev")')
# shellcheck disable=SC2086
[ -z "$(echo $probe)" ] || install_packages $probe

# A ROCm build of torch that the interpreter has is used as it is; nothing may replace it or its triton.
rocm_torch=$("$PYTHON" -c '
try:
    import torch
    print("yes" if torch.version.hip else "no")
except Exception:
    print("no")')

stamp="$VENV/.hipforge-$(cat pyproject.toml constraints.txt .ci/setup.sh | cksum | cut -d' ' -f1)-$rocm_torch"
[ -f "$stamp" ] && exit 0

say "setting up $VENV (once)"
index=
[ -z "$PIP_INDEX" ] || index="--extra-index-url $PIP_INDEX"
if [ "$rocm_torch" = yes ]; then
  "$PYTHON" -m venv --system-site-packages "$VENV"
  # Where $PYTHON is itself a virtual environment, "system" means the interpreter below it: name its packages too.
  "$PYTHON" -c '
import sys, sysconfig
paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
open(sys.argv[1] + "/base-environment.pth", "w").write("\n".join(paths) + "\n")
' "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.version.hip)' ||
    fail "the ROCm torch of $PYTHON is not visible in $VENV; remove $VENV and run again"
  requirements=$("$VENV/bin/python" .ci/requirements.py --without torch triton)
  # shellcheck disable=SC2086
  "$VENV/bin/python" -m pip install -q $index $requirements
  "$VENV/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
else
  [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
  # shellcheck disable=SC2086
  "$VENV/bin/python" -m pip install -q $index -c constraints.txt -e '.[compiler,test,plots]'
fi
rm -f "$VENV"/.hipforge-*
: >"$stamp"
