"""Federated clusters of real processes: rounds, refusals, kill -9, scaling, MindSpore's example."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest
from tests.processes.command import Shell
from tests.processes.federation import SIZE, DeviceGroup, Federation, expected, update
from tests.processes.harness import free_port, free_ports, until

from covey.federated import Device
from covey.federated.device.client import RequestRefused, Task
from covey.federated.model_codec import ModelLayout
from covey.federated.server.accumulator import Accumulator
from covey.transport import tls

ROOT = Path(__file__).parents[2]


def test_rounds_run_to_the_end_and_cluster_stops(shell: Shell) -> None:
    judge = "FedAvg(), lambda model: {'loss': float(abs(model['w']).sum())}"
    config = shell.script('{"recovery": {"storage_type": 1, "storage_file_path": "kept/"}}', "config.json")
    federation = Federation(shell, 2, 3, strategy=judge, fl_iteration_num=5, config_file_path=config)
    crowd = DeviceGroup(federation)
    crowd.until_over()
    assert crowd.rounds == {1, 2, 3, 4, 5}
    iteration, weights = federation.device("x").model()
    assert iteration == 5
    assert np.array_equal(weights["w"].reshape(-1), expected(5, 3))
    instance = federation.instance()
    assert instance["instanceStatus"] == "kFinish" and instance["metrics"]["updates"] == 3
    losses = {number: float(abs(expected(number, 3)).sum()) for number in range(1, 6)}
    assert instance["metrics"]["central_loss"] == pytest.approx(losses[5], rel=1e-4)
    best = min(losses, key=lambda number: losses[number])
    assert instance["bestIteration"] == best and instance["currentIteration"] == 5
    for number, is_kept in {best: True, 4: True, 1: best == 1}.items():
        iteration, weights = federation.device("x").model(number)
        assert iteration == (number if is_kept else 5), "expected a stored model, or the newest"
        assert np.array_equal(weights["w"].reshape(-1), expected(iteration, 3))
    about = on_the_page(federation)
    assert [done["round"] for done in about["rounds"]] == [1, 2, 3, 4, 5] and about["updates"] == 15
    assert about["rounds"][-1]["loss"] == pytest.approx(losses[5], rel=1e-4)
    assert set(about["load"]) == {"0", "1"} and about["instance"]["instanceStatus"] == "kFinish"
    status = shell.run_command("federated", "status")
    assert status.code == 0 and "iteration 5 of 5, kFinish" in " ".join(status.text().split())
    models = sorted(path.name for path in (shell.folder / "kept").glob("*/server_0/models/*.safetensors"))
    stored = {int(name.rsplit("_", 1)[1].removesuffix(".safetensors")) for name in models}
    assert stored == {3, 4, 5, best}, "expected the newest three and the best"
    assert shell.run_command("federated", "stop").code == 0
    assert federation.up.wait() == 0
    shell.assert_no_processes()
    again = Federation(shell, 2, 3, strategy=judge, fl_iteration_num=5, config_file_path=config)
    assert again.instance()["instanceStatus"] == "kFinish", "a recovered cluster must continue where it was"
    iteration, weights = again.device("x").model()
    assert iteration == 5 and np.array_equal(weights["w"].reshape(-1), expected(5, 3))


def on_the_page(federation: Federation) -> dict[str, Any]:
    """Return what the console shows of the rounds."""
    with httpx2.stream("GET", f"http://127.0.0.1:{federation.manage}/stream") as stream:
        data = next(line for line in stream.iter_lines() if line.startswith("data: "))
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))["about"]
    return found


@pytest.mark.parametrize("durability", ["process", "disk", "host"])
def test_sum_is_exact_after_kill_of_any_process(shell: Shell, durability: str) -> None:
    federation = Federation(shell, 3, 4, fl_iteration_num=100_000, durability=durability, update_model_time_window=500)
    crowd = DeviceGroup(federation)
    draw = random.Random(durability)
    for kill in range(4 if durability == "process" else 2):
        crowd.until_round(max(crowd.rounds, default=0) + 3)
        role = "MS_SCHED" if kill == 1 else "MS_SERVER"
        draw.choice(federation.some(role)).kill()
    crowd.until_round(max(crowd.rounds) + 5)
    crowd.end()
    federation.up.signal(signal.SIGTERM)
    assert federation.up.wait() == 0


def test_buffered_updates_are_weighted_by_age_and_counted_once(shell: Shell) -> None:
    federation = Federation(shell, 2, 1, strategy="FedBuff(2)")
    slow, fast = federation.device(0, 1), federation.device("x" * 193, 2)  # the longest valid id
    late, early = slow.join(), fast.join()
    assert late is not None and early is not None
    assert early.send(update(1, 1))
    iteration, first = fast.model(1)
    assert iteration == 1
    assert late.send(update(0, 1)), "an update of the previous iteration must be counted too"
    iteration, second = slow.model(2)
    wanted = Accumulator(SIZE)
    wanted.add(update(0, 1) * np.float32(2**-0.5), 1)
    model = first["w"].reshape(-1)
    assert np.array_equal(second["w"].reshape(-1), (model + wanted.mean()).astype(np.float32))
    assert late.send(update(0, 1)), "a repeated update must be acknowledged"
    assert federation.instance()["counted"] == 0 and federation.instance()["currentIteration"] == 3


def test_device_evaluations_are_weighted_by_samples(shell: Shell) -> None:
    federation = Federation(shell, 2, 2, fl_iteration_num=2, eval_every=2, download_compress_type="QUANT")
    devices = [federation.device(0, 1), federation.device(1, 2)]
    query = []
    for _ in range(2):
        tasks = [device.join() for device in devices]
        for number, task in enumerate(tasks):
            assert task is not None
            query.append(task.plan.evaluate)
            if task.plan.evaluate:
                task.evaluated(100 * (number + 1), loss=1.0 + number, accuracy=0.5 * number)
            assert task.send(update(number, task.iteration))
        iteration, weights = devices[0].model(len(query) // 2)
        layout = ModelLayout({"w": (SIZE // 10, 10)})
        given = layout.dequantize(layout.quantize(expected(iteration, 2)))
        assert np.array_equal(weights["w"].reshape(-1), given), "expected the exact model in 8 bits"
    assert query == [False, False, True, True]
    until(lambda: federation.instance()["instanceStatus"] == "kFinish", "the last iteration", details=federation.tails)
    metrics = federation.instance()["metrics"]
    assert metrics["eval_samples"] == 300
    assert metrics["eval_loss"] == pytest.approx((100 * 1.0 + 200 * 2.0) / 300)
    assert metrics["eval_accuracy"] == pytest.approx((200 * 0.5) / 300)
    scraped = httpx2.get(f"http://127.0.0.1:{federation.manage}/metrics").text
    assert "covey_model_eval_samples 300.0" in scraped and "covey_federated_iteration 3.0" in scraped


def test_devices_train_over_tls(shell: Shell) -> None:
    folder = shell.folder / "tls"
    assert shell.run_command("tls", "init", str(folder), "--password", "pw").code == 0
    config = folder / "config.json"
    federation = Federation(
        shell, 2, 1, enable_ssl=True, config_file_path=config, server_password="pw", client_password="pw", fl_iteration_num=2
    )
    contexts = tls.build_contexts(tls.read_config(config), server_password="pw", client_password="pw", now=datetime.now(UTC))
    urls = [url.replace("http:", "https:") for url in federation.urls()]
    with Device(urls, "device-0", data_size=1, context=contexts.client) as device:
        assert [task.send(update(0, task.iteration)) for task in device.rounds()] == [True, True]
        assert np.array_equal(device.model()[1]["w"].reshape(-1), expected(2, 1))


def test_copies_survive_host_loss_and_count_once_after_its_return(shell: Shell) -> None:
    """The dead server's log is not readable: its copies are counted, and its log is not counted again when it returns."""
    federation = Federation(shell, 3, 3, apart=True, durability="host", update_model_time_window=60_000)
    tasks = [federation.device(n, n + 1).join() for n in range(3)]
    assert tasks[0] is not None and tasks[1] is not None and tasks[2] is not None
    keeper = federation.others[1]
    device = tasks[0]._device
    device._servers, device._server_index = [("http", "127.0.0.1", federation.port + 2, "")], 0
    device.close()
    assert tasks[0].send(update(0, 1))
    keeper.kill()
    log = next((shell.folder / "state").glob("federated_*/logs/scheduler.log"))
    until(lambda: "adopted its log" in log.read_text(), "its copies to be taken over", details=federation.tails)
    federation.join(1, federation.port + 2, "host-2").wait_for("Server started successfully.")
    assert tasks[1].send(update(1, 1)) and tasks[2].send(update(2, 1))
    iteration, weights = federation.device("x", servers=2).model(1)
    assert iteration == 1 and np.array_equal(weights["w"].reshape(-1), expected(1, 3))


def wrong_updates(task: Task, federation: Federation) -> dict[str, tuple[int, str]]:
    """All kinds of invalid requests, with the code and text of the reply."""
    layout = task._layout
    values = update(0, 1)
    fields = {"fl_id": "device-0", "iteration": "1", "ticket": task.ticket, "data_size": "1", "fl_name": ""}
    fields["timestamp"] = str(int(1000 * time.time()))
    bad = values.copy()
    bad[7] = np.nan
    other = ModelLayout({"w": (SIZE // 10, 9)})
    shapeless = layout.encode(values, fields).replace(b'"shape":[300,10]', b'"shape":123456  ')
    bodies = {
        "empty": b"",
        "shapeless": shapeless,
        "stale": layout.encode(values, {**fields, "timestamp": "1000"}),
        "ticket": layout.encode(values, {**fields, "data_size": "2"}),
        "shape": other.encode(np.zeros(other.size, np.float32), fields),
        "nan": layout.encode(bad, fields),
        "large": layout.encode(values * np.float32(1e9), fields),
        "cut": layout.encode(values, fields)[:-4],
        "future": layout.encode(values, {**fields, "iteration": "9"}),
        "no id": layout.encode(values, {k: v for k, v in fields.items() if k != "fl_id"}),
        "oversized": layout.encode(values, fields) + bytes(40_000_000),
    }
    found: dict[str, tuple[int, str]] = {}
    for name, body in bodies.items():
        answer: Any = httpx2.post(f"{federation.urls()[0]}/updateModel", content=body).json()
        found[name] = (answer["retcode"], answer["reason"])
    return found


def test_invalid_updates_are_refused_with_reason_and_not_counted(shell: Shell) -> None:
    federation = Federation(shell, 2, 2, update_model_time_window=60_000)
    first, second = federation.device(0, 1), federation.device(1, 2)
    tasks = [device.join() for device in (first, second)]
    assert tasks[0] is not None and tasks[1] is not None
    found = wrong_updates(tasks[0], federation)
    words = {
        "empty": (400, "shorter than a header"),
        "shapeless": (400, "w has an invalid safetensors header"),
        "stale": (300, "timestamp"),
        "ticket": (300, "ticket"),
        "shape": (400, "expected F32"),
        "nan": (400, "not finite"),
        "large": (400, "expected less than"),
        "cut": (400, "bytes"),
        "future": (300, "ticket"),
        "no id": (400, "fl_id"),
        "oversized": (400, "is the limit"),
    }
    for name, (code, word) in words.items():
        assert found[name][0] == code and word in found[name][1], f"{name}: {found[name]}"
    assert federation.instance()["counted"] == 0
    assert httpx2.get(f"{federation.urls()[0]}/openapi.json").json()["openapi"].startswith("3.")
    assert tasks[0].send(update(0, 1)) and tasks[0].send(update(0, 1)), "a repeated update must be acknowledged"
    assert tasks[1].send(update(1, 1))
    iteration, weights = first.model(1)
    assert iteration == 1
    assert np.array_equal(weights["w"].reshape(-1), expected(1, 2))
    assert not tasks[0].send(update(0, 1)) or federation.instance()["currentIteration"] == 2
    with pytest.raises(RequestRefused, match="not finite"):
        task = first.join()
        assert task is not None
        task.send(np.full(SIZE, np.inf, np.float32))


def test_servers_join_and_leave_during_rounds(shell: Shell) -> None:
    federation = Federation(shell, 2, 4, fl_iteration_num=100_000)
    crowd = DeviceGroup(federation, servers=4)
    crowd.until_round(3)
    assert federation.request("/scaleout", {"worker_num": 0, "server_num": 2})["code"] == "0"
    assert federation.state() == "CLUSTER_SCALE_OUT"
    joining = federation.join(2, federation.port + 2)
    federation.until_ready()
    crowd.until_round(max(crowd.rounds) + 3)
    assert federation.request("/scalein", {"node_ids": ["0", "2"]})["code"] == "0"
    federation.until_ready()
    nodes = federation.request("/nodes", get=True)["nodeIds"]
    ranks = {node["nodeId"]: node["rankId"] for node in nodes if node["role"] == "SERVER"}
    assert ranks == {"0": "-1", "1": "1", "2": "-1", "3": "3"}
    crowd.until_round(max(crowd.rounds) + 3)
    assert len(federation.processes("MS_SERVER")) == 4, "a server that was scaled in must keep its process"
    assert federation.request("/scaleout", {"worker_num": 0, "server_num": 1})["code"] == "0"
    assert federation.request("/scaleoutRollback")["message"] == "Cluster scale out rollback success."
    crowd.until_round(max(crowd.rounds) + 3)
    crowd.end()
    assert shell.run_command("federated", "stop").code == 0
    assert federation.up.wait() == 0
    joining.signal(signal.SIGTERM)
    assert joining.wait() == 0


@pytest.mark.long
def test_sums_are_exact_with_deaths_during_scaling(shell: Shell) -> None:
    """The scheduler dies during scale-out; it and the departing server die during scale-in."""
    federation = Federation(shell, 3, 4, fl_iteration_num=100_000)
    crowd = DeviceGroup(federation, servers=4)
    crowd.until_round(2)
    assert federation.request("/scaleout", {"worker_num": 0, "server_num": 1})["code"] == "0"
    federation.some("MS_SCHED")[0].kill()
    joining = federation.join(1, federation.port + 3)
    federation.until_ready("0", "1", "2", "3")
    crowd.until_round(max(crowd.rounds) + 3)
    leaving = federation.server(MS_NODE_ID="1")
    assert federation.request("/scalein", {"node_ids": ["1"]})["code"] == "0"
    leaving.kill()
    federation.some("MS_SCHED")[0].kill()
    federation.until_ready("0", "2", "3")
    crowd.until_round(max(crowd.rounds) + 3)
    crowd.end()
    assert shell.run_command("federated", "stop").code == 0
    assert federation.up.wait() == 0
    joining.signal(signal.SIGTERM)
    assert joining.wait() == 0


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/scaleout", {"server_num": 1}, "The json is not contain the key:worker_num"),
        ("/scaleout", {"worker_num": 0, "server_num": -1}, "The value should not be less than 0."),
        ("/scaleout", {"worker_num": 0, "server_num": 128}, "at most 128"),
        ("/scaleout", {"worker_num": 1, "server_num": 1}, "The Worker does not currently support scale out."),
        ("/scalein", {"node_ids": []}, "The node ids should not be empty."),
        ("/scalein", {"node_ids": ["9"]}, "The node id:9 is illegal."),
        ("/newInstance", {"fl_iteration_num": 0}, "fl_iteration_num must be"),
        ("/newInstance", {"colour": 1}, "colour"),
    ],
)
def test_management_requests_with_errors_are_refused(managed: Federation, path: str, body: Any, sentence: str) -> None:
    answer = managed.request(path, body)
    assert answer["code"] == "1" and sentence in answer["error_message"]


MANY = """
import numpy as np
import covey.federated

class Fails(covey.federated.Strategy):
    def for_devices(self, iteration):
        return {"rate": 1.0 if iteration == 1 else object()}

covey.federated.run({f"a_layer_with_a_long_name.{n}": np.zeros((), np.float32) for n in range(3000)}, Fails())
"""


def test_many_tensors_fit_and_failing_strategy_is_reported(shell: Shell) -> None:
    federation = Federation(shell, 1, 1, script=MANY)
    device = federation.device(0)
    task = device.join()
    assert task is not None and task.plan.settings == {"rate": 1.0} and task.send(np.ones(3000)), (
        "tensor names of 300 kB must fit"
    )
    assert device.model(1)[0] == 1
    query = {"fl_id": "device-0", "timestamp": int(1000 * time.time()), "data_size": 1, "wait": 60_000}
    answer = httpx2.post(f"{federation.urls()[0]}/startFLJob", json=query, timeout=120).json()
    assert answer["retcode"] == 500 and "see its log" in answer["reason"], "a device must get an error and not wait"


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Shell(tmp_path_factory.mktemp("managed")) as shell:
        yield Federation(shell, 1, 2)


def test_disabled_rounds_pause_devices_and_serve_the_model(managed: Federation) -> None:
    assert managed.request("/disableFLS")["result"]["instanceStatus"] == "kDisable"
    answer = httpx2.post(
        f"{managed.urls()[0]}/startFLJob", json={"fl_id": "a", "timestamp": int(1000 * time.time()), "data_size": 1}
    ).json()
    assert answer["retcode"] == 300 and answer["reason"] == "The server's training job is disabled or finished."
    assert answer["instance"] == "kDisable", "the field that programs use"
    assert managed.device("a").model()[0] == 0
    assert managed.request("/enableFLS")["result"]["instanceStatus"] == "kRunning"
    assert managed.request("/newInstance", {"start_fl_job_threshold": 1})["result"]["start_fl_job_threshold"] == 1


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--servers", "0"], 10, "expected 1 or more"),
        (["--servers", "3", "--server-num", "2"], 10, "exceeds the number of servers in the cluster"),
        (["--port", "65535", "--servers", "2"], 10, "not 65536"),
        (["--set", "enable_ssl=maybe"], 10, "True or False"),
        (["--set", "colour=red"], 10, "no key colour"),
        (["--dir", "/proc/nowhere"], 41, "choose another --dir"),
        ([], 13, "does not call covey.federated.run"),
        (["error"], 13, "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_federated_up_with_invalid_options_is_refused(shell: Shell, words: list[str], code: int, sentence: str) -> None:
    script = shell.script("1 / 0" if words == ["error"] else "print('nothing')", "model.py")
    words = [word for word in words if word != "error"]
    more = ["--scheduler-port", str(free_port()), "--manage-port", "0"]
    found = shell.run_command("federated", "up", *more, "--dir", shell.folder, *words, script)
    assert found.code == code and sentence in " ".join(found.text().split()), found.text()


def test_plot_that_cannot_be_written_is_a_one_line_error(shell: Shell) -> None:
    found = shell.run_command("federated", "simulate", "--devices", "5", "--rounds", "1", "--plot", "/nowhere/x.svg")
    assert "accuracy" in found.text() and "choose another --plot" in found.text() and "Traceback" not in found.text()


def test_mindspore_example_runs(shell: Shell) -> None:
    """Start, kill server 0, restart it with MindSpore's command, restart everything, finish."""
    folder = shell.folder / "mobile"
    shutil.copytree(ROOT / "examples/mobile", folder)
    (folder / "config.json").write_text('{"recovery": {"storage_type": 1, "storge_file_path": "config.json"}}')
    port, manage = free_port(), free_port()
    first = free_ports(2)
    where = ["--scheduler_ip=127.0.0.1", f"--scheduler_port={port}", "--server_num=2"]
    where.append(f"--config_file_path={folder}/config.json")
    sched = ["python", "run_mobile_sched.py", *where, f"--fl_server_port={first}", f"--scheduler_manage_port={manage}"]
    servers = ["python", "run_mobile_server.py", *where, f"--fl_server_port={first}", "--start_fl_job_threshold=2"]

    def nodes() -> dict[str, dict[str, Any]]:
        found = httpx2.get(f"http://127.0.0.1:{manage}/view").json()["nodes"]
        return {node["node_id"]: node for node in found if node["role"] == "server"}

    assert shell.run(sched, cwd=folder).code == 0
    assert "unrecognized" in shell.run([*servers, "--colour", "red"], cwd=folder).text()
    assert "SIGNDS is not supported yet" in shell.run([*servers, "--encrypt_type", "SIGNDS"], cwd=folder).text()
    assert "Server started successfully." in shell.run(servers, cwd=folder).text()
    before = nodes()
    assert sorted(before) == ["0", "1"]
    psutil.Process(before["0"]["pid"]).kill()
    until(lambda: not nodes()["0"]["alive"], "server 0 to be seen dead")
    again = shell.run([*servers, "--local_server_num=1"], cwd=folder)
    assert "Server started successfully." in again.text()
    after = nodes()
    assert after["0"]["alive"] and (after["0"]["rank"], after["1"]["rank"]) == (before["0"]["rank"], before["1"]["rank"])
    finish = shell.run(["python", "finish_mobile.py", f"--scheduler_port={port}"], cwd=folder)
    assert finish.text().count("killed") == 3
    shell.assert_no_processes()
