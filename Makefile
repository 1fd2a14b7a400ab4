# Everything that a contributor or CI types. `make` alone lists it.
#
# Nothing has to be installed but Python >= 3.11 (with venv): each target builds what it needs in .venv, once, and
# again only when pyproject.toml or constraints.txt change.
#
#   PYTHON=python3.12     another interpreter for .venv
#   PIP_ARGS='...'        more arguments for `uv pip install` or `pip install` (an index, a wheel folder)
#   PYTEST_ARGS='...'     more arguments for pytest
#   OUT=folder            where `make demo` writes

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
OUT ?= demo-output
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
# Only where it is there: make itself builds as well.
NINJA = $(if $(shell command -v ninja),-G Ninja)
CORES = $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

KERNELS := src/attlas/engine/backends/native/kernels
LIBRARY := src/attlas/engine/backends/native/_kernels.so

# One thread for each test process: two processes of one thread finish sooner than two of many.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Python compiles what is imported when it is imported; compiling all of PyTorch first would double the wait. It must be
# allowed to keep what it compiled: otherwise each process that a test starts compiles PyTorch again, for six seconds.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install -qq --no-compile -c constraints.txt $(PIP_ARGS)
# uv installs in a third of pip's time. It takes the best version of all indexes, as pip does, and is told pip's settings.
UV := $(BIN)/python -m uv pip install -q --python $(BIN)/python --index-strategy unsafe-best-match -c constraints.txt $(PIP_ARGS)

# Environments of their own: uv makes and fills them, and finds what pip is told of.
OWN_UV = $(if $(wildcard $(BIN)/uv),$(BIN)/uv,uv)
VENV_OF = $(OWN_UV) venv -q --python 3.11
IN_VENV = UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" $(OWN_UV) pip install -q --index-strategy unsafe-best-match $(PIP_ARGS) --python

.PHONY: help
help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.demo-ready ## See the attention of a small trained model on real text; writes ./demo-output
	@$(BIN)/attlas demo --output "$(OUT)"

.PHONY: test
test: current ## Run every test and documented example, but for those of compiled programs and of GPU kernels
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --ignore=tests/compiled --ignore=tests/triton_kernels $(PYTEST_ARGS)

.PHONY: test-compiled
test-compiled: current ## Run the tests of torch.compile and torch.export: torch takes long to compile
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal tests/compiled $(PYTEST_ARGS)

# The interpreter of Triton is chosen for a whole process, and its compiler for another one.
.PHONY: test-triton
test-triton: current ## Run the tests of the GPU kernels, in Triton's interpreter and by its compiler; no GPU is needed
	@if ! $(BIN)/python -c 'import triton' 2>/dev/null && ! $(INSTALL) triton; then \
	  echo "No triton for this system: the tests of its kernels are skipped."; exit 0; \
	fi; \
	tests="$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)"; \
	$(ONE_THREAD) TRITON_INTERPRET=1 $$tests tests/triton_kernels/interpreted; \
	$(ONE_THREAD) $$tests tests/triton_kernels/compiled

# Libraries that attlas works with, in an environment of their own with pinned versions.
.PHONY: test-doors
test-doors: ## Run the tests against timm, torchvision, open_clip, circuitsvis, captum, TransformerLens, nnsight and others
	@test -e build/doors/bin/python || $(VENV_OF) build/doors
	@$(IN_VENV) build/doors/bin/python $(foreach file,$(wildcard tests/doors/requirements*.txt),-r $(file))
	$(ONE_THREAD) PYTHONPATH=src:. build/doors/bin/python -m pytest -q -p no:cacheprovider tests/doors $(PYTEST_ARGS)

# An environment for each version; `make test-transformers TRANSFORMERS=4.51.3` for one of your own.
TRANSFORMERS ?= 4.48.0 4.57.6 5.23.0
.PHONY: test-transformers
test-transformers: ## Run what holds with every version of transformers with the lowest, a middle and the newest one
	@for version in $(TRANSFORMERS); do \
	  folder=build/transformers-$$version; \
	  test -e $$folder/bin/python || $(VENV_OF) $$folder; \
	  $(IN_VENV) $$folder/bin/python torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 pytest==9.2.0 hypothesis==6.170.15 transformers==$$version; \
	  echo "== transformers $$version"; \
	  $(ONE_THREAD) PYTHONPATH=src:. $$folder/bin/python -m pytest -q -p no:cacheprovider tests/huggingface/test_versions.py $(PYTEST_ARGS); \
	done

FAST := tests/contracts --ignore=tests/contracts/test_testing.py

.PHONY: test-fast
test-fast: current ## Run the contracts of every score, mask and backend (under a minute)
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(FAST) $(PYTEST_ARGS)

# `make test` runs with the widest set that the processor has. The tests of the kernels and tests/contracts/test_native.py
# force each set by themselves. Left out too are plans that name a backend of plain torch, and idioms, whose matrices are
# too small for a kernel. What calls no kernel with one set is skipped with the narrower ones: they hand less to the
# kernels. The only exception are gradients of 16-bit tokens, which go to kernels with AVX2 and to torch with AVX-512:
# tests/engine/native/test_dot_backward.py forces those. Pretended devices have no kernels of the CPU.
WITHOUT_KERNELS := --ignore=tests/contracts/test_native.py --ignore=tests/contracts/test_idioms.py \
  $(foreach name,devices waits float64 walk,--ignore=tests/contracts/test_$(name).py) \
  -k 'not (test_equals_the_formulas and (tiled or reference))'

.PHONY: test-sets
test-sets: current ## Run contracts and statistics with each narrower instruction set, and without kernels
	@sets="$$($(BIN)/python -c 'from attlas.engine.backends.native import library; print(*library.runnable()[-2::-1], "none")')"; \
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --sets "$$sets" $(WITHOUT_KERNELS) \
	  $(FAST) tests/stats

.PHONY: check
check: $(VENV)/.dev-ready ## Lint, format, types, import contracts, house rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(ONE_THREAD) $(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS) tests/test_house.py

TYPESCRIPT := build/typescript-6.0.3

.PHONY: types
types: ## Check the types of the viewer's JavaScript; needs Node and npm
	@if ! command -v node >/dev/null || ! command -v npm >/dev/null; then \
	  echo "No Node or no npm here: the types of the viewer's page are not checked."; exit 0; \
	fi; \
	if [ ! -e $(TYPESCRIPT)/node_modules/.bin/tsc ]; then \
	  mkdir -p $(TYPESCRIPT); \
	  npm install --prefix $(TYPESCRIPT) --no-audit --no-fund --ignore-scripts --silent typescript@$(TYPESCRIPT:build/typescript-%=%); \
	fi; \
	$(TYPESCRIPT)/node_modules/.bin/tsc --project .

.PHONY: native
native: ## Compile the CPU kernels into src, again and again while you work on them; needs CMake and a C++ compiler
	@cmake -S . -B build/native -DATTLAS_IN_PLACE=ON $(NINJA) >/dev/null
	@cmake --build build/native --parallel $(CORES)

# An install compiles the kernels; after that, sources that are newer than the library are compiled again.
.PHONY: current
current: $(VENV)/.dev-ready
	@if [ -e $(LIBRARY) ] && [ -n "$$(find CMakeLists.txt $(KERNELS) -newer $(LIBRARY))" ] && command -v cmake >/dev/null; \
	then $(MAKE) --no-print-directory native; fi

.PHONY: sanitize
# Unoptimized: optimizing what the sanitizers add takes minutes. How threads share the work is the same for every
# instruction set, so that their sanitizer looks at one.
sanitize: ## Run the C++ tests of the kernels under the address, undefined-behaviour and thread sanitizers
	@if ! command -v cmake >/dev/null || ! command -v $${CXX:-c++} >/dev/null; then \
	  echo "No CMake or no C++ compiler here: the sanitizers are skipped."; exit 0; \
	fi; \
	sanitize() { \
	  folder=build/sanitize-$${1%,*}; \
	  cmake -S . -B $$folder $(NINJA) -DATTLAS_TESTS=ON -DATTLAS_SANITIZE=$$1 -DATTLAS_WIDEST=$$2 -DATTLAS_OPTIMIZE=-O0 >/dev/null; \
	  cmake --build $$folder --parallel $(WORKERS) >/dev/null; \
	  for program in $$folder/test_*; do echo "== $$1: $$(basename $$program)"; $$program; done; \
	}; \
	sanitize address,undefined amx; \
	sanitize thread baseline

.PHONY: arm
arm: ## Compile the kernels for 64-bit ARM (NEON) and run their C++ tests under QEMU
	@here() { command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null; }; \
	if ! here && command -v apt-get >/dev/null; then \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq g++-aarch64-linux-gnu qemu-user-static || true; \
	fi; \
	if ! here || ! command -v cmake >/dev/null; then \
	  echo "No CMake, cross compiler or QEMU here: the kernels for ARM are skipped."; exit 0; \
	fi; \
	cmake -S . -B build/arm $(NINJA) -DATTLAS_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DATTLAS_OPTIMIZE=-O2 >/dev/null; \
	cmake --build build/arm --parallel $(WORKERS) >/dev/null; \
	for program in build/arm/test_*; do qemu-aarch64-static -L /usr/aarch64-linux-gnu $$program; done

.PHONY: format
format: $(VENV)/.dev-ready ## Format the code and repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: bench
bench: current ## Measure speed and memory on this machine (minutes; use an idle one)
	@for script in $(filter-out %/harness.py %/sweep.py %/sweep_models.py %/sweep_inputs.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

.PHONY: sweep
sweep: current ## Run every model type of transformers on eager and on attlas (minutes)
	$(BIN)/python benchmarks/sweep.py

.PHONY: docs
docs: $(VENV)/.dev-ready ## Draw every picture and build the pages into ./site, with warnings as errors
	$(ONE_THREAD) $(BIN)/python docs/_build/pictures.py
	$(ONE_THREAD) $(BIN)/python docs/_build/notebooks.py
	$(ONE_THREAD) $(BIN)/python docs/_build/screenshots.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Written: site/index.html"

.PHONY: setup
setup: $(VENV)/.dev-ready ## Create .venv with everything that development needs

.PHONY: browser
browser: $(VENV)/.dev-ready ## Install what the browser tests need: Chromium and Playwright
	$(INSTALL) playwright
	@if command -v chromium chromium-browser google-chrome >/dev/null; then \
	  echo "Chromium is here already."; \
	elif command -v apt-get >/dev/null; then \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq chromium; \
	else \
	  $(BIN)/python -m playwright install chromium; \
	fi

.PHONY: clean
clean: ## Remove .venv, caches and what the demo wrote
	rm -rf $(LIBRARY) editable/CMakeCache.txt editable/CMakeFiles editable/kernels
	rm -rf $(VENV) build dist site demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------------- setup

# The first interpreter that is new enough and can make a virtual environment; evaluated only when .venv is missing.
FIND_PYTHON = for python in $${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do \
    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
      echo "$$python"; break; \
    fi; \
  done
NO_PYTHON := attlas needs Python 3.11 or newer with the venv module, and found none. \
  Install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3

$(BIN)/python:
	@python="$$($(FIND_PYTHON))"; \
	if [ -z "$$python" ]; then echo "$(NO_PYTHON)" >&2; exit 1; fi; \
	"$$python" -m venv $(VENV)

# `pip install -e .` compiles the kernels too, after all downloads; compiling while the downloads run takes half the
# wait. Where there is no CMake, or the compiler fails and says why, pip tries in its own way: with a CMake that it
# fetches, or without kernels.
#
# uv does not read pip's settings (an index, a certificate), so it gets them in its own variables. Where it cannot be had,
# or does not understand something, pip installs instead.
define INSTALL_ALL
settings="$$($(BIN)/python -m pip config list)"; \
setting() { sed -n "s/^[^=]*\.$$1='\(.*\)'$$/\1/p" <<< "$$settings" | tail -n 1; }; \
export_if_set() { if [ -n "$$2" ]; then export "$$1=$$2"; fi; }; \
export_if_set UV_DEFAULT_INDEX "$$(setting index-url)"; \
export_if_set UV_EXTRA_INDEX_URL "$$(setting extra-index-url)"; \
export_if_set UV_FIND_LINKS "$$(setting find-links | tr ' ' ',')"; \
export_if_set SSL_CERT_FILE "$$(setting cert)"; \
install() { { $(INSTALL) uv && $(UV) "$$@"; } || $(INSTALL) "$$@"; }; \
if command -v cmake >/dev/null && command -v $${CXX:-c++} >/dev/null; then \
  (said=$$($(MAKE) --no-print-directory native 2>&1) || { echo "$$said" >&2; exit 1; }) & kernels=$$!; \
  ATTLAS_PURE=1 install -e '.[$(EXTRAS)]' || { wait $$kernels; exit 1; }; \
  wait $$kernels || $(INSTALL) --no-deps -e .; \
else \
  install -e '.[$(EXTRAS)]'; \
fi
endef

# A full development setup can run the demo too: then the small one has nothing to add.
$(VENV)/.demo-ready: EXTRAS := hf,plot,view,corpus
$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(BIN)/python
	@if [ -z "$$(find $(VENV)/.dev-ready -newer pyproject.toml -newer constraints.txt 2>/dev/null)" ]; then \
	  echo "Installing attlas, PyTorch and transformers into $(VENV); once, a minute or two."; \
	  $(INSTALL_ALL); \
	fi
	@touch $@

$(VENV)/.dev-ready: EXTRAS := all,dev
$(VENV)/.dev-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing attlas and the development tools into $(VENV); once, a minute or two."
	@$(INSTALL_ALL)
	@touch $@
