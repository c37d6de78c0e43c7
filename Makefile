# VENV=.venv (default): create the environment when it is missing, install into it, run in it.
# VENV= (empty):        use the Python that is active, install nothing.
VENV ?= .venv
PYTHON ?= python3

ifneq ($(strip $(VENV)),)
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Some targets need a part of it, and nothing where all of it is there already.
PART = $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(VENV)/.installed-$(1))
PARTS := $(VENV)/.installed-demo $(VENV)/.installed-lint
else
PY := $(PYTHON)
INSTALLED :=
PART :=
endif

# The package is importable from the checkout, also where it is not installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: demo test test-gpu ranks lint wheel bench clean

# OpenMP threads that wait without spinning: on a busy machine a spinning one holds up the others.
demo: export OMP_WAIT_POLICY := passive
demo: $(call PART,demo)
	$(PY) examples/finetune_classifier.py

# Side by side where pytest-xdist is there; the tests of a file run in one process.
# ROWS=--every-row runs the long tables of fits as a whole.
# Bytecode is kept: else every process of the tests compiles the package, and some all tests.
XDIST := import importlib.util as u; print('-n auto --dist loadfile' * bool(u.find_spec('xdist')))
test: export OMP_NUM_THREADS := 1
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	$(PY) -m pytest tests $(ROWS) $$($(PY) -c "$(XDIST)")

# Every row of every file, each file in a process of its own, on all GPUs of the machine.
test-gpu: $(INSTALLED)
	$(PY) tests/on_gpus.py

# Eight processes over gloo, on the emulated backend: losses are eager's, all decide and end together.
ranks: export OMP_NUM_THREADS := 1
ranks: $(INSTALLED)
	$(PY) benchmarks/ddp.py --tiny --gpus 8 --sizes 8 --rows gpt2 --variants plain,views,accumulated,fsdp2
	$(PY) benchmarks/soak.py --ranks 8 --replays 60 --waits step

lint: $(call PART,lint)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict lightning_graphs

# Builds a wheel, installs it into an empty environment, and uses it there.
wheel: $(INSTALLED)
	$(PY) tests/wheel.py

bench: $(INSTALLED)
	$(PY) benchmarks/core.py
	$(PY) benchmarks/step.py
	$(PY) benchmarks/whole_fits.py
	$(PY) benchmarks/peers.py --json peers.json --plot peers.svg

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lightning_graphs tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
ifneq ($(strip $(VENV)),)
	rm -f $(INSTALLED) $(PARTS)
endif

ifneq ($(strip $(VENV)),)
$(INSTALLED): EXTRAS := dev,docs,examples
$(PARTS): EXTRAS = $(@:$(INSTALLED)-%=%)
$(INSTALLED) $(PARTS): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@
endif
