# Each target installs its requirements into .venv only: make run installs torch and covey, the other targets also tools.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
QUICK ?=
MINUTES ?= 10
SEEDS ?= 100000
unexport PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE  # the caller's settings have no influence, and compiled modules are cached

IMG ?= covey-operator:latest
.PHONY: run test test-fast test-fresh docs check bench peers soak audit coverage mutation format install clean kubernetes test-kubernetes test-kubelet operator-run docker-build deploy manifests

install: $(INSTALLED)

# Debian without python3-venv has no ensurepip: the system's pip installs pip into the environment.
$(BIN)/pip:
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
		elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
			$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; \
		else echo "$(PYTHON) has no pip and no venv: apt-get install python3-pip" >&2; exit 2; fi

# To run covey: the pinned torch, then covey.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing torch and covey into $(VENV)"
	@$(BIN)/pip install --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e .
	@touch $@

# To develop covey: the tools that the other targets call.
$(INSTALLED_DEV): $(INSTALLED)
	@echo "installing the development tools into $(VENV)"
	@$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(INSTALLED)
	$(BIN)/covey run -n 4 --log-dir covey_logs examples/02_healing.py --kill 2

# -- tests: CONTRIBUTING.md says how long each target takes ------------------------------------------------------------

# A test whose requirements are missing is skipped; the end of the output lists them. With NO_SKIPS=1 a skip is a failure.
test: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest -n 4 --dist worksteal --durations 20 $(if $(NO_SKIPS),--no-skips)

# Tests that start no cluster of processes, and the first seeds of the simulation.
test-fast: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest -n 2 --dist worksteal tests/unit tests/scenarios tests/simulation/test_seeds.py::test_world --seeds 40

# On new machines made with debootstrap; needs root. tests/fresh/run.py documents SUITES, USERS, COMMANDS and KEEP.
test-fresh:
	@SUITES="$(or $(SUITES),bookworm trixie)" USERS="$(or $(USERS),root user)" COMMANDS="$(or $(COMMANDS),make run; make test)" \
		KEEP="$(KEEP)" $(PYTHON) tests/fresh/run.py

check: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED_DEV)
	$(BIN)/python docs/build_reference.py

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(INSTALLED_DEV)
	$(BIN)/python -m bench.formation $(if $(QUICK),--quick)
	$(BIN)/python -m bench.scale $(if $(QUICK),--quick)
	$(BIN)/python -m bench.recovery $(if $(QUICK),--quick)
	$(BIN)/python -m bench.takeover $(if $(QUICK),--quick)
	$(BIN)/python -m bench.overhead $(if $(QUICK),--quick)
	$(BIN)/python -m bench.federated $(if $(QUICK),--quick)
	$(BIN)/python -m bench.operator $(if $(QUICK),--quick)
	$(BIN)/python -m bench.params $(if $(QUICK),--quick)
	$(BIN)/python -m bench.mindspore $(if $(QUICK),--quick)
	$(BIN)/python -m bench.scoreboard $(if $(QUICK),--quick)

peers: $(INSTALLED_DEV)
	$(BIN)/python -m bench.peers

# -- the newest torch: the version that `pip install torch` installs, a CUDA build on Linux; pinned in constraints-newest.txt

NEWEST := .venv-newest
NEWEST_INSTALLED := $(NEWEST)/.installed
NEWEST_GB := 10
TRAINING := tests/unit/training tests/unit/template_process $(addprefix tests/processes/test_,$(addsuffix .py,template healing sharded \
	spares elastic growing integrations torchrun_scripts stream run generators failing_scripts))
.PHONY: test-newest-torch

$(NEWEST_INSTALLED): pyproject.toml constraints-newest.txt | $(INSTALLED_DEV)
	@free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); \
	if [ ! -e $@ ] && [ "$$free" -lt $(NEWEST_GB) ]; then \
		echo "make test-newest-torch is skipped: $(NEWEST) needs $(NEWEST_GB) GB of free disk, but only $$free GB are free"; exit 0; fi; \
	echo "installing $$(grep ^torch constraints-newest.txt), covey and its tools into $(NEWEST) ..."; \
	$(PYTHON) -m venv --clear --without-pip $(NEWEST) && \
	$(BIN)/python -m pip --python $(NEWEST)/bin/python install --quiet --disable-pip-version-check -c constraints-newest.txt -e '.[dev]' && \
	touch $@

# The training tests. A failed test is not repeated. Without the environment (too little disk) no test is run.
test-newest-torch: $(NEWEST_INSTALLED)
	@[ ! -e $(NEWEST_INSTALLED) ] || \
		$(NEWEST)/bin/python -m pytest -p no:cacheprovider -n 2 --dist worksteal --durations 10 $(TRAINING)

# -- proof: docs/proof.md has the results ----------------------------------------------------------------------------

# Each part takes MINUTES. FROM is the first seed of the simulation.
soak: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -n 4 --dist worksteal --long -m long
	for game in cluster resizing servers federation; do \
		$(BIN)/python -m tests.simulation.seed_sweep $$game --seeds $(SEEDS) --from $(or $(FROM),0) --minutes $(MINUTES) || exit 1; done
	$(BIN)/python -m tests.soak.trained --minutes $(MINUTES)
	$(BIN)/python -m tests.soak.federated_load --minutes $(MINUTES)
	$(BIN)/python -m tests.soak.fuzz --seconds $$(( 60 * $(MINUTES) ))
	$(BIN)/python -m tests.soak.abuse
	@fuzz=.peers/fuzz/bin/python; test -x $$fuzz || { echo "atheris is skipped: not installed; run make peers"; exit 0; }; \
		for part in frames greeting bodies; do \
			PYTHONPATH=src:. $$fuzz -m tests.soak.atheris_bytes $$part -max_total_time=60 || exit 1; done
	@$(MAKE) --no-print-directory audit

# An unreachable service is reported and is not a failure.
audit: $(INSTALLED_DEV)
	@$(BIN)/python -m bench.peers audit
	@$(BIN)/pip freeze --exclude-editable | grep -v '^torch==' > .peers/audit/requirements.txt
	@.peers/audit/bin/pip-audit --no-deps --disable-pip -r .peers/audit/requirements.txt 2>.peers/audit/errors; code=$$?; \
		cat .peers/audit/errors >&2; test $$code -eq 0 || { ! grep -q 'Could not connect to' .peers/audit/errors || \
			{ echo "audit skipped: pip-audit cannot reach its service"; exit 0; }; exit $$code; }

coverage: $(INSTALLED_DEV)
	rm -rf .coverage && mkdir .coverage
	-$(BIN)/python -m coverage run -m pytest -n 4 --dist worksteal --long  # failures are ignored: coverage changes how processes exit, and make test runs the same tests
	-$(BIN)/python -m coverage combine --quiet  # a process that was killed while it wrote leaves an unreadable file
	@rm -f .coverage/data.*
	$(BIN)/python -m coverage report --fail-under 85 --sort cover
	@printf 'core, in %%: '; $(BIN)/python -m coverage report --include 'src/covey/core/*' --fail-under 95 --format total

mutation: $(INSTALLED_DEV)
	$(BIN)/python -m bench.peers mutation
	$(BIN)/python -m tests.soak.mutants

# -- Kubernetes ------------------------------------------------------------------------------------------------------

kubernetes:
	@tests/kubernetes/fetch.sh

# The operator with a real API server, then on a complete Kubernetes with a real kubelet; the second part needs root.
test-kubernetes: $(INSTALLED_DEV) kubernetes
	$(BIN)/python -m pytest -n 4 --dist worksteal tests/kubernetes
	@$(MAKE) test-kubelet

# Needs root; all processes run in new namespaces and end with them.
test-kubelet: $(INSTALLED_DEV)
	@tests/kubernetes/fetch.sh node
	tests/kubernetes/full_kubernetes.sh $(BIN)/python -m pytest tests/kubernetes/full_kubernetes.py

operator-run: $(INSTALLED_DEV)
	$(BIN)/covey operator run --no-leader-elect

docker-build:
	docker build --target operator -t $(IMG) .

deploy: $(INSTALLED_DEV)
	$(BIN)/covey operator install --image $(IMG)

manifests: $(INSTALLED_DEV)
	$(BIN)/python -m covey.kubernetes.manifests > deploy/v1/covey-operator.yaml

clean:
	rm -rf $(VENV) $(NEWEST) .mypy_cache .ruff_cache .pytest_cache .kubernetes .coverage .traces mutants

# -- records of the present behaviour: docs/compatibility.md ---------------------------------------------------------

.PHONY: snapshots traces traces-check bench-record bench-check

# Write the names and fields that users rely on into tests/snapshots/.
snapshots: $(INSTALLED_DEV)
	$(BIN)/python -m tests.snapshots

# Record the effects of the state machines in the simulations. An interrupted run is resumed.
traces: $(INSTALLED_DEV)
	$(BIN)/python -m tests.traces record

traces-check: $(INSTALLED_DEV)
	$(BIN)/python -m tests.traces check

# Run it on a quiet machine: the record is made from five runs of the quick benchmarks.
bench-record: $(INSTALLED_DEV)
	$(BIN)/python -m bench.check --record

bench-check: $(INSTALLED_DEV)
	$(BIN)/python -m bench.check
