"""The pieces of a federated server: sums, logs, models, strategies, and the simulation built of them."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.federated.messages import ReplicateUpdate, RoundPlan, RoundTotals, should_evaluate
from covey.core.federated.update_claims import Claims
from covey.errors import ExitCode, PeerError, StoreError, UsageError
from covey.federated import Device, Task, fit, strategies, update_compression
from covey.federated.device_protocol import Answer, FlPlan
from covey.federated.model_codec import Floats, ModelLayout, QuantizedModel, layout_and_values
from covey.federated.process_supervisor import ProcessSupervisor, SupervisedProcess
from covey.federated.server import aggregation, openapi
from covey.federated.server.accumulator import Accumulator, to_weighted_fixed_point
from covey.federated.server.aggregation import _reserve_disk_space, compute_metrics
from covey.federated.server.model_store import ModelNotStored, ModelStore, unpack_state
from covey.federated.server.round_storage import RoundStorage
from covey.federated.server.secagg_endpoints import SECAGG_REQUEST_TYPES
from covey.federated.server.update_log import LogDirectory, Update, UpdateLog, pack_record, read_log
from covey.federated.server.update_replication import ReplicaLogs, replica_directory
from covey.federated.simulation.simulator import CLASSES, load_digits, partition_samples, simulate


def values(seed: int, size: int = 40_000) -> Floats:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def metrics_of(number: int) -> RoundTotals:
    return RoundTotals(loss=5, accuracy=6, told=number, eval_size=7, eval_loss=8, eval_accuracy=9, judged=10, eval_judged=11)


# -- sums --------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 2**20)), min_size=1, max_size=8), st.integers(1, 4), st.randoms())
def test_sum_does_not_depend_on_order_or_number_of_servers(updates: list[tuple[int, int]], servers: int, draw: object) -> None:
    exact = sum(np.rint(values(seed, 200).astype(np.float64) * weight * 2**24).astype(np.int64) for seed, weight in updates)
    parts = [Accumulator(200) for _ in range(servers)]
    shuffled = list(updates)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    for index, (seed, weight) in enumerate(shuffled):
        parts[index % servers].add(
            values(seed, 200), weight, RoundTotals(loss=to_weighted_fixed_point(weight, 0.5)[1], told=weight)
        )
    total = Accumulator(200)
    for part in parts:
        total.merge(part.get_sum(), part.totals)
    assert np.array_equal(total.get_sum(), exact)
    assert total.totals.size == sum(weight for _, weight in updates)
    assert total.totals.loss == total.totals.size * 2**23


def test_metrics_are_weighted_by_reporting_samples() -> None:
    assert to_weighted_fixed_point(4, 0.5) == (4, 2 * 2**24) and to_weighted_fixed_point(4, None) == (0, 0)
    assert to_weighted_fixed_point(4, float("nan")) == (0, 0), "a loss that is not finite must not be counted as 0"
    with pytest.raises(ValueError, match="too large"):
        to_weighted_fixed_point(4, 1e30)
    one = RoundTotals(2, 4, loss=2**24, told=4, accuracy=2**23, judged=1)
    assert compute_metrics(one) == {"updates": 2.0, "samples": 4.0, "loss": 0.25, "accuracy": 0.5}, (
        "the mean is over devices that reported it"
    )
    assert "accuracy" not in compute_metrics(RoundTotals(1, 4, loss=1, told=4, eval_size=4)), (
        "an accuracy that was not reported is not 0"
    )
    assert "eval_accuracy" not in compute_metrics(RoundTotals(1, 4, loss=1, told=4, eval_size=4))


def test_share_of_devices_evaluates_in_every_nth_iteration() -> None:
    plan = RoundPlan(eval_every=3, eval_share=0.25)
    evaluating = {n: sum(should_evaluate(plan, "c", n, f"d{device}") for device in range(4000)) for n in range(1, 7)}
    assert [n for n, count in evaluating.items() if count] == [3, 6]
    assert all(900 < evaluating[n] < 1100 for n in (3, 6))
    assert not should_evaluate(RoundPlan(), "c", 3, "d")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_accumulator_refuses_values_not_finite_or_too_large(bad: float) -> None:
    update = values(1, 10)
    update[3] = bad
    with pytest.raises(ValueError, match=r"finite|expected less than"):
        Accumulator(10).check_update(update, 1)


def test_accumulator_refuses_update_that_would_overflow() -> None:
    total, big = Accumulator(4), np.full(4, 2.0**26, np.float32)
    with pytest.raises(ValueError, match="would overflow the sum"):
        for _ in range(100):
            total.check_update(big, 1)
            total.add(big, 1)
    assert total.totals.count == 64


# -- logs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksum", [False, True])
def test_log_is_read_without_incomplete_last_record(tmp_path: Path, checksum: bool) -> None:
    log = UpdateLog(tmp_path, 7, checksum=checksum)
    for number in range(3):
        log.append(Update(f"d{number}", number + 1, metrics_of(number)), values(number, 100))
    log.close()
    path = tmp_path / "updates-7.log"
    os.truncate(path, path.stat().st_size - 1)
    found = list(read_log(path))
    assert [update for update, _ in found] == [Update("d0", 1, metrics_of(0)), Update("d1", 2, metrics_of(1))]
    assert np.array_equal(found[1][1], values(1, 100))
    size = path.stat().st_size
    UpdateLog(tmp_path, 7, checksum=checksum).append(Update("d3", 1), values(3, 100))
    assert [update.device for update, _ in read_log(path)] == ["d0", "d1", "d3"] and path.stat().st_size > size


def test_replica_log_truncates_incomplete_records(tmp_path: Path) -> None:
    """A replica holder was killed during a write, and its disk was full later; later records must be readable."""
    folder = LogDirectory(tmp_path)
    records = [b"".join(bytes(p) for p in pack_record(Update(f"d{n}", n), values(n, 100), checksum=False)) for n in range(4)]

    def replica(number: int, round_number: int = 7) -> ReplicateUpdate:
        return ReplicateUpdate("instance", round_number, number, records[number])

    ReplicaLogs().store_replica(folder, replica(0, 6))
    ReplicaLogs().store_replica(folder, replica(0))
    path = replica_directory(folder, "instance") / "updates-7.log"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "replicas of earlier rounds must be removed"
    with path.open("ab") as file:
        file.write(records[1][:-7])
    replica_logs = ReplicaLogs()
    replica_logs.store_replica(folder, replica(2))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            replica_logs.store_replica(folder, replica(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    replica_logs.store_replica(folder, replica(3))
    assert [update.device for update, _ in read_log(path)] == ["d0", "d2", "d3"]


def test_replica_of_past_round_is_refused(tmp_path: Path) -> None:
    storage = RoundStorage(Claims("a"), lambda: Accumulator(100), "host", 0)
    storage.open(tmp_path, -1)
    storage.begin_round(7)
    record = b"".join(bytes(piece) for piece in pack_record(Update("d", 1), values(1, 100), checksum=False))
    storage.store_replica("b", ReplicateUpdate("b1", 7, 1, record))
    with pytest.raises(PeerError, match="of a past round"):
        storage.store_replica("b", ReplicateUpdate("b2", 6, 1, record))
    assert [path.name for path in tmp_path.glob("copies_*")] == ["copies_b1"]


def test_failed_model_write_leaves_store_unchanged(tmp_path: Path) -> None:
    layout, start = layout_and_values({"w": np.zeros(1000, np.float32)})
    store = ModelStore(tmp_path, layout, name="m", keep=1, sync=False)
    store.save(0, start, {}, {})
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for state in ({}, {"momentum": start}):
            with pytest.raises(ModelNotStored, match=r"round 1 cannot be stored in .* retrying"):
                store.save(1, start, state, {})
        with pytest.raises(ModelNotStored, match="has no room for 4000 bytes"):
            _reserve_disk_space(tmp_path / "spool", 4000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [entry.round for entry in store.entries] == [0] and (tmp_path / store.entries[0].file).exists()
    store.save(1, start, {}, {})
    assert [entry.round for entry in ModelStore(tmp_path, layout, name="m", keep=1, sync=False).entries] == [1]
    assert not (tmp_path / "m_iteration_0.safetensors").exists()


def test_log_with_checksums_ends_at_damaged_record(tmp_path: Path) -> None:
    log = UpdateLog(tmp_path, 1, checksum=True)
    log.append(Update("d0", 1), values(0, 100))
    log.append(Update("d1", 1), values(1, 100))
    log.close()
    path = tmp_path / "updates-1.log"
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    assert [update.device for update, _ in read_log(path)] == ["d0"]


def test_log_is_adopted_only_after_its_lock_is_released(tmp_path: Path) -> None:
    mine, theirs = LogDirectory(tmp_path / "mine"), LogDirectory(tmp_path / "theirs")
    assert mine.acquire() and theirs.acquire() and not LogDirectory(tmp_path / "theirs").acquire()
    UpdateLog(theirs.path, 3, checksum=False).append(Update("d0", 1), values(0, 10))
    UpdateLog(theirs.path, 2, checksum=False).append(Update("old", 1), values(0, 10))
    with pytest.raises(BlockingIOError):
        mine.adopt_logs_from(theirs.path, "instance", 3, 3)
    theirs.release()
    (adopted,) = mine.adopt_logs_from(theirs.path, "instance", 3, 3)
    assert (adopted.round, adopted.instance_id) == (3, "instance")
    assert [update.device for update, _ in read_log(adopted.path)] == ["d0"]
    assert [log.round for log in theirs.list_logs()] == [2]
    assert [log.instance_id for log in mine.list_logs()] == ["instance"]
    mine.remove_logs_before(4)
    assert mine.list_logs() == []


# -- models ------------------------------------------------------------------------------------------------------------


def test_stored_models_are_found_after_restart(tmp_path: Path) -> None:
    layout, flat = layout_and_values({"b": np.ones(3), "a": np.zeros((2, 2), np.float32), "count": np.array(3)})
    assert list(layout.shapes) == ["a", "b"] and flat.tolist() == [0, 0, 0, 0, 1, 1, 1]
    metadata, found = layout.decode(memoryview(layout.encode(flat, {"x": "y"})))
    assert metadata == {"x": "y"} and np.array_equal(found, flat)
    store = ModelStore(tmp_path, layout, name="My/Net", keep=2, sync=True)
    losses = [0.9, 0.1, 0.5, 0.6, 0.7]
    for number, loss in enumerate(losses):
        store.save(number, flat + number, {"m": np.arange(3.0)}, {"loss": loss})
    again = ModelStore(tmp_path, layout, name="My/Net", keep=2, sync=True)
    assert [entry.round for entry in again.entries] == [1, 3, 4], "the newest two, and the best"
    values_found, state = again.load(4)
    assert np.array_equal(values_found, flat + 4) and state["m"].tolist() == [0, 1, 2]
    assert np.array_equal(layout.decode(again.view_file(4))[1], flat + 4), "other servers receive the stored file"
    assert unpack_state(bytes(again.view_file(4, state=True)))["m"].tolist() == [0, 1, 2]
    assert again.newest is not None
    damaged = tmp_path / again.newest.file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    with pytest.raises(StoreError, match="damaged"):
        again.load(4)


def test_layout_is_compatible_with_safetensors_library(tmp_path: Path) -> None:
    from safetensors.numpy import load, save

    layout, flat = layout_and_values({"b": np.ones(3, np.float32), "a": np.zeros((2, 2), np.float32)})
    body = save(layout.split_tensors(flat), {"fl_id": "x"})
    metadata, found = layout.decode(memoryview(body))
    assert metadata == {"fl_id": "x"} and np.array_equal(found, flat)
    assert load(layout.encode(flat, {}))["b"].tolist() == [1, 1, 1]


INVALID_MODELS = [
    3,
    {},
    {"n": np.array(3)},
    {"w": np.array([np.nan])},
    {"w": np.zeros((0, 4))},
    {"w": np.ones(3), "z": np.ones(3, complex)},
    {"w": np.ones(3), "t": np.array(["a text"])},
    {"__metadata__": np.ones(3)},
    {"w": [[1.0], [1.0, 2.0]]},
    {1: np.ones(3), "1": np.ones(2)},
    {"\ud800": np.ones(3)},
]


@pytest.mark.parametrize("model", INVALID_MODELS)
def test_invalid_model_is_refused(model: object) -> None:
    with pytest.raises(UsageError):
        layout_and_values(model)


def test_model_accepts_all_torch_float_types() -> None:
    import torch

    halves = [torch.tensor([[1.5, 2.5]], dtype=kind) for kind in (torch.bfloat16, torch.float16, torch.float64)]
    layout, flat = layout_and_values({str(number): half.T for number, half in enumerate(halves)})
    assert flat.tolist() == [1.5, 2.5] * 3 and layout.shapes["0"] == (2, 1)
    with pytest.raises(UsageError, match="the model's w is not a dense array of numbers"):
        layout_and_values({"w": torch.ones(2, 2).to_sparse()})


def test_flat_array_is_converted_or_refused_by_size() -> None:
    layout = ModelLayout({"w": (2, 2)})
    assert layout.as_flat_array(np.arange(8.0)[::2]).tobytes() == np.array([0, 2, 4, 6], np.float32).tobytes()
    with pytest.raises(UsageError, match="the array has 3 values: expected 4"):
        layout.as_flat_array(np.zeros(3))


def test_quantized_model_is_within_half_a_step() -> None:
    layout = ModelLayout({"a": (40, 10), "b": (3,), "none": (0,), "zero": (2,)})
    flat = np.concatenate([values(1, 400), 100 * values(2, 3), np.zeros(2, np.float32)])
    small = layout.quantize(flat)
    again = layout.dequantize(small)
    for name, tensor in layout.split_tensors(again).items():
        apart = np.abs(tensor - layout.split_tensors(flat)[name])
        assert (apart <= 0.5001 * small.scales[name]).all(), name
    assert small.scales["zero"] == 0 and small.int8_values.nbytes == layout.size
    with pytest.raises(ValueError, match="does not match its header"):
        layout.dequantize(QuantizedModel(small.int8_values[1:], small.scales))


def test_invalid_strategy_state_raises_error(tmp_path: Path) -> None:
    layout, flat = layout_and_values({"w": np.ones(3, np.float32)})
    store = ModelStore(tmp_path, layout, name="", keep=2, sync=False)
    with pytest.raises(UsageError, match="state must be arrays by name"):
        store.save(1, flat, {"m": np.array([object()])}, {})
    store.save(1, flat, {"m": np.ones(3)}, {})
    (tmp_path / "model_iteration_1.safetensors.state").write_bytes(b"\x01" * 20)
    with pytest.raises(StoreError, match="state is damaged"):
        store.load(1)


def test_device_raises_peer_error_for_reply_of_other_protocol() -> None:
    page = b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 6\r\nconnection: close\r\n\r\n<html>"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(page)

        proxy = threading.Thread(target=speak, daemon=True)
        proxy.start()
        device = Device(f"127.0.0.1:{listener.getsockname()[1]}", data_size=1, patience_s=0.0)
        with device, pytest.raises(PeerError, match="no server replied within"):
            device.model()
        proxy.join(60)


# Reloads the modules, so that threads use new msgspec types for the first time concurrently, 80 times.
THREADS = """
import importlib, sys, threading
import numpy as np
from covey.federated.device import client as device; from covey.federated import device_protocol as protocol

sys.setswitchinterval(1e-6)

def begin(barrier):
    barrier.wait()
    device.Task(None, protocol.Answer(200, "", 0, fl_plan_config=plan), layout, flat)
    device._decode_answer(protocol.MSGPACK, device.msgspec.msgpack.encode(protocol.SecureAnswer(200, "", 0)))

for _ in range(80):
    importlib.reload(protocol)
    importlib.reload(device)
    plan = device.msgspec.json.encode(protocol.FlPlan("", "", 1, 1, 1, 0.1)).decode()
    layout, flat = device.ModelLayout({"w": (1,)}), np.zeros(1, np.float32)
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=begin, args=(barrier,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_devices_start_concurrently_in_threads() -> None:
    assert subprocess.run([sys.executable, "-c", THREADS], timeout=240).returncode == 0


@pytest.mark.parametrize(("kind", "rate"), [("QUANT", 1.0), ("TOP_K", 1.0), ("TOP_K", 0.01), ("DIFF_SPARSE_QUANT", 0.4)])
def test_compressed_size_matches_arrays(kind: str, rate: float) -> None:
    arrays = update_compression.compress_update(values(1, 1000), kind, rate, 1)
    assert update_compression.compressed_size(1000, kind, rate) == sum(array.nbytes for array in arrays.values())


# -- strategies --------------------------------------------------------------------------------------------------------


class Broken(strategies.Strategy):
    def make(self, model: Any, mean: Any, state: Any) -> Any:
        raise KeyError("velocity")


class Returns(strategies.Strategy):
    """Strategy that returns a given model."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def make(self, model: Floats, mean: Any, state: Any) -> Any:
        return self.made


def test_failing_strategy_or_evaluation_is_reported() -> None:
    layout, flat = layout_and_values({"w": np.ones(3, np.float32)})
    with pytest.raises(UsageError, match=r"Broken\.make failed .KeyError: 'velocity'.: the model is unchanged"):
        aggregation.make_next_model(Broken(), flat, flat.astype(np.float64), {})
    for made, why in (
        (np.full(3, np.nan), "not every value is finite"),
        (np.ones(2), r"it returned shape \(2,\): expected \(3,\)"),
        (None, "shape"),
    ):
        with pytest.raises(UsageError, match=why) as ends:
            aggregation.make_next_model(Returns(made), flat, flat.astype(np.float64), {})
        assert ends.value.exit_code == ExitCode.BAD_SCRIPT, "a restart does not fix a broken strategy"
    found = aggregation.evaluate_model(lambda model: {"loss": np.inf, "accuracy": np.nan, "auc": 1}, layout, flat)
    assert found == {"central_loss": sys.float_info.max, "central_auc": 1.0}, (
        "an infinite loss must be finite and never the best"
    )
    assert aggregation.evaluate_model(lambda model: {"loss": 1 / 0}, layout, flat) == {}


def test_strategies_compute_documented_results() -> None:
    model, mean = np.array([1.0, 2.0], np.float32), np.array([2.0, 0.0])
    assert strategies.FedAvg().make(model, mean, {}).tolist() == [2, 0]
    state: dict[str, np.ndarray] = {}
    momentum = strategies.FedAvgM(0.5)
    assert momentum.make(model, mean, state).tolist() == [2, 0]
    assert momentum.make(model, mean, state).tolist() == [2.5, -1]
    adam = strategies.FedAdam(learning_rate=1.0, beta1=0.0, beta2=0.0, tau=1e-9)
    assert np.allclose(adam.make(model, mean, {}), [2, 1]), "the step must be the learning rate regardless of delta"
    state = {}
    strategies.FedYogi(beta2=0.5, tau=1.0).make(model, mean, state)
    assert state["second"].tolist() == [1.0, 3.0], "the estimate must change by (1 - beta2) * delta^2, or not at all"
    rows = np.array([[0.0], [1.0], [2.0], [100.0]], np.float32)
    assert strategies.Median().column(rows, np.ones(4)).tolist() == [1.5]
    assert strategies.TrimmedMean(0.25).column(rows, np.ones(4)).tolist() == [1.5]
    assert strategies.FedProx(0.5).for_devices(1) == {"proximal_mu": 0.5}
    late = strategies.FedBuff().contribution(np.array([3.0], np.float32), np.array([1.0], np.float32), 3)
    assert late.tolist() == [1.0]


@pytest.mark.parametrize("name", ["FedAvg", "fedbuff", "TrimmedMean"])
def test_find_strategy_ignores_case(name: str) -> None:
    assert type(strategies.find_strategy(name)).__name__.lower() == name.lower()


def test_invalid_strategy_name_or_setting_is_refused() -> None:
    with pytest.raises(UsageError, match="FedAvg, FedProx"):
        strategies.find_strategy("x")
    with pytest.raises(UsageError, match="share"):
        strategies.TrimmedMean(0.5)
    with pytest.raises(UsageError, match="mu"):
        strategies.FedProx(0)


def test_fit_trains_torch_module_according_to_plan() -> None:
    import torch

    sent: dict[str, object] = {}

    class Recording(Device):
        def update(self, arrays: Mapping[str, Any], fields: dict[str, str], layout: ModelLayout | None = None) -> bool:
            sent.update(fields, flat=arrays[""])
            return True

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    layout, flat = layout_and_values(module)
    plan = FlPlan("FEDERATED_LEARNING", "", 1, epochs=20, mini_batch=4, lr=0.5, settings={"proximal_mu": 0.001})
    answer = Answer(200, "", 0, iteration=3, ticket="t", fl_plan_config=msgspec.json.encode(plan).decode())
    task = Task(Recording("http://127.0.0.1:1", "d", data_size=4), answer, layout, flat)
    assert fit(task, module, torch.eye(4), torch.arange(4))
    first = float(str(sent["upload_loss"]))
    assert fit(task, module, torch.eye(4), torch.arange(4)), "the second fit must start from the task's weights"
    assert float(str(sent["upload_loss"])) == first
    learned = Task(task._device, answer, layout, np.asarray(sent["flat"], np.float32))
    assert fit(learned, module, torch.eye(4), torch.arange(4))
    assert float(str(sent["upload_loss"])) < first and sent["iteration"] == "3"


# -- simulation and schema ---------------------------------------------------------------------------------------------


def test_partition_is_uneven_and_complete() -> None:
    labels = load_digits()[0].labels
    parts = partition_samples(labels, 200, 0.1, np.random.default_rng(1))
    assigned = np.concatenate(parts)
    assert sorted(assigned) == list(range(len(labels))) and min(len(part) for part in parts) >= 1
    assert np.mean([len(set(labels[part])) for part in parts if len(part) > 3]) < CLASSES / 2


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedBuff", "Median"])
def test_simulated_federation_reaches_accuracy(name: str) -> None:
    rounds = list(simulate(30, 15, strategies.find_strategy(name), alpha=1.0, epochs=5, rate=0.2))
    assert rounds[-1].accuracy > 0.6 > rounds[0].accuracy
    assert rounds[-1].loss < rounds[0].loss


def test_simulation_reports_divergence_and_accepts_tiny_alpha() -> None:
    with pytest.raises(UsageError, match="the training diverged"):
        list(simulate(3, 3, strategies.FedAvg(), rate=1e6))
    assert next(simulate(3, 1, strategies.FedAvg(), alpha=1e-9)).devices == 3


def test_openapi_document_has_all_paths_and_fields() -> None:
    document = openapi.build_document("/x")
    assert set(document["paths"]) == {f"/x/{name}" for name in ("startFLJob", "updateModel", "getModel", *SECAGG_REQUEST_TYPES)}
    fields = document["components"]["schemas"]["UpdateFields"]["properties"]
    assert {"fl_id", "iteration", "timestamp", "data_size", "ticket", "upload_loss"} <= set(fields)


def test_supervisor_exits_with_disk_code_if_logs_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "scheduler.log").mkdir()
    supervisor = ProcessSupervisor(
        ["-c", ""], [SupervisedProcess("scheduler", "20", {})], cluster_id="c", folder=tmp_path, environ=os.environ
    )
    assert asyncio.run(asyncio.wait_for(supervisor.run(), 60)) == ExitCode.DISK
