# Every target sets up what it needs: a virtual environment in .venv, made once and again only when pins change.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
BENCH := $(VENV)/.ready-bench
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup test check demo paper study bench quality soak clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@

# A process a core: were each to have threads of its own, they would wait for each other.
test: $(READY)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses 2

check: $(READY)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses 2

demo: $(READY)
	THP_MEM_ALLOC_ENABLE=1 $(VENV)/bin/manyclass demo --out demo-report

paper: $(READY)
	$(VENV)/bin/manyclass paper --out paper-report

study: $(READY)
	THP_MEM_ALLOC_ENABLE=1 $(VENV)/bin/manyclass study --out study-report

$(BENCH): $(READY)
	$(PIP) --editable '.[peers]'
	touch $@

bench: $(BENCH)
	$(PYTHON) benchmarks/draws.py
	$(PYTHON) benchmarks/step.py
	$(PYTHON) benchmarks/design_cost.py
	$(PYTHON) benchmarks/inference.py
	$(PYTHON) benchmarks/estimator_memory.py
	$(PYTHON) benchmarks/plots.py

# The better part of an hour, and it needs the text of WikiText-2.
quality: $(BENCH)
	THP_MEM_ALLOC_ENABLE=1 $(PYTHON) benchmarks/quality.py
	$(PYTHON) benchmarks/plots.py

# Kills, interrupts, a full disk and broken files by the hundred: about a quarter of an hour.
soak: $(READY)
	$(PYTHON) -m tests.soak

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
