# make demo | make test do all the set-up on a fresh Debian/Ubuntu machine. Settings:
#   PYTHON=/path/to/python   interpreter for the environment (>= 3.10); a ROCm torch it has is used as it is
#   PIP_INDEX=URL            an extra package index, for another build of torch
#   NO_SUDO=1                never call sudo: say which distribution packages are missing and stop
#   TEST_JOBS=4              processes of `make test`; default one per core
#   ARCH=gfx950              architecture of `make wheel-aot`

PYTHON    ?= python3
VENV      ?= .venv
PIP_INDEX ?=
NO_SUDO   ?=
TEST_JOBS ?= auto
ARCH      ?= gfx950
BIN       := $(VENV)/bin

.PHONY: demo example test gpu-test test-full test-pythons test-integrations stress adversary mutants lint docs bench wheel wheel-aot release setup clean distclean

demo: setup
	@$(BIN)/hipforge demo

example: setup
	@$(BIN)/python examples/generate.py qwen3

test: setup
	@$(BIN)/python -m pytest op_tests -n $(TEST_JOBS) --dist worksteal
	@$(BIN)/python -m pytest op_tests --arch gfx942 -n $(TEST_JOBS) --dist worksteal

test-full: setup
	@$(BIN)/python -m pytest op_tests --full -n $(TEST_JOBS) --dist worksteal
	@$(BIN)/python -m pytest op_tests --full --arch gfx942 -n $(TEST_JOBS) --dist worksteal

# On a machine with an NVIDIA GPU, with the torch, pytest and nvcc of its own Python: no set-up, no package index.
gpu-test:
	@$(PYTHON) op_tests/gpu/run.py $(GPU_TEST)

test-pythons:
	@sh .ci/pythons.sh

test-integrations: setup
	@VENV='$(VENV)' sh .ci/integrations.sh

# The planted faults that tests must notice: each is put into a copy of the tree, built and tested.
mutants: setup
	@$(BIN)/python op_tests/mutants/run.py $(if $(ONLY),--only $(ONLY))

stress: setup
	@$(BIN)/python op_tests/stress/run.py

adversary: setup
	@$(BIN)/python op_tests/stress/run.py calls --size 10000 $(if $(SEED),--seed $(SEED))

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/python .ci/typecheck.py
	@$(BIN)/python .ci/user_types.py

docs: setup
	@$(BIN)/python .ci/badges.py --check
	@$(BIN)/python .ci/docs.py

bench: setup
	@$(BIN)/python op_tests/bench_jit.py
	@$(BIN)/python op_tests/bench_emulator.py
	@$(BIN)/python op_tests/bench_mxfp4_gemm.py
	@$(BIN)/python op_tests/bench_mxfp8_gemm.py
	@$(BIN)/python op_tests/bench_fp8_skinny_gemm.py
	@$(BIN)/python op_tests/bench_decode_attention.py

wheel: setup
	@echo 'building the wheel and the source distribution into dist/ (a minute)' >&2
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -m build --sdist --outdir dist .
	@$(BIN)/python .ci/wheel_aot.py --binding-only --outdir dist

# What would be uploaded, checked; nothing is.
release: wheel
	@$(BIN)/python .ci/release.py

wheel-aot: setup
	@$(BIN)/python .ci/wheel_aot.py --arch $(ARCH) --outdir dist

setup:
	@PYTHON='$(PYTHON)' VENV='$(VENV)' PIP_INDEX='$(PIP_INDEX)' NO_SUDO='$(NO_SUDO)' sh .ci/setup.sh

# The environments stay: making them again takes minutes and the network.
clean:
	rm -rf build dist *.egg-info src/*.egg-info

distclean: clean
	rm -rf $(VENV) .venv-integrations .venv-pythons
