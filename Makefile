# Everything a newcomer types. Each target installs what it needs into .venv and nothing elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUICK ?=

IMG ?= covey-operator:latest
.PHONY: run test check bench format install clean kubernetes test-kubernetes operator-run docker-build deploy manifests

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
	$(BIN)/python -m pytest -n 4 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m bench.formation $(if $(QUICK),--quick)
	$(BIN)/python -m bench.scale $(if $(QUICK),--quick)
	$(BIN)/python -m bench.recovery $(if $(QUICK),--quick)
	$(BIN)/python -m bench.overhead $(if $(QUICK),--quick)
	$(BIN)/python -m bench.federated $(if $(QUICK),--quick)
	$(BIN)/python -m bench.operator $(if $(QUICK),--quick)
	$(BIN)/python -m bench.params $(if $(QUICK),--rounds 3 --table 1000000)

# -- Kubernetes ------------------------------------------------------------------------------------------------------

kubernetes:
	@tests/operator/fetch.sh

test-kubernetes: $(STAMP) kubernetes
	$(BIN)/python -m pytest -n 4 --dist worksteal tests/operator

operator-run: $(STAMP)
	$(BIN)/covey operator run --no-leader-elect

docker-build:
	docker build --target operator -t $(IMG) .

deploy: $(STAMP)
	$(BIN)/covey operator install --image $(IMG)

manifests: $(STAMP)
	$(BIN)/python -m covey.operator.manifests > deploy/v1/covey-operator.yaml

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .kubernetes
