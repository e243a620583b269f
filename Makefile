# Each target works alone on a fresh clone: it makes .venv first (scripts/setup.sh), which is a no-op afterwards.
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest -n 2 --dist=worksteal --durations=8

.PHONY: setup demo test test-slow test-all test-gpu check format clean

setup:
	@scripts/setup.sh

demo: setup
	@$(PYTHON) scripts/demo.py

test test-slow test-all: export JAX_PLATFORMS = cpu
test: setup
	@$(PYTEST) -m "not slow and not gpu"

test-slow: setup
	@$(PYTEST) -m "slow and not gpu and not deviceless"
	@$(PYTHON) -m pytest -m deviceless --durations=3 tests/kernels/test_compile_for_h200.py

test-all: setup
	@$(PYTEST) -m "not gpu and not deviceless"
	@$(PYTHON) -m pytest -m deviceless --durations=3 tests/kernels/test_compile_for_h200.py

test-gpu: setup
	@$(PYTHON) -m pytest -m gpu --durations=8

check: setup
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

format: setup
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

clean:
	rm -rf .venv build dist demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
