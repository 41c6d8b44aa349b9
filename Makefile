# Everything a newcomer types. Each target installs what it needs into .venv and nothing elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUICK ?=
MINUTES ?= 10
SEEDS ?= 100000

IMG ?= covey-operator:latest
.PHONY: run test docs check bench peers soak audit coverage mutation format install clean kubernetes test-kubernetes test-kubelet operator-run docker-build deploy manifests

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) 2>/dev/null || { : "Debian without python3-venv";\
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@echo "installing torch, then covey and its tools, into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP)
	$(BIN)/covey run -n 4 --log-dir covey_logs examples/02_healing.py --kill 2

test: $(STAMP)
	@test -n "$$KUBEBUILDER_ASSETS" -o -x .kubernetes/kube-apiserver || \
		echo "the operator's tests are skipped: make kubernetes brings etcd and kube-apiserver into .kubernetes/"
	@$(BIN)/python -m pytest -n 4 --dist worksteal --durations 20 || { echo "what failed beside others runs once more, alone";\
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 1; }

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/python docs/build_reference.py

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP)
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

peers: $(STAMP)
	$(BIN)/python -m bench.peers

# -- proof: docs/proof.md says what these have found -----------------------------------------------------------------

# Each part takes MINUTES. FROM is the first seed of the simulation.
soak: $(STAMP)
	for game in cluster resizing servers federation; do \
		$(BIN)/python -m tests.simulation.soak $$game --seeds $(SEEDS) --from $(or $(FROM),0) --minutes $(MINUTES) || exit 1; done
	$(BIN)/python -m tests.soak.trained --minutes $(MINUTES)
	$(BIN)/python -m tests.soak.federated_load --minutes $(MINUTES)
	$(BIN)/python -m tests.soak.fuzz --seconds $$(( 60 * $(MINUTES) ))
	$(BIN)/python -m tests.soak.abuse
	@fuzz=.peers/fuzz/bin/python; test -x $$fuzz || { echo "atheris is left out: make peers brings it"; exit 0; }; \
		for part in frames greeting bodies; do \
			PYTHONPATH=src:. $$fuzz -m tests.soak.atheris_bytes $$part -max_total_time=60 || exit 1; done
	@$(MAKE) --no-print-directory audit

# Without a network it says so and goes on: that nothing was looked up is no failure of ours.
audit: $(STAMP)
	@$(BIN)/python -m bench.peers audit
	@$(BIN)/pip freeze --exclude-editable | grep -v '^torch==' > .peers/audit/requirements.txt
	@.peers/audit/bin/pip-audit --no-deps --disable-pip -r .peers/audit/requirements.txt || { code=$$?; \
		curl --silent --max-time 10 --output /dev/null https://pypi.org/pypi/pip/json || \
			{ echo "pip-audit cannot reach its service from here: nothing was audited"; exit 0; }; exit $$code; }

coverage: $(STAMP)
	rm -rf .coverage && mkdir .coverage
	-$(BIN)/python -m coverage run -m pytest -n 4 --dist worksteal  # make test judges them: being measured changes how a process ends
	-$(BIN)/python -m coverage combine --quiet  # a process that was killed while it wrote leaves a file that cannot be read
	@rm -f .coverage/data.*
	$(BIN)/python -m coverage report --fail-under 85 --sort cover
	@printf 'of the core, in %%: '; $(BIN)/python -m coverage report --include 'src/covey/core/*' --fail-under 95 --format total

mutation: $(STAMP)
	$(BIN)/python -m bench.peers mutation
	$(BIN)/python -m tests.soak.mutants

# -- Kubernetes ------------------------------------------------------------------------------------------------------

kubernetes:
	@tests/operator/fetch.sh

# the operator against a real API server, then on a whole Kubernetes with a real kubelet: the second part needs root
test-kubernetes: $(STAMP) kubernetes
	$(BIN)/python -m pytest -n 4 --dist worksteal tests/operator
	@$(MAKE) test-kubelet

# needs root; everything runs in namespaces of its own and ends with them
test-kubelet: $(STAMP)
	@tests/operator/fetch.sh node
	tests/operator/whole.sh $(BIN)/python -m pytest tests/operator/whole.py

operator-run: $(STAMP)
	$(BIN)/covey operator run --no-leader-elect

docker-build:
	docker build --target operator -t $(IMG) .

deploy: $(STAMP)
	$(BIN)/covey operator install --image $(IMG)

manifests: $(STAMP)
	$(BIN)/python -m covey.operator.manifests > deploy/v1/covey-operator.yaml

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .kubernetes .coverage mutants

# -- the record of today's behaviour: docs/compatibility.md ----------------------------------------------------------

.PHONY: snapshots traces traces-check bench-record bench-check

# Write the names and fields that users rely on into tests/snapshots/.
snapshots: $(STAMP)
	$(BIN)/python -m tests.snapshots

# Record the effects of the state machines in the simulations. An interrupted run is resumed.
traces: $(STAMP)
	$(BIN)/python -m tests.traces record

traces-check: $(STAMP)
	$(BIN)/python -m tests.traces check

# On a quiet machine: five runs of the quick benchmarks become the record.
bench-record: $(STAMP)
	$(BIN)/python -m bench.check --record

bench-check: $(STAMP)
	$(BIN)/python -m bench.check
