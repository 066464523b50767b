# Targets: venv demo test test-all lint docs links notebooks venv312 test312 test-aot venv-vllm test-vllm clean. `make` alone prints them.
#
# PYTHON       the interpreter of .venv, 3.11 or newer
# TORCH_INDEX  an index with CPU builds of torch, where the default one has only CUDA builds:
#              make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu
# WORKERS      parallel test processes
PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
VENV312 := .venv312
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
NO_DEVICE := not gpu and not multigpu and not vllm

# Tests that run without torch, under the newest supported JAX.
JAX_ONLY_TESTS ?= $(addprefix bench/test_,roofline.py result.py timing.py decode_metrics.py \
  projection.py compare.py ops.py decode.py) $(addprefix parity/,test_make_tiny.py test_config.py \
  test_checkpoint.py test_prepared.py test_memory.py test_router.py test_step.py test_engine.py \
  test_cli.py test_readme.py test_kernels_mxfp4.py test_kernels_skinny.py test_kernels_experts.py \
  test_kernels_attn_res.py test_kernels_mix.py test_kernels_kda.py test_kernels_commit.py \
  test_kernels_late.py test_kernels_experts_row.py test_kernels_split.py test_kernels_exchange.py \
  test_kernels_topk.py test_kernels_vocab.py test_kernels_mla.py \
  test_specialized_trace.py test_binding.py test_plan.py test_notebooks.py test_selftest.py)

.PHONY: help venv demo test test-all lint docs links notebooks venv312 test312 test-aot venv-vllm test-vllm clean
.DELETE_ON_ERROR:

help:
	@echo "venv      make $(VENV) with the pinned packages of constraints/py311.txt"
	@echo "demo      write a tiny model, compare JAX with PyTorch on it, report to build/demo/report"
	@echo "test      the tests that need no GPU and little time"
	@echo "test-all  the same and the slow ones"
	@echo "lint      ruff and pyright"
	@echo "docs      the documentation, to docs/_build; warnings are errors"
	@echo "links     whether links of the documentation to other sites still lead somewhere (network)"
	@echo "notebooks executed notebooks, to build/notebooks; write_a_kernel where a Python >= 3.12 is found"
	@echo "test312   the JAX-only tests with the newest JAX, where a Python >= 3.12 is found"
	@echo "test-aot  some kernels compiled for an H200 and a GB300, without either, in the same environment"
	@echo "test-vllm names and objects of vLLM 0.33.0, in an environment of its own (9 GB, no GPU needed)"
	@echo "clean     remove build/, docs/_build/ and caches, not the environments"

venv: $(VENV)/.stamp

# torch first and alone: any other order could resolve to a build with several GB of CUDA libraries.
$(VENV)/.stamp: pyproject.toml constraints/py311.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); expected Python >= 3.11; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  -c constraints/py311.txt torch==2.13.0
	$(BIN)/python $(PIP_INSTALL) -c constraints/py311.txt -e '.[test]'
	@touch $@

demo: venv
	rm -rf build/demo
	$(BIN)/k3 make-tiny build/demo --preset tiny --seed 0
	$(BIN)/k3 generate build/demo/target --prompt-ids 5,17,101 --steps 16
	$(BIN)/python -m parity compare build/demo/target --steps 16 --report build/demo/compare
	$(BIN)/python -m parity golden parity/golden/ops parity/golden/model_tiny3 --report build/demo/report
	@echo "reports: build/demo/compare/index.html (JAX against PyTorch on the small checkpoint)"
	@echo "         build/demo/report/index.html (against recorded outputs of the published code)"

test: venv
	$(BIN)/python -m pytest -n $(WORKERS) -m "$(NO_DEVICE) and not slow" $(PYTEST_ARGS)

test-all: venv
	$(BIN)/python -m pytest -n $(WORKERS) -m "$(NO_DEVICE)" $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.stamp-docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

links: $(VENV)/.stamp-docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q --keep-going -b linkcheck docs docs/_build/links

$(VENV)/.stamp-docs: $(VENV)/.stamp
	$(BIN)/python $(PIP_INSTALL) -c constraints/py311.txt -e '.[docs]'
	@touch $@

# Executed and written with their outputs; the second list runs with the Python of $(VENV312).
NOTEBOOKS ?= inside_one_step change_the_model speculation where_the_time_goes
NOTEBOOKS312 ?= write_a_kernel
KERNEL312 := k3-py312
EXECUTE := JAX_PLATFORMS=cpu $(BIN)/jupytext --quiet --to ipynb --execute --run-path .

notebooks: $(VENV)/.stamp-notebooks venv312
	mkdir -p build/notebooks
	for name in $(NOTEBOOKS); do $(EXECUTE) \
	  --output build/notebooks/$$name.ipynb notebooks/$$name.py || exit 1; done
	@if [ ! -e $(VENV312)/.stamp ]; then echo "NOT RUN: $(NOTEBOOKS312), for want of a Python >= 3.12"; exit; fi; \
	$(VENV312)/bin/python -m ipykernel install --prefix $(VENV) --name $(KERNEL312) \
	  --display-name "Python 3.12, newer JAX" >/dev/null && \
	for name in $(NOTEBOOKS312); do $(EXECUTE) --set-kernel $(KERNEL312) \
	  --output build/notebooks/$$name.ipynb notebooks/$$name.py || exit 1; done
	@echo "build/notebooks/*.ipynb"

$(VENV)/.stamp-notebooks: $(VENV)/.stamp
	$(BIN)/python $(PIP_INSTALL) -c constraints/py311.txt -e '.[notebooks]'
	@touch $@

# Prints the path of a Python >= 3.12, also one that pyenv holds without having it selected.
FIND_PYTHON312 = \
  versions=$$(pyenv versions --bare 2>/dev/null | grep -E '^3\.(1[2-9])(\.[0-9]+)?$$'); \
  for name in python3.12 python3.13 python3; do for version in "" $$versions; do \
    found=$$(PYENV_VERSION=$$version $$name -c 'import sys, venv; assert sys.version_info >= (3, 12); \
      print(sys.executable)' 2>/dev/null) && { echo $$found; break 2; }; \
  done; done

venv312:
	@python=$$($(FIND_PYTHON312)); \
	if [ -z "$$python" ]; then \
	  echo "NOT RUN: the part for JAX 0.12 needs Python >= 3.12, and none was found" \
	    "(tried python3.12, python3.13, python3 and the versions of pyenv)"; \
	else $(MAKE) --no-print-directory $(VENV312)/.stamp PYTHON312=$$python; fi

# The pins are the whole environment: torch is not among them, and the project adds nothing.
$(VENV312)/.stamp: pyproject.toml constraints/py312.txt
	@test -n "$(PYTHON312)" || { echo "use make venv312, which finds the interpreter" >&2; exit 1; }
	$(PYTHON312) -m venv --clear $(VENV312)
	$(VENV312)/bin/python $(PIP_INSTALL) -r constraints/py312.txt
	$(VENV312)/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

test312: venv312
	@if [ -e $(VENV312)/.stamp ]; then \
	  $(VENV312)/bin/python -m pytest -n $(WORKERS) -m "$(NO_DEVICE) and not slow" $(PYTEST_ARGS) $(JAX_ONLY_TESTS); fi

# In a folder of its own: a CUDA plugin among the packages would be loaded by every test.
AOT := $(VENV312)/aot

$(AOT)/.stamp: $(VENV312)/.stamp constraints/aot.txt
	rm -rf $(AOT)
	$(VENV312)/bin/python $(PIP_INSTALL) --no-deps --target $(AOT) -r constraints/aot.txt
	@touch $@

test-aot: venv312
	@if [ -e $(VENV312)/.stamp ]; then $(MAKE) --no-print-directory $(AOT)/.stamp && \
	  PYTHONPATH=$(AOT) $(VENV312)/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS) parity/test_kernels_aot.py; fi

# VLLM_PYTHON: the Python of an environment with vLLM; by default one is made.
VENV_VLLM := .venvvllm
VLLM_PYTHON ?= $(CURDIR)/$(VENV_VLLM)/bin/python

venv-vllm:
	@python=$$($(FIND_PYTHON312)); test -n "$$python" || { echo "vLLM needs Python >= 3.12" >&2; exit 1; }; \
	  test -e $(VENV_VLLM)/.stamp || { $$python -m venv --clear $(VENV_VLLM) && \
	  $(VENV_VLLM)/bin/python $(PIP_INSTALL) vllm==0.33.0 && touch $(VENV_VLLM)/.stamp; }

test-vllm: venv
	@test -x "$(VLLM_PYTHON)" || $(MAKE) --no-print-directory venv-vllm
	VLLM_PYTHON="$(VLLM_PYTHON)" $(BIN)/python -m pytest -m vllm $(PYTEST_ARGS) parity

clean:
	rm -rf build dist docs/_build .pytest_cache .ruff_cache .hypothesis
