# Each target works on a fresh clone: it first installs its requirements into .venv.
#   ACCEL=cpu|cuda   which vLLM to install (guessed)      PYTHON=   the interpreter for .venv
#   ARGS=            more arguments for the target's command
#   THREADS=         per forward on CPU in benches with an engine (vLLM's choice); 1 on a shared machine
#   EVAL_MODEL=      the model of `make bench-evaluation` (cuda: a Llama-3.1-8B shape, dummy weights)

ACCEL ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
BIN := .venv/bin
SETUP := .venv/.setup-$(ACCEL)
NEXT := .venv-next/.setup$(addprefix -,$(VLLM))
EVAL_MODEL ?= $(if $(filter cuda,$(ACCEL)),llama-8b)
BENCHES_cpu := evaluation overhead planner host telemetry stream console results
BENCHES_cuda := gpu evaluation overhead
FORWARD := $(if $(THREADS),--threads $(THREADS))
on = $(filter-out 0 no false,$(1))

export PYTHON
# Without bytecode every process of an engine compiles all of vLLM and torch that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-next demo test test-fast test-next test-gpu test-models check tables touchpoints screenshots bench bench-planner bench-telemetry bench-stream bench-overhead bench-evaluation bench-gpu bench-host bench-results bench-console bench-client bench-grounds bench-pressure bench-parking soak gpu-kit wheel constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' Makefile

setup: $(SETUP) ## install everything into .venv (again only when the requirements changed)

$(SETUP): pyproject.toml constraints.txt overrides-cpu.txt scripts/setup.sh
	scripts/setup.sh $(ACCEL)

setup-next: $(NEXT) ## a vLLM without a CPU build, on .venv's CPU kernels, into .venv-next [VLLM=0.33.0: else the newest]

$(NEXT): $(SETUP) scripts/setup_next.py
	$(BIN)/python -m scripts.setup_next $(VLLM)

demo: $(SETUP) ## server, traffic, console [HEADLESS=1 DURATION=60] [MODEL=gemma] [PORT=] [ENGINES=2]
	@$(BIN)/vtoken demo $(if $(call on,$(HEADLESS)),--headless) $(if $(DURATION),--duration $(DURATION)) \
		$(if $(MODEL),--model $(MODEL)) $(if $(PORT),--port $(PORT)) $(if $(ENGINES),--engines $(ENGINES)) $(ARGS)

# Three workers keep two cores busy: servers that start wait. Each would compile all kernels.
test: $(SETUP) ## the whole suite, on CPU [JOBS=3]
	@$(BIN)/python -m tests.support.kernels
	@$(BIN)/pytest -m "not gpu" -n $(or $(JOBS),3) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(SETUP) ## tests without engine and torch, in less than two minutes [JOBS=4]
	@$(BIN)/python -m tests.support.kernels
	@$(BIN)/pytest -m "not vllm and not gpu and not slow" -n $(or $(JOBS),4) --dist worksteal \
		$(addprefix --ignore=tests/,gpu vllm test_golden.py test_reference.py) $(ARGS)

test-next: $(NEXT) ## tests/vllm on .venv-next [VLLM=] [ARGS=FILES]
	@.venv-next/bin/python -m tests.support.kernels
	@.venv-next/bin/python -m pytest -m "not gpu" -n $(or $(JOBS),3) --dist loadfile --no-loadscope-reorder \
		$(or $(ARGS),tests/vllm)

test-gpu: $(SETUP) ## the tests that need a CUDA device [JOBS=4]
	@rm -f .bench/gpu/tests.xml
	@$(BIN)/pytest tests/gpu -n $(or $(JOBS),4) --dist loadgroup --junitxml=.bench/gpu/tests.xml $(ARGS)

test-models: $(SETUP) ## every model and arrangement of docs/models.md and docs/deploy.md, on the engine
	@VTOKEN_ALL_MODELS=1 $(BIN)/pytest tests/vllm/test_models.py tests/vllm/test_hybrids.py \
		tests/vllm/test_data_parallel_nodes.py tests/vllm/test_pipeline_parallel.py \
		tests/vllm/test_ray.py tests/vllm/test_trained_hybrid.py $(ARGS)

check: $(SETUP) ## lint, format, types, import boundaries
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

tables: $(SETUP) ## regenerate what is made from code: tables of docs/, examples of the API descriptions
	@$(BIN)/python -m tests.docs

touchpoints: $(SETUP) ## what another vLLM changes that vToken depends on: VLLM=0.33.0 [ARGS=--diff]
	@$(BIN)/python -m scripts.touchpoints $(or $(VLLM),$(error VLLM=: which version, as 0.33.0)) $(ARGS)

screenshots: $(SETUP) ## every screenshot of docs/console.md, from a live run, into screenshots/
	$(BIN)/python -m scripts.screenshots $(ARGS)

bench-planner: $(SETUP) ## µs a step of the core alone: nothing due, steady state, full plans
	$(BIN)/vtoken bench planner $(ARGS)

bench-telemetry: $(SETUP) ## engine time that telemetry takes at 70,000 blocks
	$(BIN)/vtoken bench telemetry $(ARGS)

bench-stream: $(SETUP) ## cost of 1, 10 and 50 stream clients at 70,000 blocks
	$(BIN)/vtoken bench stream $(ARGS)

bench-overhead: $(SETUP) ## cost of the indirection: vToken against stock vLLM, paired
	$(BIN)/vtoken bench overhead $(FORWARD) $(ARGS)

bench-console: $(SETUP) ## first paint, key latency, memory, bytes and CPU of the console
	$(BIN)/vtoken bench console $(ARGS)

bench-client: $(SETUP) ## servers under `vllm bench serve` [ARGS="--client ENVIRONMENT/bin/vllm"]
	$(BIN)/vtoken bench client $(FORWARD) $(ARGS)

bench-pressure: $(SETUP) ## native vLLM, a fixed budget and eviction under pressure; two hours and a half
	$(BIN)/vtoken bench evaluation --parts pressure --model trained $(FORWARD) $(ARGS)

bench-parking: $(SETUP) ## tokens that come back after a burst, beside eviction alone; half an hour
	$(BIN)/vtoken bench evaluation --parts parking --model trained $(FORWARD) $(ARGS)

bench-grounds: $(SETUP) ## facts found under eviction on held-out texts, all policies; an hour [ARGS=--quick: minutes]
	$(BIN)/vtoken bench grounds $(FORWARD) $(ARGS)

bench-evaluation: $(SETUP) ## throughput, waiting and answers of native, naive-evict and vToken
	$(BIN)/vtoken bench evaluation $(if $(EVAL_MODEL),--model $(EVAL_MODEL)) \
		$(if $(filter llama-8b,$(EVAL_MODEL)),--dummy-weights) \
		$(FORWARD) $(ARGS)

bench-gpu: $(SETUP) ## the checks of docs/gpu.md; skips those finished in .bench/gpu
	$(BIN)/vtoken bench gpu $(ARGS)

bench-host: $(SETUP) ## host time of a GPU's step, without a GPU [ARGS="--against OTHER-CHECKOUT"]
	$(BIN)/vtoken bench host $(ARGS)

bench-results: $(SETUP) ## results of the last runs into docs/results/, and the page made of them
	$(BIN)/vtoken bench results $(ARGS)

# A failing part does not stop the others; the last line names it. GPU parts run first.
bench: $(SETUP) ## all benches, unattended, into .bench/ and on cpu docs/; on cuda GPU tests and checks first
	@failed=; \
	$(if $(filter cuda,$(ACCEL)),$(MAKE) --no-print-directory test-gpu ARGS= || failed=" test-gpu";) \
	for part in $(BENCHES_$(ACCEL)); do \
		$(MAKE) --no-print-directory bench-$$part || failed="$$failed bench-$$part"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

soak: $(SETUP) ## real engines under random traffic and changes, every check on [MINUTES=20]
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),20) $(ARGS)

gpu-kit: $(SETUP) ## the checks of docs/gpu.md for a GPU machine without network, into dist/ [WITH_VLLM=1] [KIT_PYTHON=3.12] [KIT_THERE=FILE] [KIT_MIB=]
	@$(BIN)/python -m scripts.gpu_kit $(if $(call on,$(WITH_VLLM)),--with-vllm) \
		$(if $(KIT_PYTHON),--pythons $(KIT_PYTHON)) $(if $(KIT_THERE),--there "$(KIT_THERE)") \
		$(if $(KIT_MIB),--mib $(KIT_MIB)) $(ARGS)

wheel: $(SETUP) ## wheel and sdist into dist/; tests the wheel in its own environment
	@rm -rf dist && PATH="$(CURDIR)/$(BIN):$$PATH" uv build --quiet
	@PATH="$(CURDIR)/$(BIN):$$PATH" VTOKEN_WHEEL=$$(echo dist/*.whl) $(BIN)/pytest -q tests/cli/test_wheel.py $(ARGS)

constraints: $(SETUP) ## write constraints.txt from the installed packages
	@{ head -n 1 constraints.txt; uv pip freeze --quiet --python $(BIN)/python --exclude-editable \
		| sed 's/+cpu$$//'; } > constraints.txt.new && mv constraints.txt.new constraints.txt

clean: ## remove both environments, caches and files of the demo
	rm -rf .venv .venv-next .demo .soak .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
