"""Device in Python: joins rounds at any server, sends updates, and fetches models. It needs numpy, not torch.

    device = Device("http://10.0.0.1:6668,http://10.0.0.2:6668", "phone-17", data_size=600)
    for task in device.rounds():                     # one task per iteration the device is admitted to
        weights = train(task.weights, task.plan)     # dicts of numpy arrays
        task.send(weights, loss=0.3)

If a server does not reply, or tells the device to use another one, the device sends the request to the next server. An update
that is sent several times is counted at most once.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import random
import secrets
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from covey.errors import ExitCode, PeerError, UsageError
from covey.federated import update_compression
from covey.federated.device import secagg_client
from covey.federated.device_protocol import (
    JSON,
    MSGPACK,
    SAFETENSORS,
    Answer,
    Code,
    FlPlan,
    GetModel,
    SecureAnswer,
    StartJob,
    now_ms,
)
from covey.federated.model_codec import Floats, ModelLayout, QuantizedModel, encode_flat_header, read_header, view_bytes
from covey.federated.privacy.device_certificates import DeviceIdentity, DeviceTrust, encode_request_to_sign
from covey.federated.privacy.dp_noise import add_device_noise
from covey.federated.privacy.fixed_point_ring import DeviceMetrics
from covey.federated.update_compression import Compressor

LONG_POLL_MS: Final = 20_000  # how long a server may delay its reply
RESPONSE_SLACK_S: Final = 20.0
DOWNLOAD_COMPRESS_TYPES: Final = ("QUANT",)  # compressions of models that this device can decode
Weights = dict[str, Any]
# Decoders are made at import, because msgspec crashes if threads use a new type for the first time concurrently.
_answer_decoder: Final = msgspec.json.Decoder(Answer)
_secure_answer_decoder: Final = msgspec.msgpack.Decoder(SecureAnswer)
_plan_decoder: Final = msgspec.json.Decoder(FlPlan)


class RequestRefused(PeerError):
    """A server refused a request, or did not carry it out in time. `code` is the `retcode` of the last reply."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason, ExitCode.REFUSED)
        self.code = code


class Task:
    """One round to which a device is admitted: the received model, the plan, and `send` for the update.

    The model is `flat`, an array of all values, and `weights`, views of it by tensor name. Do not change them in place, because
    `send` may compute the difference to them.
    """

    def __init__(self, device: Device, answer: Answer, layout: ModelLayout, flat: Floats) -> None:
        self._device = device
        self._layout = layout
        self.iteration = answer.iteration
        self.ticket = answer.ticket
        self.plan = _plan_decoder.decode(answer.fl_plan_config)
        self.flat = flat
        self.weights = layout.split_tensors(flat)
        self._evaluation: dict[str, str] = {}

    def evaluated(self, samples: int, *, loss: float, accuracy: float | None = None) -> None:
        """Record the result of evaluating `weights` on held-out samples, for `send`. Call it if `plan.evaluate` is true.

        The result is not sent with encrypt_type=DP_ENCRYPT, nor in a secure round with dp_noise. Raise `UsageError` if
        `samples` is below 1.
        """
        if samples < 1:
            raise UsageError(f"samples={samples} is invalid: an evaluation needs at least one sample")
        self._evaluation = {"eval_data_size": str(samples), "eval_loss": repr(float(loss))}
        if accuracy is not None:
            self._evaluation["eval_accuracy"] = repr(float(accuracy))

    def send(
        self, weights: Mapping[str, Any] | NDArray[Any], *, loss: float | None = None, accuracy: float | None = None
    ) -> bool:
        """Send the trained weights and return True; return False if a server replies OUT_OF_TIME, or if a secure round failed.

        `weights` has all tensors by name, or is an array of all values. Loss and accuracy are not sent with
        encrypt_type=DP_ENCRYPT, nor in a secure round with dp_noise. Raise `UsageError` if weights do not fit the model or are
        out of the secure round's range, and `ValueError` if they cannot be clipped because they are not finite. Raise
        `RequestRefused` if a server refuses the update or none counts it within `patience_s`, and `PeerError` if no server
        replies for that long or a reply in a secure round is unsafe.
        """
        flat = self._layout.as_flat_array(weights) if isinstance(weights, np.ndarray) else self._layout.flatten(weights)
        noise = self.plan.cipher.noise
        if self.plan.cipher.encrypt_type == "PW_ENCRYPT":
            done = secagg_client.send_masked_update(self._device, self, flat - self.flat, self._build_metrics(loss, accuracy))
        elif noise is not None and noise.local:  # without loss and accuracy, because no noise is added to them
            done = self._upload(self.flat + add_device_noise(flat - self.flat, noise), self.update_metadata)
        else:
            fields = self.update_metadata | self._evaluation
            if loss is not None:
                fields["upload_loss"] = repr(float(loss))
            if accuracy is not None:
                fields["upload_accuracy"] = repr(float(accuracy))
            done = self._upload(flat, fields)
        if done:
            self._device.mark_counted(self.iteration)
        return done

    def _upload(self, flat: Floats, fields: dict[str, str]) -> bool:
        kind, rate = self.plan.upload_compress_type, self.plan.upload_sparse_rate
        if kind == update_compression.NO_COMPRESSION:
            return self._device.update({"": flat}, fields, self._layout)
        arrays = self._device.compressor.encode(flat - self.flat, kind, rate, self.iteration)
        done = self._device.update(arrays, fields)
        if done:
            self._device.compressor.commit_residual()
        return done

    @property
    def update_metadata(self) -> dict[str, str]:
        """Metadata of an update without `timestamp`, which `Device.update` adds."""
        device = self._device
        named = {"fl_id": device.fl_id, "iteration": str(self.iteration), "ticket": self.ticket}
        return named | {"data_size": str(device.data_size), "fl_name": device.fl_name}

    def _build_metrics(self, loss: float | None, accuracy: float | None) -> DeviceMetrics:
        metrics, evaluation = DeviceMetrics(), self._evaluation
        if loss is not None:
            metrics = metrics._replace(loss_weight=1.0, loss=float(loss))
        if accuracy is not None:
            metrics = metrics._replace(accuracy_weight=1.0, accuracy=float(accuracy))
        if evaluation:
            metrics = metrics._replace(eval_weight=1.0, eval_loss=float(evaluation["eval_loss"]))
        if "eval_accuracy" in evaluation:
            metrics = metrics._replace(eval_accuracy_weight=1.0, eval_accuracy=float(evaluation["eval_accuracy"]))
        return metrics


class Device:
    """A device of a federated cluster, and a context manager that closes its connection. Not thread-safe."""

    def __init__(
        self,
        servers: str | Sequence[str],
        fl_id: str = "",
        *,
        data_size: int,
        fl_name: str = "",
        context: ssl.SSLContext | None = None,
        patience_s: float = 60.0,
        identity: DeviceIdentity | None = None,
        trust: DeviceTrust | None = None,
    ) -> None:
        """Create a device; nothing is sent yet.

        Servers are URLs, as a sequence or separated by commas. The default `fl_id` is the common name of `identity`, else
        random. `data_size` is the number of samples, `context` is for TLS. `identity` signs every request (`pki_verify`), and
        `trust` has the root certificates by which other devices are verified in a secure round with `pki_verify`. `patience_s`
        limits how long a request without a usable reply is retried. Raise `UsageError` if there is no server, a URL or
        `data_size` is invalid, or `fl_id` is not that of `identity`; `ValueError` if a URL cannot be parsed.
        """
        listed = servers.split(",") if isinstance(servers, str) else list(servers)
        self._servers = [_parse_server_url(server.strip()) for server in listed if server.strip()]
        if not self._servers:
            raise UsageError("no server was given: pass at least one address of the form http://HOST:PORT")
        if data_size < 1:
            raise UsageError(f"data_size={data_size} is invalid: a device needs at least one sample")
        if identity is not None and fl_id not in ("", identity.name):
            raise UsageError(f"fl_id={fl_id} differs from the certificate's common name {identity.name}: leave fl_id out")
        self.identity, self.trust = identity, trust
        self.fl_id = fl_id or (identity.name if identity is not None else f"device-{secrets.token_hex(8)}")
        self.data_size = data_size
        self.fl_name = fl_name
        self._ssl_context = context
        self._patience_s = patience_s
        self._random = random.Random()  # not the module's generator, whose state the training script may rely on
        self._server_index = self._random.randrange(len(self._servers))
        self._connection: http.client.HTTPConnection | None = None
        self.compressor = Compressor()
        self._last_counted_iteration = 0  # the last iteration in which an update of this device was counted

    # -- public API --------------------------------------------------------------------------------------------------

    def rounds(self) -> Iterator[Task]:
        """Yield a task for every round this device is admitted to, until the training is disabled or finished.

        A round may be yielded again if its `Task.send` did not return True. Raise errors as `join`.
        """
        while True:
            task = self.join()
            if task is None:
                return
            yield task

    def join(self) -> Task | None:
        """Wait until this device is admitted to a round; return None if the training is disabled or finished.

        Raise `RequestRefused` if a server refuses the request as invalid or servers report errors for `patience_s`. Raise
        `PeerError` if no server replies for that long or the received model is invalid.
        """
        limit = time.monotonic() + self._patience_s
        while True:
            request = StartJob(
                self.fl_id,
                now_ms(),
                self.data_size,
                self.fl_name,
                self._last_counted_iteration,
                download_compress_types=DOWNLOAD_COMPRESS_TYPES,
                wait=LONG_POLL_MS,
            )
            answer, body, start = self._request_with_retry("startFLJob", [msgspec.json.encode(request)], JSON)
            if answer.retcode == Code.SUCCEED:
                layout, flat = _decode_model(answer, body, start)
                return Task(self, answer, layout, flat)
            if answer.instance:
                return None
            failed = answer.retcode == Code.SYSTEM_ERROR
            if answer.retcode == Code.REQUEST_ERROR or (failed and time.monotonic() > limit):
                raise RequestRefused(answer.retcode, answer.reason)
            limit = limit if failed else time.monotonic() + self._patience_s
            self._wait_for_retry(answer, move_on=failed)

    def model(self, iteration: int = -1, wait_ms: int = LONG_POLL_MS) -> tuple[int, Weights]:
        """Return (iteration, weights) of the newest model (-1) or of an iteration. Wait if that iteration is in progress.

        Return the newest model if the requested one was removed or its iteration has not begun. `wait_ms` is how long a server
        may delay one reply; it must be below 40 000. Raise `RequestRefused` if a server refuses the request, and `PeerError` if
        no server replies within `patience_s` or the received model is invalid.
        """
        while True:
            request = GetModel(now_ms(), iteration, self.fl_name, DOWNLOAD_COMPRESS_TYPES, wait_ms)
            answer, body, start = self._request_with_retry("getModel", [msgspec.json.encode(request)], JSON)
            if answer.retcode == Code.SUCCEED:
                layout, flat = _decode_model(answer, body, start)
                return answer.iteration, layout.split_tensors(flat)
            if answer.retcode != Code.NOT_READY:
                raise RequestRefused(answer.retcode, answer.reason)
            self._wait_for_retry(answer)

    def update(self, arrays: Mapping[str, Any], fields: dict[str, str], layout: ModelLayout | None = None) -> bool:
        """Send an update until it is counted, and return True; return False if a server replies OUT_OF_TIME.

        `fields` are the metadata without `timestamp`. With a layout, `arrays` has one entry: the flat array of all the model's
        values. Raise `RequestRefused` if a server refuses the update or none counts it within `patience_s`, and `PeerError` if
        no server replies for that long.
        """
        limit = time.monotonic() + self._patience_s
        while True:
            metadata = {**fields, "timestamp": str(now_ms())}
            head = layout.encode_header(metadata) if layout is not None else encode_flat_header(arrays, metadata)
            pieces: list[bytes | memoryview] = [head, *(view_bytes(np.ascontiguousarray(array)) for array in arrays.values())]
            answer, _, _ = self._request_with_retry("updateModel", pieces, SAFETENSORS)
            if answer.retcode == Code.SUCCEED:
                return True
            if answer.retcode == Code.OUT_OF_TIME:
                return False
            if answer.retcode == Code.REQUEST_ERROR or time.monotonic() > limit:
                raise RequestRefused(answer.retcode, answer.reason)
            self._wait_for_retry(answer, move_on=True)

    def mark_counted(self, iteration: int) -> None:
        """Record that this device's update was counted in an iteration; `join` then requests a later one."""
        self._last_counted_iteration = iteration

    def phase(self, path: str, body: bytes) -> SecureAnswer:
        """Send one request of a secure round and return the reply; if the reply is NOT_READY, sleep until its retry time first.

        Raise `RequestRefused` if the reply is REQUEST_ERROR, and `PeerError` if no server replies within `patience_s`.
        """
        answer, _, _ = self._request_with_retry(path, [body], MSGPACK)
        if answer.retcode == Code.REQUEST_ERROR:
            raise RequestRefused(answer.retcode, answer.reason)
        if answer.retcode == Code.NOT_READY:
            self._wait_for_retry(answer)
        assert isinstance(answer, SecureAnswer)
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one request -------------------------------------------------------------------------------------------------

    def _request_with_retry(
        self, path: str, pieces: list[bytes | memoryview], content_type: str
    ) -> tuple[Answer, memoryview, int]:
        """Send a request to one server after the other until one replies.

        Return the reply, its body, and the offset of the model's values (0 without a model).
        """
        limit = time.monotonic() + self._patience_s
        while True:
            try:
                kind, body = self._send_request(path, pieces, content_type)
                return _decode_answer(kind, body)
            except (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError) as error:
                where = self._servers[self._server_index]
                self._switch_server()
                if time.monotonic() > limit:
                    raise PeerError(
                        f"no server replied within {self._patience_s:g} s (last tried {where[1]}:{where[2]}: {error})",
                        ExitCode.UNREACHABLE,
                    ) from None
                time.sleep(self._random.uniform(0.02, 0.1))

    def _send_request(self, path: str, pieces: list[bytes | memoryview], content_type: str) -> tuple[str, memoryview]:
        connection = self._get_connection()
        prefix = self._servers[self._server_index][3]
        connection.putrequest("POST", f"{prefix}/{path}")
        connection.putheader("content-type", content_type)
        connection.putheader("content-length", str(sum(len(piece) for piece in pieces)))
        for name, value in self._sign_request(f"{prefix}/{path}", pieces).items():
            connection.putheader(f"x-covey-{name}", value)
        connection.endheaders()
        for piece in pieces:
            connection.send(piece)
        with connection.getresponse() as response:
            return response.headers.get_content_type(), memoryview(response.read())

    def _sign_request(self, path: str, pieces: list[bytes | memoryview]) -> dict[str, str]:
        """Return the headers that sign a request, without their prefix x-covey-."""
        if self.identity is None:
            return {}
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        nonce, at = secrets.token_hex(16), str(now_ms())
        signature = self.identity.sign(encode_request_to_sign(path, nonce, at, digest.digest()))
        chain = ",".join(base64.b64encode(certificate).decode() for certificate in self.identity.chain)
        return {"chain": chain, "nonce": nonce, "time": at, "signature": base64.b64encode(signature).decode()}

    def _get_connection(self) -> http.client.HTTPConnection:
        if self._connection is None:
            scheme, host, port, _ = self._servers[self._server_index]
            timeout = LONG_POLL_MS / 1000 + RESPONSE_SLACK_S
            if scheme == "https":
                context = self._ssl_context or ssl.create_default_context()
                self._connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
        return self._connection

    def _switch_server(self) -> None:
        with contextlib.suppress(OSError):
            self.close()
        self._server_index = (self._server_index + 1) % len(self._servers)

    def _wait_for_retry(self, answer: Answer, *, move_on: bool = False) -> None:
        """Sleep until `next_req_time` by the server's clock, but at least 10 ms and at most 5 s.

        First switch to the next server if `move_on`, or if the reply says so.
        """
        if move_on or answer.elsewhere:
            self._switch_server()
        wait = (int(answer.next_req_time or 0) - answer.timestamp) / 1000
        time.sleep(min(max(wait, 0.01), 5.0))


def _decode_answer(kind: str, body: memoryview) -> tuple[Answer, memoryview, int]:
    """Return a reply, its body, and the offset of the model's values (0 without a model). `kind` is the content type."""
    if kind == MSGPACK:
        return _secure_answer_decoder.decode(body), body, 0
    if kind != SAFETENSORS:
        return _answer_decoder.decode(body), body, 0
    _, metadata, start = read_header(body)
    return msgspec.convert(metadata, Answer, strict=False), body, start


def _decode_model(answer: Answer, body: memoryview, start: int) -> tuple[ModelLayout, Floats]:
    tensors, _, _ = read_header(body)
    try:
        layout = ModelLayout({name: tuple(tensor["shape"]) for name, tensor in tensors.items()})
        if not answer.download_compress_type:
            return layout, layout.decode(body)[1]
        steps = np.frombuffer(body, np.int8, offset=start)
        return layout, layout.dequantize(QuantizedModel(steps, msgspec.json.decode(answer.scales, type=dict[str, float])))
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise PeerError(f"a server sent an invalid model: {error}") from None


def _parse_server_url(url: str) -> tuple[str, str, int, str]:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url} is not a server's address: expected http://HOST:PORT or https://HOST:PORT")
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")
