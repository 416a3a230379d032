# Everything a contributor runs. `make help` lists it. A fresh Debian 12 with make and git is enough: the rest is installed here.
SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Debian's packages, without their services; empty where this user can't install any.
INSTALL := $(shell command -v apt-get >/dev/null && { [ "$$(id -u)" = 0 ] || command -v sudo; } && echo sh release/debian.sh)
# Programs the tests run for real, and the Debian packages that bring them.
PROGRAMS := promtool prometheus-alertmanager amtool prometheus-node-exporter chromium chromedriver
PACKAGES := prometheus prometheus-alertmanager prometheus-node-exporter chromium chromium-driver python3-venv libfaketime

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

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
	if [ -n "$$missing" ] && [ -n "$(INSTALL)" ]; then echo "installing: $(PACKAGES)"; $(INSTALL) $(PACKAGES); \
	elif [ -n "$$missing" ]; then echo "please install: $(PROGRAMS)"; fi

# The demo needs two programs and the exporter alone, none of the development tools.
DEMO_VENV := build/demo
.PHONY: demo
demo: ## a recorded SGLang that retracts, and the notification it leads to (Ctrl-C ends it)
	@echo "1/3 Prometheus and Alertmanager (where they are missing, installing them takes about a minute)"
	@if command -v prometheus >/dev/null && { command -v prometheus-alertmanager || command -v alertmanager; } >/dev/null && \
	  $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then echo "    installed"; \
	else $(or $(INSTALL),false) prometheus prometheus-alertmanager python3-venv || true; fi
	@echo "2/3 the exporter, in $(DEMO_VENV) (about half a minute the first time)"
	@$(MAKE) --no-print-directory $(DEMO_VENV)/installed
	@echo "3/3 the demo: with both programs the first notification comes within a minute"
	@$(DEMO_VENV)/bin/sglang-tuning-exporter demo $(DEMO)

$(DEMO_VENV)/installed: pyproject.toml
	@[ -x $(DEMO_VENV)/bin/python ] || $(PYTHON) -m venv $(DEMO_VENV)
	@$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.PHONY: check
check: install ## style, types, insecure calls, and generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell exporter docs/*.md *.md
	$(BIN)/python -m release.wording
	$(BIN)/bandit -q -c pyproject.toml -r exporter
	$(BIN)/sglang-tuning-exporter generate --check

.PHONY: docs
docs: install ## the documentation site in build/docs: a warning or a link that leads nowhere is an error
	@$(BIN)/python -c 'import sphinx, myst_parser, furo' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet --builder html --conf-dir docs . build/docs

.PHONY: docs-links
docs-links: docs ## whether the addresses that the documentation names answer; needs the network
	$(BIN)/python -m sphinx --quiet --builder linkcheck --conf-dir docs . build/docs-links

.PHONY: audit
audit: install ## known vulnerabilities of what is installed, locked, and lowest allowed; asks PyPI's database, so it needs the network
	$(BIN)/python -m pip freeze --exclude-editable | $(BIN)/pip-audit --strict --no-deps --disable-pip -r /dev/stdin
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r exporter/requirements.lock
	$(BIN)/python -m release lowest | $(BIN)/pip-audit --strict --no-deps --disable-pip -r /dev/stdin

# Two processes for each core, a file at a time and in the order of names: half of the time is spent waiting for real processes, and by
# number of tests the long files would come last.
SIDE_BY_SIDE = $(if $(TESTS),,-n $(shell echo $$(( 2 * $$(nproc) ))) --dist loadfile --no-loadscope-reorder)

.PHONY: test
test: system install ## every test, with real Prometheus, Alertmanager and Chromium
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(TESTS)

.PHONY: truth
truth: install ## the product from outside: every case by every way in, beside its truth; TRUTH="guide --way report --wrong"
	$(BIN)/python -m truth $(TRUTH)

.PHONY: test-real
test-real: system install ## the advice followed on a real SGLang (on a CPU), 25 to 30 minutes
	$(BIN)/python -m closed_loop run $(REAL)

.PHONY: bench
bench: bench-system install ## figures against peers, in one run, into docs/benchmarks.md
	$(BIN)/python -m bench --write

.PHONY: bench-fleet
bench-fleet: system install ## rules and the Fleet board with 100, 300 and 1,000 targets; an hour; FLEET="--targets 100 --warm 60"
	$(BIN)/python -m bench.fleet $(FLEET)

# Only measured against, so neither the tests nor CI need them.
BENCH_PROGRAMS := mtail prometheus-node-exporter
.PHONY: bench-system
bench-system: system
	@for p in $(BENCH_PROGRAMS); do command -v $$p >/dev/null || missing=1; done; \
	if [ -n "$$missing" ] && [ -n "$(INSTALL)" ]; then echo "installing: $(BENCH_PROGRAMS)"; $(INSTALL) $(BENCH_PROGRAMS) || true; fi

.PHONY: fuzz
fuzz: install ## hostile input for everything that comes from the world, ten minutes; FUZZ="--seconds 60 --target lines"
	$(BIN)/python -m fuzz $(FUZZ)

.PHONY: dist
dist: install ## the sdist and the wheel of HEAD in dist/, built twice and compared byte for byte
	rm -rf dist && $(BIN)/python -m release build dist
	$(BIN)/python -m twine check --strict dist/*

.PHONY: release-check
release-check: install ## whether this commit can be released: one version everywhere, a dated changelog, archives that reproduce
	$(BIN)/python -m release check $(if $(TAG),--tag $(TAG))
	$(MAKE) dist

# LOWEST=1 installs each dependency at the lowest version that pyproject.toml allows.
WHEEL := build/wheel-$(notdir $(PYTHON))$(if $(LOWEST),-lowest)
.PHONY: test-wheel
test-wheel: system dist ## every test against the installed wheel; make test-wheel PYTHON=python3.13 LOWEST=1 TESTS=…
	rm -rf $(WHEEL) && $(PYTHON) -m venv $(WHEEL)/venv && mkdir $(WHEEL)/tree
	git archive HEAD | tar -x -C $(WHEEL)/tree
	$(WHEEL)/venv/bin/python -m pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[test]"
	if [ -n "$(LOWEST)" ]; then cd $(WHEEL)/tree && ../venv/bin/python -m release lowest >lowest.txt && \
	  ../venv/bin/python -m pip install --quiet --disable-pip-version-check -r lowest.txt; fi
	cd $(WHEEL)/tree && ../venv/bin/python -c 'import sglang_tuning_exporter as e; assert "site-packages" in e.__file__, e.__file__'
	cd $(WHEEL)/tree && ../venv/bin/python -m pytest $(SIDE_BY_SIDE) $(TESTS)

.PHONY: release-notes
release-notes: install ## what the changelog says of this version
	@$(BIN)/python -m release notes

VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' exporter/sglang_tuning_exporter/__init__.py)
IMAGE := sglang-tuning-exporter:$(VERSION)
# For the image's Python on every architecture; pip refuses whatever is not listed here with its hash.
PYTHON_OF_IMAGE := $(shell sed -n 's/^ARG PYTHON=python:\([0-9]*\.[0-9]*\).*/\1/p' exporter/Dockerfile)
LOCK = $(BIN)/python -m uv pip compile --quiet --upgrade --universal --generate-hashes --python-version $(PYTHON_OF_IMAGE) --no-header --no-emit-index-url --no-emit-find-links
.PHONY: lock
lock: install ## what the image installs, anew: exporter/requirements.lock and exporter/build.lock, with hashes; needs PyPI
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5'
	$(LOCK) --output-file exporter/requirements.lock pyproject.toml
	$(LOCK) --output-file exporter/build.lock release/constraints.txt

.PHONY: image
image: ## the image of docker-compose.yml
	docker build -f exporter/Dockerfile -t $(IMAGE) .

# The exporter and the recorded server of the demo, as docker-compose.yml confines them; `--wait` asks their health checks.
OWN := exporter replay notifications
DEMO_OF_IMAGE := docker compose --file deploy/demo.yml
.PHONY: test-image
test-image: image ## whether the image comes up healthy, read-only and not as root, and sees its server
	$(DEMO_OF_IMAGE) config --quiet
	$(DEMO_OF_IMAGE) up --detach --no-build --wait --wait-timeout 120 $(OWN)
	[ "$$($(DEMO_OF_IMAGE) exec -T exporter id -u)" = 10001 ]
	! $(DEMO_OF_IMAGE) exec -T exporter sh -c ': >/written' 2>/dev/null
	$(DEMO_OF_IMAGE) exec -T exporter sh -c ': >/var/lib/sglang-tuning/written && rm /var/lib/sglang-tuning/written'
	curl --fail --silent --show-error --retry 20 --retry-delay 1 --retry-all-errors http://127.0.0.1:9741/-/ready
	curl --fail --silent --show-error http://127.0.0.1:9741/metrics | grep -x 'sglang_tuning_up 1.0'
	docker run --rm --read-only --cap-drop ALL $(IMAGE) --version | grep -x 'sglang-tuning-exporter $(VERSION)'
	docker run --rm --read-only --cap-drop ALL --tmpfs /out:uid=10001 $(IMAGE) generate --output /out | grep alerts/prometheus.yml
	$(DEMO_OF_IMAGE) down --volumes
.PHONY: soak
soak: install ## ten million lines, twenty thousand scrapes, two hundred kills, with strangers beside it: counts exact, memory flat; then hardships
	$(BIN)/python -m bench.soak $(SOAK)
	$(BIN)/python -m bench.hardships $(HARDSHIPS)

.PHONY: generate
generate: install ## rules, Alertmanager's configuration and dashboards from the table of diagnoses
	$(BIN)/sglang-tuning-exporter generate

.PHONY: clean
clean: ## what the above made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis exporter/*.egg-info
