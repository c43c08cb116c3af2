# `make demo` sets everything up and runs the main job; `make test` sets everything up and runs every test.
# Both create .venv on the first call and reuse it afterwards.

PYTHON ?= python3
BIN := .venv/bin
OUT ?= out
DATA ?= ../shared/data
PROFILE := --costs gpt-1.5b-a100 --devices 8 --microbatches 24

.PHONY: demo test lint bench validation notebooks gallery clean help

help:
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

# pip is quiet, so that what a target prints is what it is about.
.venv/installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("pipesim needs Python 3.11 or later, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[plot]'
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,replay]'
	@touch $@

demo: .venv/installed ## compare the schedules on a measured A100 profile, and write pictures to out/
	@mkdir -p $(OUT)
	@echo "GPT 1.5B on 8 A100, 24 microbatches, stage times profiled by Qi et al. 2024 (zero-bubble paper, Table 9)."
	@echo
	@$(BIN)/pipesim compare 1f1b --all $(PROFILE)
	@echo
	@$(BIN)/pipesim plot 1f1b $(PROFILE) --out $(OUT)/1f1b.png
	@$(BIN)/pipesim plot 1f1b $(PROFILE) --out $(OUT)/1f1b.html
	@$(BIN)/pipesim export 1f1b $(PROFILE) --out $(OUT)/1f1b.trace.json
	@$(BIN)/pipesim plot gpipe $(PROFILE) --out $(OUT)/gpipe.png
	@echo "Look at $(OUT)/1f1b.png and $(OUT)/gpipe.png, open $(OUT)/1f1b.html in a browser, and $(OUT)/1f1b.trace.json at ui.perfetto.dev."

test: .venv/installed-dev ## every test
	$(BIN)/python -m pytest --numprocesses 2

lint: .venv/installed-dev ## ruff, mypy, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/imports.py

bench: .venv/installed-dev ## the benchmarks but gpu_box.py; benchmarks/README.md says what they answer
	for file in $(filter-out benchmarks/gpu_box.py,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

validation: .venv/installed-dev ## errors against measured runs, into out/validation; DATA is the folder with papers/ and vtrain/
	$(BIN)/python benchmarks/validation.py --data $(DATA) --out $(OUT)/validation $(if $(ALSO),--also $(ALSO))

notebooks: .venv/installed-dev ## execute the notebooks into out/
	@mkdir -p $(OUT)
	$(BIN)/python tests/notebooks.py $(OUT)

gallery: .venv/installed-dev ## a page per schedule and a table of all, in out/gallery
	$(BIN)/python docs/gallery.py $(OUT)/gallery

clean: ## what the targets above made, .venv included
	rm -rf .venv $(OUT) build dist *.egg-info
