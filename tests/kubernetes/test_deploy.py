"""Manifests, `covey operator install`, and errors of `covey operator run` about the cluster."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.kubernetes.cluster import Kubernetes

from covey.cli.main import main
from covey.kubernetes import manifests
from covey.kubernetes.api_client import CRD, ResourceKind

ROOT = Path(__file__).resolve().parents[2]


def test_manifest_file_is_up_to_date() -> None:
    written = (ROOT / "deploy" / "v1" / "covey-operator.yaml").read_text()
    assert written == manifests.to_yaml(manifests.make_manifests()), "run make manifests"


def test_deployment_arguments_are_accepted_by_operator_run() -> None:
    """With --help the command exits with 0 only if it accepts all other arguments."""
    [container] = manifests.make_deployment("some", "team")["spec"]["template"]["spec"]["containers"]
    command = [sys.executable, "-m", "covey.cli.main", *container["args"], "--help"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_rbac_rules_have_no_wildcards_and_only_create_secrets() -> None:
    for rule in manifests.make_rbac_rules(cluster=True):
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
    [secrets] = [rule for rule in manifests.make_rbac_rules(cluster=True) if "secrets" in rule["resources"]]
    assert secrets["verbs"] == ["create"]
    assert not any("nodes" in rule["resources"] for rule in manifests.make_rbac_rules(cluster=False))


@pytest.mark.parametrize("options", [[], ["--namespace", "team", "--no-ascend"]])
def test_dry_run_prints_the_manifests(options: list[str]) -> None:
    command = [sys.executable, "-m", "covey.cli.main", "operator", "install", "--dry-run", "--image", "mine:1", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    objects = list(yaml.safe_load_all(result.stdout))
    kinds = [obj["kind"] for obj in objects]
    assert kinds[-1] == "Deployment" and objects[-1]["spec"]["replicas"] == 2
    assert objects[-1]["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"
    assert ("ClusterRole" in kinds) == (not options) and kinds.count("CustomResourceDefinition") == (1 if options else 2)


def test_install_is_repeatable(kubernetes: Kubernetes) -> None:
    command = [sys.executable, "-m", "covey.cli.main", "operator", "install", "--kubeconfig", str(kubernetes.kubeconfig)]
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0 and "deployment/covey-operator applied" in result.stdout, result.stderr
    deployments = ResourceKind("apis/apps/v1", "deployments", "Deployment")
    found = kubernetes.do(kubernetes.api.get(deployments, manifests.OPERATOR_NAMESPACE, manifests.OPERATOR_NAME))
    assert found["spec"]["replicas"] == 2
    assert kubernetes.do(kubernetes.api.get(CRD, "", "msjobs.mindspore.gitee.com"))["spec"]["scope"] == "Namespaced"


def kubeconfig(**change: str) -> str:
    """Return a kubeconfig for an address without a server; `change` replaces names in its context."""
    names = {"context": "a", "user": "u", "cluster": "c", **change}
    content = {
        "current-context": "a",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "x"}}],
        "contexts": [{"name": names["context"], "context": {"cluster": names["cluster"], "user": names["user"]}}],
    }
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "options", "code", "message"),
    [
        (None, [], 10, "no Kubernetes cluster is configured"),
        ("a: [", [], 10, "cannot be read"),
        ("hello", [], 10, "cannot be read"),
        (kubeconfig(user="missing"), [], 10, "cannot be read"),
        (kubeconfig(), ["--context", "other"], 10, "--context other is not in the kubeconfig: expected one of a"),
        (kubeconfig(context="b"), [], 10, "no Kubernetes cluster is configured"),
        (kubeconfig(), [], 22, "https://127.0.0.1:1 does not answer"),
    ],
)
def test_operator_run_prints_one_line_if_the_cluster_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, options: list[str], code: int, message: str
) -> None:
    path, stderr = tmp_path / "kubeconfig", io.StringIO()
    if content is not None:
        path.write_text(content)
    command = ["covey", "operator", "run", "--no-leader-elect", "--metrics-port", "-1", "--kubeconfig", str(path), *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(stderr):
        main()
    assert ended.value.code == code and stderr.getvalue().count("\n") == 1 and message in stderr.getvalue()


def test_operator_without_permissions_exits_with_an_error_message(kubernetes: Kubernetes) -> None:
    path = kubernetes.server.kubeconfig(kubernetes.folder / "unprivileged", token=f"{kubernetes.server.token}-none")
    command = [sys.executable, "-m", "covey.cli.main", "operator", "run", "--no-leader-elect", "--kubeconfig", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 21 and "Traceback" not in result.stderr
    assert "covey: " in result.stderr.splitlines()[-1] and "cannot list resource" in result.stderr.splitlines()[-1]
