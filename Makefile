# VENV=.venv (default): create the environment when it is missing, install into it, run in it.
# VENV= (empty):        use the Python that is active, install nothing.
VENV ?= .venv
PYTHON ?= python3

ifneq ($(strip $(VENV)),)
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
else
PY := $(PYTHON)
INSTALLED :=
endif

# The package is importable from the checkout, also where it is not installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: demo test lint bench clean

# OpenMP threads that wait without spinning: on a busy machine a spinning one holds up the others.
demo: export OMP_WAIT_POLICY := passive
demo: $(INSTALLED)
	$(PY) examples/finetune_classifier.py

test: $(INSTALLED)
	$(PY) -m pytest tests

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict lightning_graphs

bench: $(INSTALLED)
	$(PY) benchmarks/core.py
	$(PY) benchmarks/step.py
	$(PY) benchmarks/whole_fits.py

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lightning_graphs tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
ifneq ($(strip $(VENV)),)
	rm -f $(INSTALLED)
endif

ifneq ($(strip $(VENV)),)
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev,docs,examples,report]"
	touch $@
endif
