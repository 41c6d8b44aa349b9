"""The OpenAPI document describes what the running server does: schemathesis holds every answer against it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.http.serving import Shown, a_node, a_view, client, serving

from covey.core.types import NodeState, Role
from covey.management.training_api import ALL_OPERATIONS


@pytest.fixture
def port() -> Iterator[int]:
    nodes = (a_node(Role.WORKER, 0), a_node(Role.PSERVER, 0, NodeState.SUSPECT), a_node(Role.SERVER, 1, NodeState.LEFT))
    with serving(Shown(a_view(*nodes, counters={"beats": 1.0}))) as port:
        yield port


def test_every_answer_is_as_documented(port: int, tmp_path: Path) -> None:
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
    # All but /openapi.json itself, which schemathesis reads and leaves out, and /stream, whose answer goes on.
    assert f"Tested: {len(ALL_OPERATIONS) - 2}\n" in done.stdout


def test_every_door_is_documented(port: int) -> None:
    with client(port) as http:
        document = http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, doors in document["paths"].items() for method in doors}
    assert described == {(operation.method, operation.path) for operation in ALL_OPERATIONS}
    assert document["paths"]["/stop"]["post"]["requestBody"]["required"] is False
    responses = document["components"]["responses"]
    for path in ("/nodes", "/stop", "/metrics"):
        (door,) = document["paths"][path].values()
        assert set(door["responses"]) == {"200", *responses}
    assert {"400", "401", "403", "405", "413", "500"} <= set(responses)
    assert "Allow" in responses["405"]["headers"]
    assert "WWW-Authenticate" in responses["401"]["headers"]
    scaling = {"/scaleout", "/scalein", "/scaleoutRollback", "/operations/{number}", "/gone"}
    console = {"/story", "/settings", "/stream", "/key", "/kill", "/dump", "/logs/{node}"}
    always = {"/nodes", "/state", "/view", "/recoveries", "/stop", "/metrics", "/healthz", "/openapi.json"}
    assert always | scaling | console == set(document["paths"])
