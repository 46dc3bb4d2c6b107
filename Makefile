PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS := $(shell find protos/pagewire -name '*.proto')
MODEL := models/storyteller
SEEDS := 5000
FIRST := 0
MINUTES := 30
BUDGET := 0
NIGHTLY := test-lowest test-clients check-aarch64 sim sim-mutants sim-outputs chat-outputs fuzz bench
# pip installs into the environments below, even if the user's configuration sets PIP_USER.
export PIP_USER := 0

.PHONY: help check setup run test test-all test-lowest test-clients nightly check-aarch64 first-hour fuzz sim sim-mutants sim-outputs chat-outputs lint lock protos docs model wheel bench gpu-next gpu-wheels gpu-check gpu-check-kernels gpu-bench gpu-bench-kernels gpu-tune-kernels gpu-kernel-resources clean
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Checks the versions that pyproject.toml requires, in code that any Python can run. pip's own message takes many lines.
CHECK_PYTHON := import sys; version = "%s is %d.%d" % ((sys.executable,) + sys.version_info[:2]); \
(3, 11) <= sys.version_info or sys.exit("Pagewire needs Python 3.11 or newer, and " + version + sys.argv[1]); \
sys.version_info < (3, 15) or sys.stderr.write("Pagewire is tried on Python 3.11 to 3.14, and " + version + "\n")

check: lint  ## quick check: lint, types, tests of the scheduler's core and the project
	$(BIN)/python -m pytest -q -m 'not gpu and not alone and not thorough' -n 2 --dist loadfile tests/core tests/project

$(READY): pyproject.toml constraints.txt
	@if test -x $(BIN)/python; then $(BIN)/python -c '$(CHECK_PYTHON)' ": remove $(VENV) to have it made again"; \
	elif command -v $(PYTHON) > /dev/null; then $(PYTHON) -c '$(CHECK_PYTHON)' ": name another, make PYTHON=/path/to/python3.14"; \
	else echo "there is no $(PYTHON): install Python 3.14, or name one, make PYTHON=/path/to/python3.14" >&2; exit 1; fi
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) deploy/environment.py $(VENV)

setup: $(READY)  ## create .venv with the pinned packages

run: $(READY)  ## serve the bundled model and stream one completion
	$(BIN)/python -m pagewire run --temperature 0 --stats storyteller "Once upon a time"

# Folders without and with imports of torch, since each process that collects the latter imports torch.
WITHOUT_TORCH := tests/core tests/contract tests/project tests/sim tests/fuzz
WITH_TORCH := tests/system tests/worker tests/kernels tests/gpu
# Two processes more than a small machine has cores, because many tests wait.
BESIDE := -n 4 --dist loadfile --no-loadscope-reorder
# Exit code 5 of pytest: no test was selected.
RUN_TESTS := status=5; run() { echo "$$1"; shift; $(BIN)/python -m pytest $(if $(COSTS),--costs=$(COSTS)) "$$@"; \
  code=$$?; case "$$status $$code" in '0 5') ;; '0 '*|'5 '*) status=$$code ;; esac; }; run

test: $(READY)  ## run the tests that every change needs (some minutes); ARGS="...": pytest arguments, which select from all tests
ifdef ARGS
	@$(RUN_TESTS) 'part 1 of 2: in four processes' -m 'not gpu and not alone' $(BESIDE) $(ARGS); \
	run 'part 2 of 2: with the machine to itself' -q -m 'not gpu and alone' $(ARGS); exit $$status
else
	@$(RUN_TESTS) 'part 1 of 2, some minutes: without torch' -m 'not gpu and not alone and not thorough' $(BESIDE) $(WITHOUT_TORCH); \
	run 'part 2 of 2, some minutes: with torch' -m 'not gpu and not alone and not thorough' $(BESIDE) $(WITH_TORCH); exit $$status
endif

test-all: $(READY)  ## run the remaining tests that need no GPU: interpreters, compilers, peers, installations, long histories
	@$(RUN_TESTS) 'part 1 of 2, a quarter of an hour: in four processes' -m 'not gpu and not alone and thorough' $(BESIDE); \
	run 'part 2 of 2, a minute: with the machine to itself' -q -m 'not gpu and alone' tests/system; exit $$status

test-lowest: .venv-lowest/.ready  ## test with the oldest packages that pyproject.toml allows, and each extra alone with the oldest and newest
	PAGEWIRE_TEST_VERSIONS=lowest $(BIN)/python -m pytest tests/system/test_extras.py
	PAGEWIRE_TEST_VERSIONS=newest $(BIN)/python -m pytest tests/system/test_extras.py
	@# The ignored tests compare with the newest version of transformers.
	.venv-lowest/bin/python -m pytest -m 'not gpu and not alone' -n 4 --dist loadfile tests/core tests/contract tests/system/test_serve.py \
	  $(patsubst %,--ignore=tests/contract/test_%.py,gguf_tokenizer template_forms tokenizer_files)
	env -u TRITON_INTERPRET .venv-lowest/bin/python -m tests.kernels.triton.compilation --pairs --unlimited

test-clients: .venv-clients/.ready $(READY)  ## test Claude Code, Codex and other pinned clients against a scripted model (needs Node 20); ARGS="...": pytest arguments
	$(BIN)/python -m tests.clients $(ARGS)

nightly:  ## run everything that takes hours, continuing after failures; SEEDS=n, MINUTES=n, STARTS=n: shorter; SKIP=target: without it
	@failed=; for part in $(filter-out $(SKIP),$(NIGHTLY)); do \
	  $(MAKE) $$part NAME='fresh-starts$(if $(STARTS), --starts $(STARTS))' || failed="$$failed $$part"; done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

check-aarch64: $(READY)  ## test the CPU kernels for AArch64 under qemu; ARGS="...": pytest arguments, PROCESSOR=cortex-a53: an older processor
	$(BIN)/python -m tests.kernels.emulated $(if $(PROCESSOR),--processor $(PROCESSOR)) $(ARGS)

first-hour: $(READY)  ## test the first steps of new users on unusual machines; ARGS="compil PIP_USER": only some cases
	$(BIN)/python -m tests.first_hour $(ARGS)

fuzz: $(READY)  ## fuzz for MINUTES=n: random requests alone and in batches must have equal outputs, and grammars; SEED=n: the first seed; FAMILY=llama,gpt_oss: random models of these families; MEMORY=0.33: a KV cache of this share of what the requests in flight need; KILLS=n: kill the worker n times while it runs requests; WEIGHTS=float32,bfloat16,int8,int4: formats of the weights
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(FAMILY),--family $(FAMILY)) $(if $(MEMORY),--memory $(MEMORY)) $(if $(KILLS),--kills $(KILLS)) $(if $(WEIGHTS),--weights $(WEIGHTS))

sim: $(READY)  ## simulate SEEDS=n histories of the scheduler with a failing worker, from seed FIRST=n; COMPILED=1: faster
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --first $(FIRST) $(if $(COMPILED),--compiled)

sim-mutants: $(READY)  ## plant bugs and check that the simulators find each, with its recorded seed or SEEDS=n others; RECORD=1: record the seeds
	@$(foreach part,tests.sim tests.sim.outputs,$(BIN)/python -m $(part).mutants --seeds $(SEEDS) --first $(FIRST) $(if $(RECORD),--record) || failed=1;) test -z "$$failed"

sim-outputs: $(READY)  ## simulate SEEDS=n histories of detached results, outputs and both sides of GenerateMany, from seed FIRST=n
	$(BIN)/python -m tests.sim.outputs --seeds $(SEEDS) --first $(FIRST)

chat-outputs: $(READY)  ## parse SEEDS=n random outputs in each tool call format, split at every position
	$(BIN)/python -m tests.core.chat_output --outputs $(SEEDS) --first $(FIRST)

lint: $(READY)  ## ruff, mypy, import-linter, buf lint, buf breaking
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml --no-cache
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against descriptors.binpb

# Stubs are generated with the oldest supported grpcio-tools, in a separate environment.
protos: .venv-protos/.ready  ## generate the stubs under pagewire/protos/gen
	.venv-protos/bin/python -m grpc_tools.protoc -Ipagewire/protos/gen=protos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

.venv-protos/.ready:
	$(PYTHON) -m venv --clear .venv-protos
	.venv-protos/bin/python -m pip install -q grpcio-tools==1.76.0
	touch $@

# uv determines the lowest versions, and pip installs them from the index for which it is configured.
.venv-uv/.ready:
	$(PYTHON) -m venv --clear .venv-uv
	.venv-uv/bin/python -m pip install -q uv==0.13.9
	touch $@

.venv-lowest/.ready: pyproject.toml .venv-uv/.ready $(READY)
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-uv/bin/uv pip compile -q --resolution=lowest-direct --python=.venv-lowest/bin/python -o .venv-lowest/lowest.txt \
	  --extra=test pyproject.toml
	.venv-lowest/bin/python -m pip install -q -c .venv-lowest/lowest.txt -e '.[test]'
	.venv-lowest/bin/python -m pip install -q 'triton==3.6.0'
	touch $@

# Aider's packages need a separate environment and a Python before 3.13.
CLIENTS := tests/clients/installed
.venv-clients/.ready: $(wildcard $(CLIENTS)/*)
	@command -v npm > /dev/null && node -e 'process.exit(+(process.versions.node.split(".")[0] < 20))' 2> /dev/null || \
	  { echo "make test-clients needs Node with npm: install Node 20 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 13) or sys.exit("make test-clients needs Python 3.11 or 3.12, for aider: name one, make PYTHON=/path/to/python3.12")'
	rm -rf .venv-clients && mkdir .venv-clients
	cp $(CLIENTS)/package.json $(CLIENTS)/package-lock.json .venv-clients && cd .venv-clients && npm ci --no-audit --no-fund
	for name in python aider; do $(PYTHON) -m venv .venv-clients/$$name && \
	  .venv-clients/$$name/bin/python -m pip install -q --no-deps -r $(CLIENTS)/$$name.txt || exit 1; done
	touch $@

lock: .venv-uv/.ready  ## write constraints.txt and the images' lock files after a change of pyproject.toml; ARGS=--upgrade: newest versions
	.venv-uv/bin/python deploy/lock.py $(ARGS)

docs: $(READY)  ## write the pages in docs/ that are generated from code
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.captures

model: $(READY)  ## train the bundled model again
	$(BIN)/python -m models.train_storyteller $(MODEL)

wheel: $(READY)  ## build two wheels in dist/: a pure wheel, and one for this platform with compiled CPU kernels
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .
	$(BIN)/python -m deploy.platform_wheel dist/pagewire-*-none-any.whl

bench: $(READY)  ## list the benchmarks, or run one: NAME=fork ARGS="--rounds 3"
	@$(BIN)/python -m bench $(NAME) $(ARGS)

# These targets install nothing: PYTHON=/path/to/python must have torch with CUDA and Triton. The first command of each
# reports other missing packages.
gpu-next:  ## on a GPU, for BUDGET=seconds: run missing and outdated measurements; BUDGET=0: list them, without a GPU
	@test $(BUDGET) = 0 || $(PYTHON) -m pagewire.installation gpu
	$(if $(COMMIT),PAGEWIRE_COMMIT=$(COMMIT) )$(PYTHON) -m bench agenda --budget $(BUDGET) $(ARGS)

gpu-wheels: $(READY)  ## download the packages that an offline GPU machine lacks, and list them; ARGS="--python 3.12"
	$(BIN)/python -m bench wheels $(ARGS)

gpu-check:  ## on a GPU: check both services against transformers and after failures; PARTS="parity kills ...": only some
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m tests.gpu.check $(if $(PARTS),--parts $(PARTS))

gpu-check-kernels:  ## on a GPU: check every Triton kernel against the reference
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m tests.gpu.check_kernels

gpu-bench:  ## on a GPU: measure steps, throughput, idle time and swaps against goals; PARTS="decode_small idle ...": only some
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m bench speed $(if $(PARTS),--parts $(PARTS))

gpu-bench-kernels:  ## on a GPU: measure the kernels against a memory copy and torch's flash attention
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m bench kernels

gpu-tune-kernels:  ## on a GPU: measure tile sizes for common models and write them to the static table
	@$(PYTHON) -m pagewire.installation gpu
	$(PYTHON) -m bench tune-kernels

gpu-kernel-resources: $(READY)  ## without a GPU: list registers, shared memory and spills of every Triton kernel, compiled for an H200
	env -u TRITON_INTERPRET $(BIN)/python -m tests.kernels.triton.compilation

clean:  ## remove the virtual environments
	rm -rf $(VENV) $(VENV).lock .venv-protos .venv-uv .venv-lowest .venv-clients
