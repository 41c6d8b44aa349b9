"""The management port of a training cluster, over HTTP on loopback."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.http.serving import TOKEN, FakeScheduler, client, dial, example_node, example_view, read_to_end, serving
from tests.requirements import CURL, needs

from covey.core.cluster.view import MINDSPORE_STATES, ClusterView
from covey.core.incidents import Incident
from covey.core.messages import KillRequest, ScaleRequest, StopRequest
from covey.core.types import NodeState, Phase, Role
from covey.errors import UsageError
from covey.management.common_api import BODY_MAX
from covey.management.schemas import DEFAULT_STOP_REASON, REASON_MAX

WORKERS = (example_node(Role.WORKER, 0), example_node(Role.WORKER, 1, NodeState.DEAD, beat_age_s=99.0))


@pytest.fixture
def source() -> FakeScheduler:
    return FakeScheduler(example_view(*WORKERS))


@pytest.fixture
def port(source: FakeScheduler) -> Iterator[int]:
    with serving(source) as port:
        yield port


@pytest.fixture
def http(port: int) -> Iterator[httpx2.Client]:
    with client(port) as http:
        yield http


def error_message(response: httpx2.Response) -> str:
    """Check that the body has exactly the fields of an error and return its message."""
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert set(body) == {"error_message", "code"}
    assert body["code"] == "1"
    assert isinstance(body["error_message"], str)
    assert "\n" not in body["error_message"]
    return str(body["error_message"])


# -- MindSpore's JSON ------------------------------------------------------------------------------------------------


def test_nodes_reply_has_mindspore_fields(http: httpx2.Client) -> None:
    response = http.get("/nodes")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "message": "Get nodes info successful.",
        "code": "0",
        "nodeIds": [
            {"nodeId": "scheduler--1", "rankId": "0", "role": "SCHEDULER", "alive": "true"},
            {"nodeId": "worker-0", "rankId": "0", "role": "WORKER", "alive": "true"},
            {"nodeId": "worker-1", "rankId": "1", "role": "WORKER", "alive": "false"},
        ],
    }


def test_nodes_reply_distinguishes_server_and_pserver(source: FakeScheduler, http: httpx2.Client) -> None:
    source.cluster = example_view(example_node(Role.SERVER, 0), example_node(Role.PSERVER, 0))
    assert [node["role"] for node in http.get("/nodes").json()["nodeIds"]] == ["SCHEDULER", "SERVER", "PSERVER"]


@pytest.mark.parametrize("phase", list(Phase))
def test_state_reply_has_mindspore_states(source: FakeScheduler, http: httpx2.Client, phase: Phase) -> None:
    source.cluster = example_view(phase=phase)
    assert http.get("/state").json() == {
        "message": "Get cluster state successful.",
        "code": "0",
        "cluster_state": MINDSPORE_STATES[phase],
    }


@needs(CURL)
def test_mindspore_curl_command_works(port: int) -> None:
    command = ["curl", "-i", "-s", "--noproxy", "*", "-X", "GET", f"http://127.0.0.1:{port}/nodes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    head, _, body = done.stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert [node["role"] for node in json.loads(body)["nodeIds"]] == ["SCHEDULER", "WORKER", "WORKER"]


# -- other operations ------------------------------------------------------------------------------------------------


def test_view_reply_is_complete(source: FakeScheduler, http: httpx2.Client) -> None:
    assert msgspec.json.decode(http.get("/view").content, type=ClusterView) == source.cluster


def test_replies_contain_a_thousand_nodes(source: FakeScheduler, http: httpx2.Client) -> None:
    source.cluster = example_view(*(example_node(Role.WORKER, rank) for rank in range(1000)))
    assert msgspec.json.decode(http.get("/view").content, type=ClusterView) == source.cluster
    nodes = http.get("/nodes").json()["nodeIds"]
    assert [node["rankId"] for node in nodes if node["role"] == "WORKER"] == [str(rank) for rank in range(1000)]
    assert 'covey_nodes{role="worker",state="alive"} 1000.0' in http.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", DEFAULT_STOP_REASON),
        (b"{}", DEFAULT_STOP_REASON),
        (b'{"reason": ""}', DEFAULT_STOP_REASON),
        (b'{"reason": "maintenance"}', "maintenance"),
        (b' {"reason": "one\\ntwo \\u001b[31m\\u0000"} ', "one two [31m"),
        ('{"reason": "Übung"}'.encode(), "Übung"),
        (json.dumps({"reason": "x" * REASON_MAX}).encode(), "x" * REASON_MAX),
    ],
)
def test_stop_passes_reason_to_cluster(source: FakeScheduler, http: httpx2.Client, body: bytes, reason: str) -> None:
    response = http.post("/stop", content=body)
    assert (response.status_code, response.json()["code"]) == (200, "0")
    assert source.stops == [reason]


def test_healthz_replies_ok(http: httpx2.Client) -> None:
    assert http.get("/healthz").json() == {"message": "ok", "code": "0"}


def test_head_has_headers_of_get_without_body(http: httpx2.Client) -> None:
    response = http.head("/nodes")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) == len(http.get("/nodes").content)


def test_metrics_are_valid_prometheus_text(source: FakeScheduler, http: httpx2.Client) -> None:
    source.cluster = example_view(
        *WORKERS, counters={"beats": 12.0, "refusals_total": 2.0, "odd-name": 1.0, "restarts_total": 77.0}
    )
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}
    assert samples["covey_generation",] == 3
    assert samples["covey_restarts_total",] == 4
    assert samples["covey_beats_total",] == 12
    assert samples["covey_refusals_total",] == 2
    assert samples["covey_odd_name_total",] == 1
    assert samples["covey_beat_age_seconds",] == 1.5  # the dead node is excluded
    assert samples["covey_nodes", ("role", "worker"), ("state", "alive")] == 1
    assert samples["covey_nodes", ("role", "worker"), ("state", "dead")] == 1
    assert samples["covey_nodes", ("role", "worker"), ("state", "left")] == 0
    assert {p: samples["covey_cluster_phase", ("phase", p)] for p in Phase} == {p: p is Phase.READY for p in Phase}
    strategy = ("strategy", "recover-in-place")
    assert samples["covey_recoveries_total", ("outcome", "resumed"), strategy] == 1
    assert samples["covey_recovery_stage_seconds_sum", ("stage", "re-formed"), strategy] == 0.06
    assert samples["covey_recovery_stage_seconds_count", ("stage", "re-formed"), strategy] == 1
    identity = next(family for family in families if family.name == "covey_info").samples[0]
    assert identity.value == 1
    assert set(identity.labels) == {"version", "cluster_id"}
    assert identity.labels["cluster_id"] == "c1"


def test_metrics_include_stragglers(source: FakeScheduler, http: httpx2.Client) -> None:
    assert "covey_straggler_ratio{" not in http.get("/metrics").text
    slow = msgspec.structs.replace(example_node(Role.WORKER, 3), straggles=2.5)
    source.cluster = example_view(*WORKERS, slow)
    assert 'covey_straggler_ratio{rank="3",role="worker"} 2.5' in http.get("/metrics").text


def test_recoveries_reply_has_stage_durations(http: httpx2.Client) -> None:
    [recovery] = http.get("/recoveries").json()["recoveries"]
    assert (recovery["node"], recovery["strategy"], recovery["outcome"]) == ("worker:1", "recover-in-place", "resumed")
    assert recovery["ms"] == {"detected": 0.0, "decided": 0.0, "re-formed": 60.0, "restored": 10.0, "resumed": 30.0}


def test_heartbeat_age_is_absent_without_nodes(source: FakeScheduler, http: httpx2.Client) -> None:
    source.cluster = example_view()
    assert "covey_beat_age_seconds" not in http.get("/metrics").text


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{", "not JSON: input data was truncated (byte 1)"),
        (b'{"reason": nope}', "not JSON: JSON is malformed: invalid character (byte 1"),
        (b'{"reason": "a"} b', "not JSON: JSON is malformed: trailing characters (byte 1"),
        (b'{"reason": "\xff"}', "not UTF-8 (byte 12)"),
        (b'{"reason": 5}', "expected `str`, got `int` - at `$.reason`"),
        (b'{"reasn": "a"}', "unknown field `reasn`"),
        (b"[]", "expected `object`, got `array`"),
        (b"null", "expected `object`, got `null`"),
        (json.dumps({"reason": "x" * (REASON_MAX + 1)}).encode(), "length <= 500 - at `$.reason`"),
        (b"[" * 100_000, "expected `object`, got `array`"),
    ],
)
def test_malformed_body_error_names_position_or_field(
    source: FakeScheduler, http: httpx2.Client, body: bytes, error: str
) -> None:
    response = http.post("/stop", content=body)
    assert response.status_code == 400
    assert error in error_message(response)
    assert source.stops == []


def test_usage_error_of_cluster_is_status_400(source: FakeScheduler, port: int) -> None:
    class Ended(FakeScheduler):
        def stop(self, reason: str) -> None:
            raise UsageError("the cluster has ended already")

    with serving(Ended(source.cluster)) as other, client(other) as http:
        response = http.post("/stop")
    assert response.status_code == 400
    assert error_message(response) == "the cluster has ended already"


def test_content_length_above_limit_is_refused_before_body(source: FakeScheduler, port: int) -> None:
    for method, path in (("POST", "/stop"), ("GET", "/nodes")):
        with dial(port) as sock:
            sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY_MAX + 1}\r\n\r\n".encode())
            answer = read_to_end(sock)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"1"' in answer
    assert source.stops == []


def test_chunked_body_above_limit_is_refused_while_sent(source: FakeScheduler, port: int) -> None:
    with dial(port) as sock:
        sock.sendall(b"POST /stop HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b" " * 65536
        for _ in range(BODY_MAX // len(piece)):
            sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        sock.sendall(b"1\r\n \r\n")  # one byte above the limit, without the end of the body
        answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert source.stops == []


def test_body_of_exactly_the_limit_is_accepted(source: FakeScheduler, http: httpx2.Client) -> None:
    body = b'{"reason": "big"}'
    assert http.post("/stop", content=body + b" " * (BODY_MAX - len(body))).status_code == 200
    assert source.stops == ["big"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/nodes", {"GET", "HEAD"}),
        ("DELETE", "/state", {"GET", "HEAD"}),
        ("GET", "/stop", {"POST"}),
        ("PUT", "/stop", {"POST"}),
        ("OPTIONS", "/view", {"GET", "HEAD"}),
    ],
)
def test_wrong_method_reply_has_allowed_methods(
    source: FakeScheduler, http: httpx2.Client, method: str, path: str, allow: set[str]
) -> None:
    response = http.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allow
    assert path in error_message(response)
    assert source.stops == []


@pytest.mark.parametrize("path", ["/console/", "/nodez", "/nodes/", "/../etc/passwd", "/%0d%0aX:1", "/" + "x" * 5000])
def test_unknown_path_reply_lists_paths(http: httpx2.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 404
    assert "/nodes, /state" in error_message(response)
    assert len(error_message(response)) < 400


def test_unexpected_exception_is_status_500_and_one_log_line(source: FakeScheduler, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeScheduler):
        def view(self) -> ClusterView:
            raise ZeroDivisionError("a secret text")

    with caplog.at_level(logging.INFO), serving(Broken(source.cluster)) as port, client(port) as http:
        response = http.get("/nodes")
        assert http.get("/healthz").status_code == 200
    assert response.status_code == 500
    assert "secret" not in error_message(response)
    errors = [record for record in caplog.records if record.levelno >= logging.WARNING]
    logged = [record.getMessage() for record in errors if "update of the console" not in record.getMessage()]
    assert logged == ["GET /nodes failed: ZeroDivisionError: a secret text"]
    assert all(record.exc_info is None for record in errors)


# -- authorization ---------------------------------------------------------------------------------------------------

PAGES = [
    ({"Origin": "https://evil.example"}, 401),
    ({"Origin": "null"}, 401),
    ({"Sec-Fetch-Site": "cross-site"}, 401),
    ({"Host": "evil.example"}, 403),
    ({"Host": "evil.example/healthz?"}, 403),  # a URL built from the headers would have the public path
    ({"X-Forwarded-For": "127.0.0.1"}, 401),
    ({"Authorization": "Bearer guess"}, 401),
]


@pytest.mark.parametrize("path", ["/nodes", "/view", "/metrics", "/openapi.json", "/nowhere"])
@pytest.mark.parametrize(("headers", "status"), PAGES)
def test_request_of_web_page_is_refused(http: httpx2.Client, headers: dict[str, str], status: int, path: str) -> None:
    response = http.get(path, headers=headers)
    assert response.status_code == status
    assert ("www-authenticate" in response.headers) is (status == 401)
    assert "Authorization: Bearer TOKEN" in error_message(response)


@pytest.mark.parametrize(("headers", "status"), PAGES)
def test_web_page_needs_token_to_stop_cluster(
    source: FakeScheduler, http: httpx2.Client, headers: dict[str, str], status: int
) -> None:
    assert http.post("/stop", headers=headers).status_code == status
    assert source.stops == []
    assert http.post("/stop", headers={**headers, "Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert source.stops == [DEFAULT_STOP_REASON]


@pytest.mark.parametrize(("headers", "status"), PAGES)
def test_healthz_needs_no_token(http: httpx2.Client, headers: dict[str, str], status: int) -> None:
    assert http.get("/healthz", headers=headers).status_code == 200


def test_missing_or_repeated_host_header_needs_token(port: int) -> None:
    for hosts in (b"", b"Host: localhost\r\nHost: localhost\r\n"):
        with dial(port) as sock:
            sock.sendall(b"GET /nodes HTTP/1.0\r\n" + hosts + b"\r\n")
            assert read_to_end(sock).startswith(b"HTTP/1.1 401 ")


# -- imports ---------------------------------------------------------------------------------------------------------


def test_import_of_management_does_not_import_web_libraries() -> None:
    code = "import sys, covey.management; print([m for m in ('uvicorn', 'starlette', 'prometheus_client') if m in sys.modules])"
    src = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(src)}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# -- resizes ---------------------------------------------------------------------------------------------------------


def test_scale_requests_have_mindspore_messages(http: httpx2.Client, source: FakeScheduler) -> None:
    for path, body, message in (
        ("/scaleout", {"worker_num": 2, "server_num": 0}, "Cluster begin to scale out."),
        ("/scalein", {"node_ids": ["worker:1", "3"]}, "Cluster begin to scale in."),
        ("/scaleoutRollback", {}, "Cluster scale out rollback success."),
    ):
        reply = http.post(path, json=body).json()
        assert (reply["message"], reply["code"], reply["operation"]) == (message, "0", str(len(source.scales)))
    assert source.scales == [
        ScaleRequest(more_workers=2),
        ScaleRequest(node_ids=["worker:1", "3"]),
        ScaleRequest(roll_back=True),
    ]


def test_gone_reports_host_instance(http: httpx2.Client, source: FakeScheduler) -> None:
    assert http.post("/gone", json={"life": "uid-1", "reason": "its\npod is over"}).json()["code"] == "0"
    assert source.gone == [("uid-1", "its pod is over")]
    assert http.post("/gone", json={"life": ""}).status_code == http.post("/gone", json={}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/scaleout", {"worker_num": 2}, "The json is not contain the key:server_num. "),
        ("/scaleout", {"worker_num": -1, "server_num": 0}, "The value should not be less than 0. "),
        ("/scaleout", {"worker_num": 0, "server_num": 257}, "the body of POST /scaleout is not"),
        ("/scalein", {"node_ids": []}, "The node ids should not be empty. "),
    ],
)
def test_invalid_scale_request_has_mindspore_message(
    http: httpx2.Client, source: FakeScheduler, path: str, body: dict[str, object], message: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400 and error_message(response).startswith(message)
    assert not source.scales


def test_operation_reply_by_number(http: httpx2.Client, source: FakeScheduler) -> None:
    growth = Incident(7, 1.0, "cluster", -1, "requested", "scale-out", "the world grows from 2 to 3 workers, as requested")
    source.cluster = msgspec.structs.replace(source.cluster, recoveries=[growth])
    assert http.get("/operations/7").json() == msgspec.to_builtins(growth)
    assert http.get("/operations/8").status_code == 404
    assert http.get("/state").json()["cluster_state"] == "CLUSTER_SCALE_OUT"


# -- console ---------------------------------------------------------------------------------------------------------


def test_console_page_is_public_and_has_security_headers(port: int) -> None:
    with client(port, **{"X-Forwarded-For": "192.0.2.7"}) as remote:
        page = remote.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        named = re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text)
        assert len(named) >= 3 and all(remote.get(path).status_code == 200 for path in named)
        assert [remote.get(path).status_code for path in ("/key", "/stream", "/story", "/settings")] == [401] * 4
        assert "style=" not in page.text and "<script>" not in page.text


@pytest.mark.parametrize("node", ["..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "worker%3A99", "%00"])
def test_log_of_unknown_node_or_path_is_not_found(http: httpx2.Client, node: str) -> None:
    response = http.get(f"/logs/{node}")
    assert response.status_code == 404 and error_message(response)


@pytest.mark.parametrize("query", ["start=x", "start=1e9", "find=" + "x" * 101, "start=" + "9" * 19])
def test_invalid_log_query_is_refused(http: httpx2.Client, query: str) -> None:
    assert http.get(f"/logs/worker:worker-0?{query}").status_code == 400


def test_kill_and_dump_reach_the_scheduler(source: FakeScheduler, http: httpx2.Client) -> None:
    assert http.post("/kill", json={"node": "worker:worker-0"}).json()["message"] == "accepted"
    assert http.post("/dump", json={"reason": "enough"}).status_code == 200
    assert source.requests == [KillRequest("worker:worker-0", "requested by 127.0.0.1"), StopRequest("enough", dump=True)]
    assert http.post("/kill", json={}).status_code == 400
