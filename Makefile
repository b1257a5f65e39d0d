# make            the package in .venv (quick when it is there already)
# make demo       train, quantize, sparsify, report
# make test       lint, types and the whole test suite; GPU tests skip where there is no GPU
# make docs       the manual, as site/index.html
# make gpu-test   the tests that need a GPU, with CuPy
# make clean      forget .venv and the caches of the tools; runs/ stays
#
# With CUDA=cuda any of them brings CuPy too, for the GPU; with CUDA=cuda12 that of a PyTorch built with CUDA 12.

PYTHON ?= python3
VENV ?= .venv
CUDA =

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
WITH_CUDA := $(addprefix -,$(CUDA))
COMMA := ,

ifneq ($(filter-out cuda cuda12,$(CUDA)),)
$(error CUDA is cuda or cuda12, not $(CUDA))
endif

.DEFAULT_GOAL := install
.PHONY: install demo test gpu-test docs clean

install: $(VENV)/.installed$(WITH_CUDA)

demo: install
	$(BIN)/qsparse demo

test: $(VENV)/.installed-test-docs$(WITH_CUDA)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest

gpu-test: $(VENV)/.installed-test-$(or $(CUDA),cuda)
	$(BIN)/python -m pytest -m gpu

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site

# An interrupted `venv` has a python but no pip yet, and making it again mends it: hence the pip.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "qsparse needs Python 3.11 or newer, and '$(PYTHON)' is not found: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "qsparse needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks the venv module: install it (Debian, Ubuntu: apt install python3-venv), or make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/pip
	$(PIP_INSTALL) --editable .
	@touch $@

# With extras: .installed-test, .installed-cuda, .installed-test-cuda and so on. It is installed without them then too.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/pip
	$(PIP_INSTALL) --editable '.[$(subst -,$(COMMA),$*)]'
	@touch $@ $(VENV)/.installed $(patsubst %,$(VENV)/.installed-%,$(subst -, ,$*))
