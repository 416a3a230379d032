# Everything a contributor runs. `make help` lists it. A fresh Debian 12 with make and git is enough: the rest is installed here.
SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
# Programs the tests and the demo run for real, and the Debian packages that bring them.
PROGRAMS := promtool prometheus-alertmanager amtool chromium chromedriver
PACKAGES := prometheus prometheus-alertmanager chromium chromium-driver python3-venv

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: install
install: $(VENV)/installed ## a virtual environment with the exporter and its development tools

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || $(MAKE) system
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

.PHONY: system
system: ## Debian's Prometheus, Alertmanager, Chromium and its driver, where one is missing
	@for p in $(PROGRAMS); do command -v $$p >/dev/null || missing=1; done; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing=1; \
	if [ -n "$$missing" ] && command -v apt-get >/dev/null; then \
	  echo "installing: $(PACKAGES)"; $(SUDO) apt-get update -q >/dev/null && \
	  DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -q -y --no-install-recommends $(PACKAGES) >/dev/null; \
	elif [ -n "$$missing" ]; then echo "please install: $(PROGRAMS)"; fi

.PHONY: demo
demo: system install ## a recorded SGLang that retracts, and the notification it leads to (Ctrl-C ends it)
	$(BIN)/sglang-tuning-exporter demo $(DEMO)

.PHONY: check
check: install ## style, types, and generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/sglang-tuning-exporter generate --check

.PHONY: test
test: system install ## every test, with real Prometheus, Alertmanager and Chromium
	$(BIN)/python -m pytest $(TESTS)

.PHONY: test-real
test-real: system install ## the advice followed on a real SGLang (on a CPU), about 25 minutes
	$(BIN)/python -m closed_loop run $(REAL)

.PHONY: bench
bench: system install ## figures against peers, in one run
	$(BIN)/python -m bench

.PHONY: fuzz
fuzz: install ## ten million spoiled lines, ten minutes at most
	$(BIN)/python -m fuzz $(FUZZ)

.PHONY: generate
generate: install ## rules, Alertmanager's configuration and dashboards from the table of diagnoses
	$(BIN)/sglang-tuning-exporter generate

.PHONY: clean
clean: ## what the above made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis exporter/*.egg-info
