"""Devices with certificates and real servers: admission, refusals, and signatures in secure rounds."""

from __future__ import annotations

import http.client
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.processes.command import Shell
from tests.processes.federation import SIZE, Federation, update
from tests.processes.harness import until
from tests.unit.federated.privacy.certificates import Authority

from covey.errors import PeerError
from covey.federated import Device
from covey.federated.device_protocol import GetModel, now_ms
from covey.federated.privacy.device_certificates import DeviceIdentity, DeviceTrust

FIRST, SECOND = Authority("first"), Authority("second")
TRUST = DeviceTrust([FIRST.pem, SECOND.pem])


def guarded(shell: Shell, threshold: int, **settings: Any) -> Federation:
    for name, content in (("first.pem", FIRST.pem), ("second.pem", SECOND.pem), ("crl.pem", FIRST.revoked())):
        (shell.folder / name).write_bytes(content)
    return Federation(
        shell,
        1,
        threshold,
        pki_verify=True,
        root_first_ca_path=shell.folder / "first.pem",
        root_second_ca_path=shell.folder / "second.pem",
        equip_crl_path=shell.folder / "crl.pem",
        **settings,
    )


def device(federation: Federation, identity: DeviceIdentity | None, name: str = "") -> Device:
    return Device(federation.urls(), name, data_size=1, identity=identity, trust=TRUST)


def refused(asking: Device) -> str:
    with pytest.raises(PeerError) as error:
        asking.join()
    return str(error.value)


def revoked(asking: Device) -> bool:
    try:
        asking.join()
    except PeerError as error:
        return "was revoked" in str(error)
    return False


def test_devices_need_certificates_and_requests_are_accepted_once(shell: Shell) -> None:
    federation = guarded(shell, 1, fl_iteration_num=3)
    one, two = FIRST.device("device-1"), SECOND.device("device-2")
    for identity in (one, two):  # certificates of both roots
        task = device(federation, identity).join()
        assert task is not None and task.send(np.ones(SIZE, np.float32))
    assert "pki_verify requires signed requests" in refused(device(federation, None, "device-3"))
    assert "not issued by a trusted authority" in refused(device(federation, Authority("strange").device("device-4")))

    class Liar(Device):
        """A device with a certificate that claims another id."""

        def __init__(self) -> None:
            super().__init__(federation.urls(), data_size=1, identity=one)
            self.fl_id = "device-2"

    assert "the certificate is that of device-1" in refused(Liar())

    class Altered(Device):
        """A device whose request is changed in transit."""

        def _sign_request(self, path: str, pieces: list[bytes | memoryview]) -> dict[str, str]:
            return super()._sign_request(path, [b"other words"])

    assert "not a valid signature of device-1" in refused(Altered(federation.urls(), data_size=1, identity=one))
    (shell.folder / "crl.pem").write_bytes(FIRST.revoked(one))
    until(lambda: revoked(device(federation, one)), "the new list to be read", details=federation.tails)


def test_repeated_request_is_refused(shell: Shell) -> None:
    federation = guarded(shell, 1)
    asking = device(federation, FIRST.device("device-1"))
    body = msgspec.json.encode(GetModel(now_ms()))
    proof = {f"x-covey-{name}": value for name, value in asking._sign_request("/getModel", [body]).items()}
    answers = []
    for _ in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", federation.port, timeout=30)
        connection.request("POST", "/getModel", body, {"content-type": "application/json", **proof})
        answers.append(connection.getresponse().read())
    assert b"safetensors" not in answers[0] and b'"retcode"' not in answers[0][:12], "expected a model, not a refusal"
    assert b"seen before" in answers[1]


def test_devices_of_secure_round_verify_signatures(shell: Shell) -> None:
    federation = guarded(shell, 4, encrypt_type="PW_ENCRYPT", fl_iteration_num=1)
    members = [device(federation, (FIRST, SECOND)[n % 2].device(f"device-{n}")) for n in range(4)]
    done: list[bool] = []

    def live(number: int) -> None:
        task = members[number].join()
        assert task is not None
        done.append(task.send(update(number, 1)))

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True] * 4, federation.tails()
    mean = sum(update(number, 1) for number in range(4)) / 4
    assert np.allclose(members[0].model(1)[1]["w"].reshape(-1), mean, atol=1e-6)


def test_device_above_request_rate_is_told_to_wait(shell: Shell) -> None:
    federation = guarded(shell, 1, device_rate=2.0)
    asking = device(federation, FIRST.device("device-1"))
    body = msgspec.json.encode(GetModel(now_ms()))
    answers = [bytes(asking._send_request("getModel", [body], "application/json")[1]) for _ in range(8)]
    waiting = [answer for answer in answers if b"more than 2 requests per second" in answer]
    assert 1 <= len(waiting) < 8 and b'"retcode":201' in waiting[0]
