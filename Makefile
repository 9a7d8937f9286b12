# make demo and make test set up all they need: a virtual environment with the versions of constraints.txt.
# Another interpreter or place: make demo PYTHON=/opt/python3.12/bin/python VENV=/scratch/venv

VENV ?= .venv
# The first that runs, is new enough and can make an environment: a name on the PATH alone proves none of these.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { command -v "$$name"; break; }; done)
RUN = $(VENV)/bin/python -m

.PHONY: help demo test test-slow mutants lint docs install
.DELETE_ON_ERROR:

help:
	@echo "make demo       generate tissue, pre-train on it, segment it, predict a part of it; ends with what to look at"
	@echo "make test       run the tests"
	@echo "make test-slow  run the long tests"
	@echo "make mutants    plant bugs one at a time and see which the tests notice (hours)"
	@echo "make lint       check style and types"
	@echo "make docs       build the documentation as a site, without a network"
	@echo "make install    set up $(VENV) only"

# Keys of both recipes may be given: make demo KEYS="run.steps=20"
KEYS ?=

demo: $(VENV)/.installed
	@$(VENV)/bin/python configs/demo/demo.py $(KEYS)

# Files of tests are shared out to two processes, in their order: those that start ranks come first, many short ones last.
SHARED = -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(RUN) pytest -m "not slow and not gpu" $(SHARED)

test-slow: $(VENV)/.installed-dev
	$(RUN) pytest -m slow $(SHARED)

# Another number of bugs at a time: make mutants JOBS=16
JOBS ?= 2

mutants: $(VENV)/.installed-dev
	$(VENV)/bin/python tests/mutants/run.py --jobs $(JOBS) --table docs/mutants.md

lint: $(VENV)/.installed-dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

# The theme tells of its successor at each build otherwise.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet
	@echo "site/index.html"

install: $(VENV)/.installed

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv and ensurepip was not found on the PATH;" \
		"install it or name it: make demo PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv "$(VENV)"
	@touch $@

# A stamp is made last, so that an install that fails is done again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	$(RUN) pip install --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/.created
	$(RUN) pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/.created
	$(RUN) pip install --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $(VENV)/.installed $@
