"""The management port, over real HTTP on loopback."""

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
from tests.http.serving import TOKEN, Shown, a_node, a_view, client, dial, read_to_end, serving
from tests.requirements import CURL, needs

from covey.core.cluster.view import MINDSPORE_STATES, ClusterView
from covey.core.incidents import Incident
from covey.core.messages import KillRequest, ScaleRequest, StopRequest
from covey.core.types import NodeState, Phase, Role
from covey.errors import UsageError
from covey.management.common_api import BODY_MAX
from covey.management.schemas import DEFAULT_STOP_REASON, REASON_MAX

WORKERS = (a_node(Role.WORKER, 0), a_node(Role.WORKER, 1, NodeState.DEAD, beat_age_s=99.0))


@pytest.fixture
def source() -> Shown:
    return Shown(a_view(*WORKERS))


@pytest.fixture
def port(source: Shown) -> Iterator[int]:
    with serving(source) as port:
        yield port


@pytest.fixture
def http(port: int) -> Iterator[httpx2.Client]:
    with client(port) as http:
        yield http


def sentence(response: httpx2.Response) -> str:
    """The error's sentence, from a body that has exactly the shape of an error."""
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert set(body) == {"error_message", "code"}
    assert body["code"] == "1"
    assert isinstance(body["error_message"], str)
    assert "\n" not in body["error_message"]
    return str(body["error_message"])


# -- the seeds' JSON -------------------------------------------------------------------------------------------------


def test_nodes_are_told_in_the_seeds_words(http: httpx2.Client) -> None:
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


def test_both_kinds_of_server_keep_their_names(source: Shown, http: httpx2.Client) -> None:
    source.cluster = a_view(a_node(Role.SERVER, 0), a_node(Role.PSERVER, 0))
    assert [node["role"] for node in http.get("/nodes").json()["nodeIds"]] == ["SCHEDULER", "SERVER", "PSERVER"]


@pytest.mark.parametrize("phase", list(Phase))
def test_state_is_told_in_the_seeds_words(source: Shown, http: httpx2.Client, phase: Phase) -> None:
    source.cluster = a_view(phase=phase)
    assert http.get("/state").json() == {
        "message": "Get cluster state successful.",
        "code": "0",
        "cluster_state": MINDSPORE_STATES[phase],
    }


@needs(CURL)
def test_the_seeds_curl_line_works_as_it_stands(port: int) -> None:
    command = ["curl", "-i", "-s", "--noproxy", "*", "-X", "GET", f"http://127.0.0.1:{port}/nodes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    head, _, body = done.stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert [node["role"] for node in json.loads(body)["nodeIds"]] == ["SCHEDULER", "WORKER", "WORKER"]


# -- ours ------------------------------------------------------------------------------------------------------------


def test_view_is_the_whole_view(source: Shown, http: httpx2.Client) -> None:
    assert msgspec.json.decode(http.get("/view").content, type=ClusterView) == source.cluster


def test_a_thousand_nodes_are_told_whole(source: Shown, http: httpx2.Client) -> None:
    source.cluster = a_view(*(a_node(Role.WORKER, rank) for rank in range(1000)))
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
def test_stop_hands_on_the_reason(source: Shown, http: httpx2.Client, body: bytes, reason: str) -> None:
    response = http.post("/stop", content=body)
    assert (response.status_code, response.json()["code"]) == (200, "0")
    assert source.stops == [reason]


def test_healthz_answers(http: httpx2.Client) -> None:
    assert http.get("/healthz").json() == {"message": "ok", "code": "0"}


def test_head_is_get_without_the_body(http: httpx2.Client) -> None:
    response = http.head("/nodes")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) == len(http.get("/nodes").content)


def test_metrics_are_what_prometheus_reads(source: Shown, http: httpx2.Client) -> None:
    source.cluster = a_view(*WORKERS, counters={"beats": 12.0, "refusals_total": 2.0, "odd-name": 1.0, "restarts_total": 77.0})
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
    assert samples["covey_beat_age_seconds",] == 1.5  # the dead node's silence does not count
    assert samples["covey_nodes", ("role", "worker"), ("state", "alive")] == 1
    assert samples["covey_nodes", ("role", "worker"), ("state", "dead")] == 1
    assert samples["covey_nodes", ("role", "worker"), ("state", "left")] == 0
    assert {p: samples["covey_cluster_phase", ("phase", p)] for p in Phase} == {p: p is Phase.READY for p in Phase}
    how = ("strategy", "recover-in-place")
    assert samples["covey_recoveries_total", ("outcome", "resumed"), how] == 1
    assert samples["covey_recovery_stage_seconds_sum", ("stage", "re-formed"), how] == 0.06
    assert samples["covey_recovery_stage_seconds_count", ("stage", "re-formed"), how] == 1
    identity = next(family for family in families if family.name == "covey_info").samples[0]
    assert identity.value == 1
    assert set(identity.labels) == {"version", "cluster_id"}
    assert identity.labels["cluster_id"] == "c1"


def test_stragglers_are_named(source: Shown, http: httpx2.Client) -> None:
    assert "covey_straggler_ratio{" not in http.get("/metrics").text
    slow = msgspec.structs.replace(a_node(Role.WORKER, 3), straggles=2.5)
    source.cluster = a_view(*WORKERS, slow)
    assert 'covey_straggler_ratio{rank="3",role="worker"} 2.5' in http.get("/metrics").text


def test_recoveries_tell_the_waterfall(http: httpx2.Client) -> None:
    [told] = http.get("/recoveries").json()["recoveries"]
    assert (told["node"], told["strategy"], told["outcome"]) == ("worker:1", "recover-in-place", "resumed")
    assert told["ms"] == {"detected": 0.0, "decided": 0.0, "re-formed": 60.0, "restored": 10.0, "resumed": 30.0}


def test_nobody_beats_and_no_age_is_told(source: Shown, http: httpx2.Client) -> None:
    source.cluster = a_view()
    assert "covey_beat_age_seconds" not in http.get("/metrics").text


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
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
def test_a_bad_body_is_told_where_it_breaks(source: Shown, http: httpx2.Client, body: bytes, says: str) -> None:
    response = http.post("/stop", content=body)
    assert response.status_code == 400
    assert says in sentence(response)
    assert source.stops == []


def test_what_the_cluster_refuses_is_a_bad_request(source: Shown, port: int) -> None:
    class Ended(Shown):
        def stop(self, reason: str) -> None:
            raise UsageError("the cluster has ended already")

    with serving(Ended(source.cluster)) as other, client(other) as http:
        response = http.post("/stop")
    assert response.status_code == 400
    assert sentence(response) == "the cluster has ended already"


def test_a_long_body_is_refused_before_it_is_sent(source: Shown, port: int) -> None:
    for method, path in (("POST", "/stop"), ("GET", "/nodes")):
        with dial(port) as sock:
            sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY_MAX + 1}\r\n\r\n".encode())
            answer = read_to_end(sock)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"1"' in answer
    assert source.stops == []


def test_a_long_body_that_announces_nothing_is_refused_on_the_way(source: Shown, port: int) -> None:
    with dial(port) as sock:
        sock.sendall(b"POST /stop HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b" " * 65536
        for _ in range(BODY_MAX // len(piece)):
            sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        sock.sendall(b"1\r\n \r\n")  # one byte too many, and no end of the body
        answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert source.stops == []


def test_a_body_of_exactly_the_limit_is_read(source: Shown, http: httpx2.Client) -> None:
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
def test_a_wrong_method_is_told_the_right_one(
    source: Shown, http: httpx2.Client, method: str, path: str, allow: set[str]
) -> None:
    response = http.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allow
    assert path in sentence(response)
    assert source.stops == []


@pytest.mark.parametrize("path", ["/console/", "/nodez", "/nodes/", "/../etc/passwd", "/%0d%0aX:1", "/" + "x" * 5000])
def test_an_unknown_path_is_told_the_known_ones(http: httpx2.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 404
    assert "/nodes, /state" in sentence(response)
    assert len(sentence(response)) < 400


def test_a_bug_is_a_500_and_one_line_in_the_log(source: Shown, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Shown):
        def view(self) -> ClusterView:
            raise ZeroDivisionError("the secret of the house")

    with caplog.at_level(logging.INFO), serving(Broken(source.cluster)) as port, client(port) as http:
        response = http.get("/nodes")
        assert http.get("/healthz").status_code == 200
    assert response.status_code == 500
    assert "secret" not in sentence(response)
    errors = [record for record in caplog.records if record.levelno >= logging.WARNING]
    told = [record.getMessage() for record in errors if "could not look" not in record.getMessage()]
    assert told == ["GET /nodes failed: ZeroDivisionError: the secret of the house"]
    assert all(record.exc_info is None for record in errors)


# -- who may speak ---------------------------------------------------------------------------------------------------

PAGES = [
    ({"Origin": "https://evil.example"}, 401),
    ({"Origin": "null"}, 401),
    ({"Sec-Fetch-Site": "cross-site"}, 401),
    ({"Host": "evil.example"}, 403),
    ({"Host": "evil.example/healthz?"}, 403),  # would read as the open path in an URL made of the headers
    ({"X-Forwarded-For": "127.0.0.1"}, 401),
    ({"Authorization": "Bearer guess"}, 401),
]


@pytest.mark.parametrize("path", ["/nodes", "/view", "/metrics", "/openapi.json", "/nowhere"])
@pytest.mark.parametrize(("headers", "status"), PAGES)
def test_a_web_page_is_refused(http: httpx2.Client, headers: dict[str, str], status: int, path: str) -> None:
    response = http.get(path, headers=headers)
    assert response.status_code == status
    assert ("www-authenticate" in response.headers) is (status == 401)
    assert "Authorization: Bearer TOKEN" in sentence(response)


@pytest.mark.parametrize(("headers", "status"), PAGES)
def test_a_web_page_cannot_stop_the_cluster_without_the_token(
    source: Shown, http: httpx2.Client, headers: dict[str, str], status: int
) -> None:
    assert http.post("/stop", headers=headers).status_code == status
    assert source.stops == []
    assert http.post("/stop", headers={**headers, "Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert source.stops == [DEFAULT_STOP_REASON]


@pytest.mark.parametrize(("headers", "status"), PAGES)
def test_healthz_is_open_to_all(http: httpx2.Client, headers: dict[str, str], status: int) -> None:
    assert http.get("/healthz", headers=headers).status_code == 200


def test_two_hosts_or_none_are_nobodys_loopback(port: int) -> None:
    for hosts in (b"", b"Host: localhost\r\nHost: localhost\r\n"):
        with dial(port) as sock:
            sock.sendall(b"GET /nodes HTTP/1.0\r\n" + hosts + b"\r\n")
            assert read_to_end(sock).startswith(b"HTTP/1.1 401 ")


# -- the seams -------------------------------------------------------------------------------------------------------


def test_importing_the_console_costs_nothing() -> None:
    code = "import sys, covey.management; print([m for m in ('uvicorn', 'starlette', 'prometheus_client') if m in sys.modules])"
    src = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(src)}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# -- another size ----------------------------------------------------------------------------------------------------


def test_another_size_is_asked_for_in_the_seeds_words(http: httpx2.Client, source: Shown) -> None:
    for path, body, said in (
        ("/scaleout", {"worker_num": 2, "server_num": 0}, "Cluster begin to scale out."),
        ("/scalein", {"node_ids": ["worker:1", "3"]}, "Cluster begin to scale in."),
        ("/scaleoutRollback", {}, "Cluster scale out rollback success."),
    ):
        answer = http.post(path, json=body).json()
        assert (answer["message"], answer["code"], answer["operation"]) == (said, "0", str(len(source.scales)))
    assert source.scales == [
        ScaleRequest(more_workers=2),
        ScaleRequest(node_ids=["worker:1", "3"]),
        ScaleRequest(roll_back=True),
    ]


def test_a_host_is_said_to_be_gone(http: httpx2.Client, source: Shown) -> None:
    assert http.post("/gone", json={"life": "uid-1", "reason": "its\npod is over"}).json()["code"] == "0"
    assert source.gone == [("uid-1", "its pod is over")]
    assert http.post("/gone", json={"life": ""}).status_code == http.post("/gone", json={}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/scaleout", {"worker_num": 2}, "The json is not contain the key:server_num. "),
        ("/scaleout", {"worker_num": -1, "server_num": 0}, "The value should not be less than 0. "),
        ("/scaleout", {"worker_num": 0, "server_num": 257}, "the body of POST /scaleout is not"),
        ("/scalein", {"node_ids": []}, "The node ids should not be empty. "),
    ],
)
def test_a_size_that_cannot_be_is_refused_in_the_seeds_words(
    http: httpx2.Client, source: Shown, path: str, body: dict[str, object], said: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400 and sentence(response).startswith(said)
    assert not source.scales


def test_an_operation_is_known_by_its_number(http: httpx2.Client, source: Shown) -> None:
    growth = Incident(7, 1.0, "cluster", -1, "requested", "scale-out", "the world grows from 2 to 3 workers, as requested")
    source.cluster = msgspec.structs.replace(source.cluster, recoveries=[growth])
    assert http.get("/operations/7").json() == msgspec.to_builtins(growth)
    assert http.get("/operations/8").status_code == 404
    assert http.get("/state").json()["cluster_state"] == "CLUSTER_SCALE_OUT"


# -- the console -----------------------------------------------------------------------------------------------------


def test_the_page_is_open_to_all_and_keeps_others_out(port: int) -> None:
    with client(port, **{"X-Forwarded-For": "192.0.2.7"}) as stranger:
        page = stranger.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        named = re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text)
        assert len(named) >= 3 and all(stranger.get(path).status_code == 200 for path in named)
        assert [stranger.get(path).status_code for path in ("/key", "/stream", "/story", "/settings")] == [401] * 4
        assert "style=" not in page.text and "<script>" not in page.text


@pytest.mark.parametrize("node", ["..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "worker%3A99", "%00"])
def test_a_log_is_asked_for_by_node_and_never_by_path(http: httpx2.Client, node: str) -> None:
    response = http.get(f"/logs/{node}")
    assert response.status_code == 404 and sentence(response)


@pytest.mark.parametrize("query", ["start=x", "start=1e9", "find=" + "x" * 101, "start=" + "9" * 19])
def test_a_question_about_a_log_that_makes_no_sense(http: httpx2.Client, query: str) -> None:
    assert http.get(f"/logs/worker:worker-0?{query}").status_code == 400


def test_actions_of_the_console_reach_the_scheduler(source: Shown, http: httpx2.Client) -> None:
    assert http.post("/kill", json={"node": "worker:worker-0"}).json()["message"] == "as asked"
    assert http.post("/dump", json={"reason": "enough"}).status_code == 200
    assert source.wishes == [KillRequest("worker:worker-0", "asked by 127.0.0.1"), StopRequest("enough", dump=True)]
    assert http.post("/kill", json={}).status_code == 400
