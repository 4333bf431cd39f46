# Every target installs what it needs into .venv, once and again when pyproject.toml or constraints.txt change.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
INTEGRATIONS := $(VENV)/.ready-integrations
BENCH := $(VENV)/.ready-bench
DOCS := $(VENV)/.ready-docs
# Bytecode of all the files of large libraries would take longer than that of the few that are imported.
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.PHONY: setup test types check demo paper study bench quality soak package docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@

$(INTEGRATIONS): $(READY)
	$(PIP) --editable '.[integrations]'
	touch $@

# One process for each core, with one thread: more threads would wait for each other.
test: $(INTEGRATIONS)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses 2 --dist worksteal

check: $(READY)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(MAKE) --jobs 2 types test

types: $(INTEGRATIONS)
	$(VENV)/bin/mypy

demo: $(READY)
	THP_MEM_ALLOC_ENABLE=1 $(VENV)/bin/manyclass demo --out demo-report

paper: $(READY)
	$(VENV)/bin/manyclass paper --out paper-report

study: $(READY)
	THP_MEM_ALLOC_ENABLE=1 $(VENV)/bin/manyclass study --out study-report

$(DOCS): $(INTEGRATIONS)
	$(PIP) --editable '.[docs]'
	touch $@

# Builds docs/_build/html and treats warnings as errors. It runs the pages with code cells, which takes about five
# minutes of one core the first time and is cached, the other blocks of Python, the commands and the doctests. Links
# within the site are followed; links to other sites only with DOCS_ONLINE=1, else their syntax alone is checked.
docs: $(DOCS)
	OMP_NUM_THREADS=1 $(PYTHON) -m sphinx -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	$(PYTHON) docs/_extensions/check_links.py docs/_build/html
	test -z "$$DOCS_ONLINE" || $(PYTHON) -m sphinx -W -b linkcheck -d docs/_build/doctrees docs docs/_build/links
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/docs src

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

# Takes almost an hour and needs the text of WikiText-2.
quality: $(BENCH)
	THP_MEM_ALLOC_ENABLE=1 $(PYTHON) benchmarks/quality.py
	$(PYTHON) benchmarks/plots.py

# Hundreds of kills, of one process and of one of two, interrupts, full disks and damaged files, thousands of edited
# states, and the tests that depend on
# the machine: half an hour.
soak: $(READY)
	$(PYTHON) -m tests.soak
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m machine

# Builds the wheel and the sdist into dist, and tries both in empty environments.
package: $(READY)
	$(PYTHON) -m tests.package

clean:
	rm -rf $(VENV) dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
