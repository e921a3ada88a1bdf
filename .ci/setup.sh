#!/bin/sh
# Makes $VENV with hipforge and its test tools, and makes sure of a HIP compiler. Quick when there is nothing to do.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
PIP_INDEX=${PIP_INDEX:-}
NO_SUDO=${NO_SUDO:-}
LLVM=22
COMPILER_PACKAGES="clang-$LLVM lld-$LLVM llvm-$LLVM clang-tools-$LLVM"

say() { printf '%s\n' "$*" >&2; }
# The steps of a set-up, numbered: what happens and how long it may take.
step=0
step() { step=$((step + 1)); say "[$step/3] $*"; }
# Runs pip and shows what it downloads and installs. All of its output goes to $VENV/setup.log, whose end is shown if it
# fails.
pip() {
  { PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip "$@" 2>&1 || : >"$VENV/pip-failed"; } | tee -a "$VENV/setup.log" |
    sed -un 's/^ *Downloading \(.*\)/      \1/p; s/^\(Installing collected packages\):.*/      \1/p' >&2
  [ -e "$VENV/pip-failed" ] || return 0
  rm "$VENV/pip-failed"
  tail -n 20 "$VENV/setup.log" >&2 || true
  fail "pip failed; all that it printed is in $VENV/setup.log"
}
fail() { say "error: $*"; exit 1; }

# Installs distribution packages, or says exactly which are missing. Each command is shown before it runs.
install_packages() {
  wanted=$*
  if ! command -v apt-get >/dev/null 2>&1; then
    fail "missing: $wanted. This system has no apt-get; install these packages (or their equivalents) and run again."
  fi
  sudo=
  if [ "$(id -u)" -ne 0 ]; then
    by_hand="Run 'apt-get install $wanted' as root, then run again."
    [ "$NO_SUDO" != 1 ] || fail "missing: $wanted. NO_SUDO=1 forbids to install them. $by_hand"
    command -v sudo >/dev/null 2>&1 || fail "missing: $wanted. There is no sudo here. $by_hand"
    sudo=sudo
  fi
  apt update -qq || true
  # shellcheck disable=SC2086
  apt install -y -qq --no-install-recommends $wanted ||
    fail "could not install: $wanted. This release may not carry them; install a ROCm with hipcc, or LLVM >= 20 with" \
      "the packages clang, lld, llvm and clang-tools of one version, and run again."
}

# Runs apt-get, as root through sudo ($sudo) where needed, and shows the command first. Its output is for failures only.
apt() {
  say "running: ${sudo:+sudo }env DEBIAN_FRONTEND=noninteractive apt-get $*"
  # shellcheck disable=SC2086
  if output=$($sudo env DEBIAN_FRONTEND=noninteractive apt-get "$@" 2>&1); then return 0; fi
  say "$output"
  return 1
}

python_usable() { command -v "$PYTHON" >/dev/null 2>&1; }

# What this Python lacks for an environment with compiled extensions, as package names.
python_parts() {
  "$PYTHON" -c '
import importlib.util, pathlib, sysconfig
header = pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h"
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
print(*[name for name, there in (("python3-venv", venv), ("python3-dev", header.exists())) if not there])'
}

# Whether the toolchain search accepts a compiler; $answer is what it says. Without a Python to ask, any is believed.
answer=
have_compiler() {
  if python_usable; then answer=$("$PYTHON" .ci/find_compiler.py --before-setup); return; fi
  [ -n "${HIPFORGE_HIPCC:-}" ] || [ -x "${ROCM_PATH:-/opt/rocm}/bin/hipcc" ] || command -v hipcc >/dev/null 2>&1 ||
    command -v "clang++-$LLVM" >/dev/null 2>&1
}

# A ROCm build of torch that the interpreter has is used as it is; nothing may replace it or its triton.
has_rocm_torch() {
  python_usable && "$PYTHON" -c '
import importlib.util, sys
if importlib.util.find_spec("torch") is None:
    sys.exit(1)
import torch
sys.exit(not torch.version.hip)' 2>/dev/null
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "hipforge builds kernels on Linux x86-64 only; this is $(uname -sm)"

if has_rocm_torch; then rocm_torch=yes; else rocm_torch=no; fi
stamp="$VENV/.hipforge-$(cat pyproject.toml constraints.txt .ci/setup.sh | cksum | cut -d' ' -f1)-$rocm_torch"
[ -f "$stamp" ] && exit 0

if python_usable; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1); Python 3.10 or newer is needed: make ... PYTHON=/path/to/python3.10"
  missing=$(python_parts)
else
  [ "$PYTHON" = python3 ] || fail "there is no $PYTHON; name a Python 3.10 or newer: make ... PYTHON=/path/to/python"
  missing="python3 python3-venv python3-dev"
fi
command -v g++ >/dev/null 2>&1 || missing="$missing g++"
if ! have_compiler; then
  [ -z "${HIPFORGE_HIPCC:-}" ] || fail "$answer"
  missing="$missing $COMPILER_PACKAGES"
fi
say "setting up $VENV (once; what pip prints goes to $VENV/setup.log)"
if [ -z "$(echo $missing)" ]; then
  step "packages of the distribution: all there"
else
  step "packages of the distribution:$missing"
  # shellcheck disable=SC2086
  install_packages $missing
fi
index=
[ -z "$PIP_INDEX" ] || index="--extra-index-url $PIP_INDEX"
if [ "$rocm_torch" = yes ]; then
  step "Python packages beside the ROCm torch of $PYTHON (a minute)"
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
  pip install $index $requirements
  pip install --no-deps --no-build-isolation -e .
else
  [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
  step "Python packages: torch, triton and the test tools (2 minutes at 50 MB/s)"
  [ -n "$PIP_INDEX" ] || say "pip takes torch from its configured index: from the public one that is the CUDA build," \
    "5 GB in $VENV; docs/guide/install.md says how PIP_INDEX gets the CPU build, 2.2 GB"
  # shellcheck disable=SC2086
  pip install $index -c constraints.txt -e '.[compiler,cuda,test,plots,docs]'
fi
found=$("$VENV/bin/python" .ci/find_compiler.py) || fail "$found"
step "compiler: $found"
rm -f "$VENV"/.hipforge-*
: >"$stamp"
