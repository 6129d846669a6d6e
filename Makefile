# Each target sets up what it needs: a virtual environment in .venv with the tested versions.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
MINUTES ?= 30

.PHONY: train test test-all test-gpu test-slurm soak browser docs lint format benchmark clean

train: .venv/.installed   ## train on the embedded data set, then evaluate; ARGS="setting=value ..."
	$(BIN)/python train.py experiment=shapes_fast $(ARGS)
	$(BIN)/python eval.py checkpoint=outputs/latest

test: .venv/.installed    ## the default tests: 15 minutes of CPU time
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-all: .venv/.installed  ## also what takes minutes: inductor, kills, fuzzing
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu and not slurm" $(ARGS)

test-gpu: .venv/.installed  ## what needs a CUDA device; writes gpu_report.json, to send back
	$(BIN)/python benchmarks/gpu_report.py $(ARGS)

soak: .venv/.installed  ## break training runs at random for MINUTES=30
	$(BIN)/python tests/soak.py --minutes $(MINUTES)

test-slurm: .venv/.installed  ## runs on a real Slurm, whose daemons it starts and stops
	$(BIN)/python -m pytest -x -m slurm tests/test_real_slurm.py $(ARGS)

browser:  ## Chromium for the tests of the attention page, which skip without it
	@if command -v chromium >/dev/null || command -v chromium-headless-shell >/dev/null; then \
		echo "Chromium is there."; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium \
			|| echo "Chromium could not be installed; the tests of the attention page skip."; \
	else \
		echo "Install chromium for the tests of the attention page, e.g. sudo apt-get install chromium; without it they skip."; \
	fi

docs: .venv/.installed  ## the documentation as a site, in build/site
	$(BIN)/python docs/build_site.py

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: .venv/.installed
	$(BIN)/python benchmarks/models.py $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peers]'
	touch $@
