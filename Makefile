# The front door. `make help` lists what there is; the first use of anything sets itself up.

PYTHON ?= python3
# Which set of chapter parameters: default, smoke, trained, gpu, or a file of yours in parameters/.
PROFILE ?= default
# How many chapters at a time; empty: two, on a processor.
JOBS ?=
export PROFILE JOBS
# Each build and each test run begins dozens of processes: what the first of them compiles is kept for the others.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
RUN := $(VENV)/bin/python
# Written when an installation has finished, so that an interrupted one is taken up again.
BOOK_READY := $(VENV)/.ready-book
TEST_READY := $(VENV)/.ready-test
PIP := $(RUN) -m pip --disable-pip-version-check
# The pip that comes with an older Python takes more than twice as long, and works too. With setuptools there, pip need
# not install it twice more, where it builds the two packages of this repository.
TOOLS := { $(PIP) install --quiet --upgrade pip setuptools || $(PIP) install --quiet setuptools; }
# pip looks for what fits and unpacks it on one core. So torch comes first: while pip goes on, torch's compiler, where
# there is one, tries out the processor and compiles its own headers on the other core, as it does once.
INSTALL := $(PIP) install --no-compile --no-build-isolation
TORCH := $(INSTALL) $$(grep -E '^(torch|numpy)==' requirements.txt)
TRY_OUT := $(RUN) -c 'import torch; torch.compile(lambda x: x + 1)(torch.ones(1))' 2>/dev/null
# pip would compile every file, and on one core. What may be imported is compiled here on all, the rest on its first use.
NOT_IMPORTED := /(tests?|testing|onnx|pip|setuptools|debugpy|transformers/models)/
COMPILE := cd $(VENV)/lib/python*/site-packages && \
	../../../bin/python -m compileall -qq -j 0 -x '$(NOT_IMPORTED)' . ../../../../src
# A file to one worker: what its tests share is made once. The order is that of tests/suite_rules.py. No more than two
# workers, for each imports everything anew; while tests wait for a process, tests/smoke_book.py has their core.
PYTEST := $(RUN) -m pytest -v -n 2 --dist loadfile --no-loadscope-reorder

# An explicit default, so that a plain `make` explains itself instead of working for minutes.
.DEFAULT_GOAL := help
.PHONY: help book pdf evidence evidence-timed engines test test-fast lint bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 10

book: $(BOOK_READY) ## execute the chapters that are not up to date and render the site into _build/html
	@$(RUN) -m kvbook build --fetch

pdf: $(BOOK_READY) ## the same, and a PDF of every chapter in _build/html/pdf; needs Chromium
	@.ci/find-browser
	@KVBOOK_PDF=1 $(RUN) -m kvbook build

evidence: $(BOOK_READY) ## make the published evidence that this kind of processor lacks: one thread, hours, resumable
	@$(RUN) -m kvbook models fetch
	@$(RUN) -m kvbook evidence $(CHAPTERS)

evidence-timed: $(BOOK_READY) ## the same for what measures time; refuses a busy machine
	@$(RUN) -m kvbook models fetch
	@$(RUN) -m kvbook evidence --timed $(CHAPTERS)

engines: $(BOOK_READY) ## make serving engines in _build/engines, or one (ENGINE=vllm); no book or test needs them
	@$(RUN) -m kvbook models fetch
	@$(RUN) -m kvreport.engines make $(ENGINE)

test: $(TEST_READY) ## run all tests, in a real browser too; sets everything up by itself
	@.ci/find-browser
	@$(PYTEST) --durations=30 $(TESTS)

test-fast: $(TEST_READY) ## run the tests that start no process, train nothing and open no browser; say what is left out
	@$(PYTEST) -m "not slow" $(TESTS)

lint: $(TEST_READY) ## check style
	@$(RUN) -m ruff check .

bench: $(BOOK_READY) ## measure this book's own speed as ratios, kept as a run; BENCH=--book builds the book too
	@$(RUN) -m kvbook bench $(BENCH)

clean: ## remove what runs have made (_build); the installation in .venv stays
	rm -rf _build

$(RUN):
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3 ..." >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than Python 3.11: name a newer one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv package" \
			"(Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BOOK_READY): requirements.txt pyproject.toml src/kvreport/pyproject.toml | $(RUN)
	@$(TOOLS)
	$(TORCH)
	$(TRY_OUT) & $(INSTALL) -r requirements.txt; installed=$$?; wait; exit $$installed
	@$(COMPILE) || true
	@touch $@

# In one go with what the book needs: pip looks for what fits once, and builds this repository's two packages once.
$(TEST_READY): requirements.txt pyproject.toml src/kvreport/pyproject.toml | $(RUN)
	@$(TOOLS)
	$(TORCH)
	$(TRY_OUT) & $(INSTALL) -r requirements.txt -e '.[test]' -e 'src/kvreport[cluster]'; \
		installed=$$?; wait; exit $$installed
	@$(COMPILE) || true
	@touch $(BOOK_READY) $@
