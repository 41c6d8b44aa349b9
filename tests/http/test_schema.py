"""The OpenAPI document matches the running server, checked with schemathesis."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.http.serving import FakeScheduler, client, example_node, example_view, serving

from covey.core.types import NodeState, Role
from covey.management.training_api import ALL_OPERATIONS


@pytest.fixture
def port() -> Iterator[int]:
    nodes = (
        example_node(Role.WORKER, 0),
        example_node(Role.PSERVER, 0, NodeState.SUSPECT),
        example_node(Role.SERVER, 1, NodeState.LEFT),
    )
    with serving(FakeScheduler(example_view(*nodes, counters={"beats": 1.0}))) as port:
        yield port


def test_every_reply_matches_openapi_document(port: int, tmp_path: Path) -> None:
    schemathesis = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json"]
    bounds = ["--max-examples", "20", "--seed", "1", "--generation-database", "none", "--no-color"]
    done = subprocess.run(
        [*schemathesis, *bounds, "--checks", "all", "--exclude-path", "/stream"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Without /openapi.json, which schemathesis omits, and /stream, whose reply does not end.
    assert f"Tested: {len(ALL_OPERATIONS) - 2}\n" in done.stdout


def test_every_operation_is_documented(port: int) -> None:
    with client(port) as http:
        document = http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(operation.method, operation.path) for operation in ALL_OPERATIONS}
    assert document["paths"]["/stop"]["post"]["requestBody"]["required"] is False
    responses = document["components"]["responses"]
    for path in ("/nodes", "/stop", "/metrics"):
        (operation,) = document["paths"][path].values()
        assert set(operation["responses"]) == {"200", *responses}
    assert {"400", "401", "403", "405", "413", "500"} <= set(responses)
    assert "Allow" in responses["405"]["headers"]
    assert "WWW-Authenticate" in responses["401"]["headers"]
    scaling = {"/scaleout", "/scalein", "/scaleoutRollback", "/operations/{number}", "/gone"}
    console = {"/story", "/settings", "/stream", "/key", "/kill", "/dump", "/logs/{node}"}
    always = {"/nodes", "/state", "/view", "/recoveries", "/stop", "/metrics", "/healthz", "/openapi.json"}
    assert always | scaling | console == set(document["paths"])
