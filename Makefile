PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS := $(shell find protos/pagewire -name '*.proto')
MODEL := models/storyteller
SEEDS := 5000
FIRST := 0
MINUTES := 30

.PHONY: help check setup run test test-lowest nightly check-aarch64 fuzz sim sim-mutants lint lock protos docs model wheel bench bench-split bench-scheduler bench-preemption bench-prefix-tier bench-sessions bench-fork bench-beam bench-interference bench-attention bench-garbage bench-layer-launches bench-gateway bench-grammars bench-structured-output bench-traces bench-fresh-starts bench-frontend bench-hostile bench-long-text bench-overload bench-perplexity bench-worker-loss gpu-check gpu-check-kernels gpu-bench gpu-bench-kernels gpu-tune-kernels gpu-kernel-resources clean
help:  ## what there is to make
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What pyproject.toml says of versions, in words that any Python understands: pip's own take lines.
CHECK_PYTHON := import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit("Pagewire needs Python 3.11, 3.12 or 3.13, \
and %s is %d.%d" % ((sys.executable,) + sys.version_info[:2]) + sys.argv[1])

check: lint  ## the quick check: lint, types, the scheduler's core, the project itself
	$(BIN)/python -m pytest -q -m 'not gpu and not alone' -n 2 --dist loadfile tests/core tests/project

$(READY): pyproject.toml constraints.txt
	@if test -x $(BIN)/python; then $(BIN)/python -c '$(CHECK_PYTHON)' ": remove $(VENV) to have it made again"; \
	elif command -v $(PYTHON) > /dev/null; then $(PYTHON) -c '$(CHECK_PYTHON)' ": name another, make PYTHON=/path/to/python3.13"; \
	else echo "there is no $(PYTHON): install Python 3.13, or name one, make PYTHON=/path/to/python3.13" >&2; exit 1; fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

setup: $(READY)  ## create .venv with the pinned packages

run: $(READY)  ## serve the bundled model and stream one completion
	$(BIN)/python -m pagewire demo

test: $(READY)  ## every test that needs no GPU
	@# In two processes more than a small machine has cores, since many wait. Exit code 5: ARGS selected none of these.
	@echo 'part 1 of 2: in four processes'; \
	$(BIN)/python -m pytest -m 'not gpu and not alone' -n 4 --dist loadfile --no-loadscope-reorder $(ARGS); \
	first=$$?; echo 'part 2 of 2: with the machine to itself'; \
	$(BIN)/python -m pytest -m 'not gpu and alone' $(or $(ARGS),tests/system); second=$$?; \
	case "$$first $$second" in '0 0'|'0 5'|'5 0') ;; *) exit 1 ;; esac

test-lowest: .venv-lowest/.ready  ## with the oldest packages of pyproject.toml's ranges, and each extra alone with the oldest and newest
	PAGEWIRE_TEST_VERSIONS=lowest $(BIN)/python -m pytest tests/system/test_extras.py
	PAGEWIRE_TEST_VERSIONS=newest $(BIN)/python -m pytest tests/system/test_extras.py
	@# What is left out compares with transformers, whose newest version it is about.
	.venv-lowest/bin/python -m pytest -m 'not gpu and not alone' -n 4 --dist loadfile tests/core tests/contract tests/system/test_serve.py \
	  $(patsubst %,--ignore=tests/contract/test_%.py,gguf_tokenizer template_forms tokenizer_files)

nightly:  ## what takes hours: test-lowest, check-aarch64, sim, sim-mutants, fuzz, bench-fresh-starts, each whether or not another fails
	$(MAKE) --keep-going test-lowest check-aarch64 sim sim-mutants fuzz bench-fresh-starts

check-aarch64: $(READY)  ## tests of the CPU kernels as AArch64 computes them, under qemu; ARGS: pytest's, PROCESSOR=cortex-a53: a lesser one
	$(BIN)/python -m tests.kernels.emulated $(if $(PROCESSOR),--processor $(PROCESSOR)) $(ARGS)

fuzz: $(READY)  ## for MINUTES=n: random requests through both services, alone against company; texts in grammars; SEED=n: the first
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

sim: $(READY)  ## simulate SEEDS=n histories of the scheduler and a failing worker, from seed FIRST=n on; COMPILED=1: faster
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --first $(FIRST) $(if $(COMPILED),--compiled)

sim-mutants: $(READY)  ## plant bugs, and see that the simulator finds each
	$(BIN)/python -m tests.sim.mutants --seeds $(SEEDS) --first $(FIRST)

lint: $(READY)  ## ruff, mypy, import-linter, buf lint, buf breaking
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml --no-cache
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against descriptors.binpb

# Stubs are generated with the oldest grpcio-tools they must load beside, in an environment of its own.
protos: .venv-protos/.ready  ## generate the stubs under protos/gen
	.venv-protos/bin/python -m grpc_tools.protoc -Ipagewire/protos/gen=protos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

.venv-protos/.ready:
	$(PYTHON) -m venv .venv-protos
	.venv-protos/bin/python -m pip install -q grpcio-tools==1.76.0
	touch $@

# uv says which versions are the lowest. pip installs them, from wherever it takes packages on this machine.
.venv-uv/.ready:
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install -q uv==0.13.9
	touch $@

.venv-lowest/.ready: pyproject.toml .venv-uv/.ready $(READY)
	rm -rf .venv-lowest && $(PYTHON) -m venv .venv-lowest
	.venv-uv/bin/uv pip compile -q --resolution=lowest-direct --python=.venv-lowest/bin/python -o .venv-lowest/lowest.txt \
	  --extra=test pyproject.toml
	.venv-lowest/bin/python -m pip install -q -c .venv-lowest/lowest.txt -e '.[test]'
	touch $@

lock: .venv-uv/.ready  ## constraints.txt and what the images install, after a change of pyproject.toml; ARGS=--upgrade: newest versions
	.venv-uv/bin/python deploy/lock.py $(ARGS)

docs: $(READY)  ## write the pages of docs/ that say what the code says
	$(BIN)/python -m docs.reference
	$(BIN)/python -m tests.system.openai_api.document

model: $(READY)  ## train the bundled model again
	$(BIN)/python -m models.train_storyteller $(MODEL)

wheel: $(READY)  ## dist/: a wheel for any machine, and one for this kind with the CPU kernels compiled
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .
	$(BIN)/python -m deploy.platform_wheel dist/pagewire-*-none-any.whl

bench: $(READY)  ## the same models, weight formats and loads through llama.cpp, vLLM and transformers; ARGS="--isa avx2"
	$(BIN)/python -m bench.peers.peers $(ARGS)

bench-split: $(READY)  ## what two processes over gRPC cost against one process
	$(BIN)/python -m bench.services.split

bench-scheduler: $(READY)  ## what the scheduler core costs per sequence and step
	$(BIN)/python -m bench.core.scheduler

bench-traces: $(READY)  ## scheduling policies over real traces, in the folder TRACES= (default: samples), in simulated time
	$(BIN)/python -m bench.core.traces $(if $(TRACES),--traces $(TRACES))

bench-preemption: $(READY)  ## swapping, recomputing and choosing, with a third of the blocks
	$(BIN)/python -m bench.services.preemption

bench-prefix-tier: $(READY)  ## a shared prefix that comes back from host blocks
	$(BIN)/python -m bench.services.prefix_tier

bench-sessions: $(READY)  ## sessions of coding agents, measured and simulated; ARGS="--trace FILE"
	$(BIN)/python -m bench.services.sessions $(ARGS)

bench-fork: $(READY)  ## what eight samples of a prompt cost
	$(BIN)/python -m bench.services.fork

bench-beam: $(READY)  ## beam search against transformers
	$(BIN)/python -m bench.peers.beam

bench-interference: $(READY)  ## what arriving prompts do to those who stream
	$(BIN)/python -m bench.services.interference

bench-attention: $(READY)  ## how fast a CPU's attention reads the cache, beside the machine's memory
	$(BIN)/python -m bench.core.attention

bench-frontend: $(READY)  ## what delivering a token to a client costs the scheduler
	$(BIN)/python -m bench.services.front_end

bench-fresh-starts: $(READY)  ## whether 20,000 fresh starts of a worker compute the same tables; ARGS="--starts 500"
	$(BIN)/python -m bench.core.fresh_starts $(ARGS)

bench-layer-launches: $(READY)  ## what the host does for a GPU in a layer without CUDA graphs; no GPU is needed
	$(BIN)/python -m tests.kernels.triton.layer_launches

bench-garbage: $(READY)  ## what garbage collections do to a scheduler that remembers much
	$(BIN)/python -m bench.services.garbage

bench-gateway: $(READY)  ## what the gateway adds to the first token, and conversations that follow their cache
	$(BIN)/python -m bench.services.gateway

bench-grammars: $(READY)  ## masks of grammars, what they add to sampling, and trials of hostile grammars, in one process
	$(BIN)/python -m bench.core.grammars

bench-structured-output: $(READY)  ## what schemas cost through both services: rates, first tokens, neighbours
	$(BIN)/python -m bench.services.structured_output

bench-hostile: $(READY)  ## what a hostile tenant does to the streams of a polite one
	$(BIN)/python -m bench.services.hostile

bench-long-text: $(READY)  ## what long texts of one client do to the stream of another, and to memory
	$(BIN)/python -m bench.services.long_text

bench-overload: $(READY)  ## ten times too many requests: how soon they are refused, what those that run lose
	$(BIN)/python -m bench.services.overload

bench-perplexity: $(READY)  ## what formats of weights and of the KV cache cost the bundled model in exactness
	$(BIN)/python -m bench.core.perplexity

bench-worker-loss: $(READY)  ## what clients of a gateway notice when one of two pairs loses its worker
	$(BIN)/python -m bench.services.worker_loss

# These install nothing: PYTHON=/path/to/python has torch with CUDA and Triton. The first line says what else is lacking.
gpu-check:  ## on a GPU: both services against transformers and themselves, in PARTS="parity kills ..." (all)
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m tests.gpu.check $(if $(PARTS),--parts $(PARTS))

gpu-check-kernels:  ## on a GPU: every Triton kernel against the reference
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m bench.gpu.kernels check

gpu-bench:  ## on a GPU: steps, throughput, idle time and swaps beside their goals, in PARTS="decode_small idle ..." (all)
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m bench.gpu.speed $(if $(PARTS),--parts $(PARTS))

gpu-bench-kernels:  ## on a GPU: how fast they are, beside the card's copy and torch's flash attention
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m bench.gpu.kernels bench

gpu-tune-kernels:  ## on a GPU: measure tiles for the shapes of common models, and write them to the static table
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m bench.gpu.tune_kernels

gpu-kernel-resources: $(READY)  ## without a GPU: registers, shared memory and spills of every Triton kernel, compiled for an H200
	env -u TRITON_INTERPRET $(BIN)/python -m tests.kernels.triton.compilation

clean:  ## remove what setup made
	rm -rf $(VENV) .venv-protos .venv-uv .venv-lowest
