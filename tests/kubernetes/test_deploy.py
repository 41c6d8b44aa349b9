"""What is shipped is what the code says, and a server takes it."""

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


def test_the_manifest_is_what_the_code_says() -> None:
    written = (ROOT / "deploy" / "v1" / "covey-operator.yaml").read_text()
    assert written == manifests.to_yaml(manifests.make_manifests()), "make manifests writes it anew"


def test_the_deployment_runs_a_command_that_exists() -> None:
    """Its arguments are those of covey operator run, which says so with --help beside them."""
    [container] = manifests.make_deployment("some", "team")["spec"]["template"]["spec"]["containers"]
    command = [sys.executable, "-m", "covey.cli.main", *container["args"], "--help"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_no_right_is_wider_than_it_needs() -> None:
    for rule in manifests.make_rbac_rules(cluster=True):
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
    [secrets] = [rule for rule in manifests.make_rbac_rules(cluster=True) if "secrets" in rule["resources"]]
    assert secrets["verbs"] == ["create"]
    assert not any("nodes" in rule["resources"] for rule in manifests.make_rbac_rules(cluster=False))


@pytest.mark.parametrize("options", [[], ["--namespace", "team", "--no-ascend"]])
def test_a_dry_run_prints_what_would_be_applied(options: list[str]) -> None:
    command = [sys.executable, "-m", "covey.cli.main", "operator", "install", "--dry-run", "--image", "mine:1", *options]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    things = list(yaml.safe_load_all(said.stdout))
    kinds = [thing["kind"] for thing in things]
    assert kinds[-1] == "Deployment" and things[-1]["spec"]["replicas"] == 2
    assert things[-1]["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"
    assert ("ClusterRole" in kinds) == (not options) and kinds.count("CustomResourceDefinition") == (1 if options else 2)


def test_install_applies_everything_and_again(kubernetes: Kubernetes) -> None:
    command = [sys.executable, "-m", "covey.cli.main", "operator", "install", "--kubeconfig", str(kubernetes.kubeconfig)]
    for _ in range(2):
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert said.returncode == 0 and "deployment/covey-operator applied" in said.stdout, said.stderr
    deployments = ResourceKind("apis/apps/v1", "deployments", "Deployment")
    found = kubernetes.do(kubernetes.api.get(deployments, manifests.OPERATOR_NAMESPACE, manifests.OPERATOR_NAME))
    assert found["spec"]["replicas"] == 2
    assert kubernetes.do(kubernetes.api.get(CRD, "", "msjobs.mindspore.gitee.com"))["spec"]["scope"] == "Namespaced"


def kubeconfig(**change: str) -> str:
    """A kubeconfig of a server that is not there."""
    words = {"context": "a", "user": "u", "cluster": "c", **change}
    content = {
        "current-context": "a",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "x"}}],
        "contexts": [{"name": words["context"], "context": {"cluster": words["cluster"], "user": words["user"]}}],
    }
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "options", "code", "said"),
    [
        (None, [], 10, "no Kubernetes cluster is known"),
        ("a: [", [], 10, "cannot be read as one"),
        ("hello", [], 10, "cannot be read as one"),
        (kubeconfig(user="nobody"), [], 10, "cannot be read as one"),
        (kubeconfig(), ["--context", "other"], 10, "no context other: --context may be a"),
        (kubeconfig(context="b"), [], 10, "no Kubernetes cluster is known"),
        (kubeconfig(), [], 22, "https://127.0.0.1:1 does not answer"),
    ],
)
def test_a_cluster_that_cannot_be_asked_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, options: list[str], code: int, said: str
) -> None:
    path, heard = tmp_path / "kubeconfig", io.StringIO()
    if content is not None:
        path.write_text(content)
    words = ["covey", "operator", "run", "--no-leader-elect", "--metrics-port", "-1", "--kubeconfig", str(path), *options]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(heard):
        main()
    assert ended.value.code == code and heard.getvalue().count("\n") == 1 and said in heard.getvalue()


def test_an_operator_without_rights_ends_with_a_sentence(kubernetes: Kubernetes) -> None:
    path = kubernetes.server.kubeconfig(kubernetes.folder / "nobody", token=f"{kubernetes.server.token}-none")
    command = [sys.executable, "-m", "covey.cli.main", "operator", "run", "--no-leader-elect", "--kubeconfig", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 21 and "Traceback" not in said.stderr
    assert "covey: " in said.stderr.splitlines()[-1] and "cannot list resource" in said.stderr.splitlines()[-1]
