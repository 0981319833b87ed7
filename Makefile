# The one runner. Every target does its own set-up: a machine needs Python 3.11, make, git.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-from-constraints
EXTRAS := tensorflow,demo,test,dev,legacy-keras,bench,docs

export TF_CPP_MIN_LOG_LEVEL ?= 2
# A handler without a config asks no metadata server, whichever machine this is.
export TFPREEMPT_PLATFORM ?= generic

# fsync on a disk takes most of the time of many tests; in memory, if there is a gibibyte
# of it, it is free.
MEMORY  := $(shell test -w /dev/shm && \
	test "$$(df -k --output=avail /dev/shm | tail -n 1)" -gt 1048576 && echo TMPDIR=/dev/shm)

# Four workers on two cores, because a fifth of the time of the tests is waits: with two
# workers `make test` took 21 minutes, with three 18. The workers share bytecode, which
# some environments forbid. A file stays whole in `make test`, for its servers and
# processes; in the order of the folders the long files come early. A worker that dies is
# not replaced: pytest-xdist may wait for ever for the tests of the dead worker. A worker
# is ended if a test takes longer than any test may, and no signal ends the test.
JOBS    ?= 4
XDIST   := --max-worker-restart=0
STUCK   := -o faulthandler_timeout=660
unexport PYTHONDONTWRITEBYTECODE

FAST    := not tensorflow and not multiprocess and not slow and not campaign and not bench
ALL     := not campaign and not bench

.PHONY: help demo test test-thorough test-all test-more test-fast lint types docs wheel matrix bench bench-long gpu performance campaign clean

help:
	@echo "make demo       train, be preempted three times, compare with a run that was not"
	@echo "make test       each promise on real processes, 10,000 random schedules (15 to 25 minutes)"
	@echo "make test-thorough  the other cases of all matrices, short campaigns, notebooks"
	@echo "make test-all   both, one after the other"
	@echo "make test-more  those that need trackers (150 MB), Flax, Debian's chromium, Azurite (npm)"
	@echo "make test-fast  the tests that need no TensorFlow, no process and no long wait (20 seconds)"
	@echo "make lint       ruff: rules and formatting"
	@echo "make types      mypy, strict"
	@echo "make docs       the documentation, in build/site/; warnings are errors"
	@echo "make wheel      builds what is published, in dist/, and checks it"
	@echo "make matrix     the versions of TensorFlow, Keras and Python, as a table"
	@echo "make bench      measurements against what others have, as JSON lines (half an hour)"
	@echo "make bench-long   those that take longer: goodput, 10,000 workers"
	@echo "make gpu        exactness and figures on one NVIDIA GPU, as JSON lines (8 minutes)"
	@echo "make performance  make bench, kept under docs/performance/, with its pages and plots"
	@echo "make campaign   thousands of random faults; writes docs/campaigns.md"
	@echo "make clean      remove .venv and everything that was built"
	@echo "The first one installs TensorFlow and the tools in .venv: minutes, 3.5 GB."

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@echo "Installing TensorFlow and the tools in $(VENV), once: minutes, 3.5 GB."
	$(PYTHON) -m venv $(VENV)
	@# The build backend is pinned too, so it comes first and isolation is off.
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)
	$(BIN)/tfpreempt demo $(ARGS)

test: SELECTED := $(ALL) and not thorough
test-thorough: SELECTED := $(ALL) and thorough
test test-thorough: $(STAMP)
	$(MEMORY) TFPREEMPT_TEST_PROFILE=full $(BIN)/python -m pytest -n $(JOBS) $(XDIST) --dist loadfile --no-loadscope-reorder $(STUCK) -m "$(SELECTED)" $(ARGS)

test-all: test
	$(MAKE) test-thorough

# What needs more than the others: trackers (30 packages, 150 MB), Flax, Debian's packages
# chromium and chromium-driver, and Azurite, by Debian's package npm. The last version of
# Azurite that runs on Debian's Node is 3.35. None of these may be skipped here.
test-more: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[trackers,flax]'
	$(MEMORY) $(BIN)/python -m pytest --junitxml=build/test-more.xml \
		tests/recipes/test_trackers.py tests/cli/report/test_page.py \
		tests/docs/test_jax_pages.py $(ARGS)
	npm install --no-audit --no-fund --prefix build/azurite azurite@3.35.0
	$(MEMORY) $(BIN)/python -m pytest --junitxml=build/test-azurite.xml \
		tests/contracts/test_storage.py -k azurite $(ARGS)
	! grep --quiet '<skipped' build/test-more.xml build/test-azurite.xml

test-fast: $(STAMP)
	$(MEMORY) TFPREEMPT_TEST_PROFILE=fast $(BIN)/python -m pytest -n $(JOBS) $(XDIST) --dist worksteal -m "$(FAST)" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

wheel: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[publish]'
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# Interpreters of pyenv are found too. Every cell runs, whatever another one comes to.
PYENV := $(wildcard $(HOME)/.pyenv/versions/3.*/bin)

matrix: $(STAMP)
	$(BIN)/nox -s begin
	status=0; \
	PATH="$$PATH:$$(echo $(PYENV) | tr ' ' :)" $(MEMORY) CI= \
		$(BIN)/nox $(if $(CELLS),-s $(CELLS:%=cell-%)) || status=$$?; \
	$(BIN)/nox -s table; exit $$status

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# A short trial of goodput: ARGS="--seconds 10 --every 10 --grace 5".
bench-long: $(STAMP)
	$(BIN)/python -m benchmarks goodput agreement_10000 $(ARGS)

# On a machine with one NVIDIA GPU and its driver, in at most eight minutes; ends with 2
# without a GPU.
gpu: $(STAMP)
	if nvidia-smi -L; then $(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[and-cuda]' 'jax[cuda12]'; fi
	$(BIN)/python -m benchmarks.gpu $(ARGS)

# ARGS="goodput" measures that one anew, and leaves the others as they are.
performance: $(STAMP)
	$(BIN)/python -m benchmarks --record docs/performance $(ARGS)
	$(BIN)/python -m tests.docs.performance

# Goes on where it was cut off. ARGS="kills --trials 100" runs that one alone, shorter;
# without, all cells of the matrices of exact resumes and 10,000 workers come last.
campaign: $(STAMP)
	status=0; \
	$(MEMORY) $(BIN)/python -m campaigns --record docs/reliability $(ARGS) || status=1; \
	$(BIN)/python -m tests.docs.reliability || status=1; \
	$(if $(ARGS),,$(BIN)/python -m pytest -m campaign -s || status=1;) \
	exit $$status

clean:
	rm -rf $(VENV) .nox build dist demo-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tfpreempt tests benchmarks campaigns -name __pycache__ -type d -prune -exec rm -rf {} +
