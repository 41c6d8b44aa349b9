"""Handshake of a connection: protocol version and proof of the join secret. No I/O.

    node:           covey/2
    scheduler:      covey/2 NONCE secret        ("open" instead of "secret" if it requires none)
    node:           NONCE PROOF
    scheduler:      ok PROOF CLOCK TOKEN SILENCE    or: no MESSAGE

A proof is an HMAC over both nonces, or "-" without a secret. If the scheduler requires the secret, both sides prove that they
have it; the secret itself is not sent. CLOCK is the scheduler's wall clock in seconds, TOKEN its fencing token (0: no
standbys). SILENCE is the number of seconds without a message after which the node connects to another scheduler (negative:
never). "no" may also answer the node's first line. The lines are text, so `telnet HOST PORT` shows what listens there. The
scheduler sends its first line after the node's first bytes, or after a second without any, because a MindSpore process closes a
connection on which it receives bytes before it has sent any. Frames follow.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from covey.core.messages import PROTOCOL
from covey.errors import ExitCode, PeerError

LINE_MAX: Final = 2048  # bytes; a peer that sends more before its first newline is not covey
_MAGIC: Final = b"covey/"
_MINDSPORE_MAGIC: Final = b"RPC0"  # begins every message between MindSpore's own processes
_HTTP_PREFIXES: Final = (
    b"GET ",
    b"POST ",
    b"PUT ",
    b"HEAD ",
    b"OPTIONS ",
    b"DELETE ",
    b"PATCH ",
    b"CONNECT ",
    b"TRACE ",
    b"HTTP/",
)

MINDSPORE_PEER_REASON: Final = (
    "it uses MindSpore's own protocol, not covey's: start a MindSpore script with covey run --framework mindspore"
)


class HandshakeError(PeerError):
    """The handshake failed. The caller sends `reply` to the peer (b"": nothing); `reply` is HTTP if the peer uses HTTP.

    `final`: a node should not retry.
    """

    def __init__(self, message: str, reply: bytes = b"", *, final: bool = False) -> None:
        super().__init__(message, ExitCode.REFUSED)
        self.reply = reply
        self.final = final


class SecretNotRequired(HandshakeError):
    """The peer does not require a join secret, but this side insists on one."""


class ServerHandshake:
    """The side of a handshake that accepts the connection."""

    def __init__(self, secret: str, token: int = 0, silence_s: float = -1.0) -> None:
        self._secret = secret
        self._leader_token = token  # fencing token, valid for all messages on the connection
        self._silence_s = silence_s  # seconds without a message after which a node tries another scheduler; negative: no limit
        self._nonce = secrets.token_hex(16)
        self._buffer = b""

    def first_line(self) -> bytes:
        """Return the scheduler's first line, with its newline."""
        return f"covey/{PROTOCOL} {self._nonce} {'secret' if self._secret else 'open'}\n".encode()

    def feed(self, data: bytes, clock: float) -> tuple[bytes, bytes] | None:
        """Add received bytes. Return None while the handshake is incomplete, then the reply and the bytes after the handshake.

        `clock` is the wall clock sent to the node, in seconds. Raises `HandshakeError` if the node has another protocol or
        version, sends an invalid line, or does not prove the secret.
        """
        self._buffer += data
        _reject_other_protocols(self._buffer)
        hello, newline, rest = self._buffer.partition(b"\n")
        if newline and hello.strip() != f"covey/{PROTOCOL}".encode():
            version = hello.decode("ascii", "replace").strip()
            raise _make_refusal(
                f"protocol {version[:40]} is not supported, expected covey/{PROTOCOL}: use the same version of covey everywhere"
            )
        line, newline, rest = rest.partition(b"\n")
        if not newline:
            if len(self._buffer) > LINE_MAX:
                raise _make_refusal("the handshake line is too long")
            return None
        words = line.decode("ascii", "replace").split()
        if len(words) != 2:
            raise _make_refusal("the handshake line has the wrong number of words")
        nonce, proof = words
        if self._secret and not hmac.compare_digest(
            proof.encode(), _compute_proof(self._secret, "node", self._nonce, nonce).encode()
        ):
            cause = "none was sent" if proof == "-" else "it differs"
            raise _make_refusal(f"wrong secret ({cause}): set COVEY_SECRET to the scheduler's")
        server_proof = _compute_proof(self._secret, "scheduler", self._nonce, nonce) if self._secret else "-"
        return f"ok {server_proof} {clock:.6f} {self._leader_token} {self._silence_s:g}\n".encode(), rest


class ClientHandshake:
    """The side of a handshake that connects. `where` names the peer in an error message. With `insist`, if this side
    has a secret, a peer that does not require it is refused."""

    def __init__(self, secret: str, *, insist: bool = False, where: str = "the scheduler") -> None:
        self._secret = secret
        self._requires_secret = insist and bool(secret)
        self._peer_description = where
        self._nonce = secrets.token_hex(16)
        self._server_nonce = ""
        self._secret_requested = False
        self._hello_received = False
        self._buffer = b""
        self.scheduler_clock = 0.0  # the scheduler's wall clock; 0 before the handshake is complete
        self.leader_token = 0  # the scheduler's fencing token
        self.silence_s = -1.0  # seconds without a message after which the scheduler is lost; negative: no limit

    def insist(self) -> None:
        """Refuse a peer that does not require the secret, if this side has one. Must be called before the peer's first line
        arrives."""
        self._requires_secret = bool(self._secret)

    def first_line(self) -> bytes:
        """Return the node's first line, with its newline."""
        return f"covey/{PROTOCOL}\n".encode()

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """Add received bytes. Return the bytes to send, maybe none, and the bytes after the handshake (None: it is incomplete).

        Raises `HandshakeError` if the peer has another protocol or version, sends an invalid line, refuses this side, or does
        not prove the secret, and `SecretNotRequired` if it does not require the secret on which this side insists.
        """
        self._buffer += data
        reply = b""
        if not self._hello_received:
            _reject_other_protocols(self._buffer)
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                return b"", None
            reply, self._buffer = self._reply_to_hello(line), rest
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            if len(self._buffer) > LINE_MAX:
                raise HandshakeError("the scheduler's handshake reply is too long")
            return reply, None
        self._check_result_line(line.decode("utf-8", "replace"))
        return reply, rest

    def _reply_to_hello(self, line: bytes) -> bytes:
        words = line.decode("ascii", "replace").split()
        if len(words) != 3 or words[2] not in ("secret", "open"):
            raise HandshakeError("invalid handshake line: the peer is another version of covey")
        if words[0] != f"covey/{PROTOCOL}":
            message = (
                f"the scheduler uses protocol {words[0]}, this is covey/{PROTOCOL}: use the same version of covey everywhere"
            )
            raise HandshakeError(message, final=True)
        self._server_nonce, self._secret_requested, self._hello_received = words[1], words[2] == "secret", True
        if self._requires_secret and not self._secret_requested:
            message = (
                f"{self._peer_description} does not require a join secret, but this process has one: check the "
                "address, or start what listens there with the same secret (COVEY_SECRET or COVEY_SECRET_FILE)"
            )
            raise SecretNotRequired(message, final=True)
        proof = (
            _compute_proof(self._secret, "node", self._server_nonce, self._nonce)
            if self._secret_requested and self._secret
            else "-"
        )
        return f"{self._nonce} {proof}\n".encode()

    def _check_result_line(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "no":
            raise HandshakeError(rest, final=True)
        words = rest.split()
        if kind != "ok" or len(words) != 4:
            raise HandshakeError("the scheduler's handshake reply is invalid")
        if self._secret_requested and not hmac.compare_digest(
            words[0].encode(), _compute_proof(self._secret, "scheduler", self._server_nonce, self._nonce).encode()
        ):
            raise HandshakeError("the peer does not have the secret: it is not this cluster's scheduler")
        try:
            self.scheduler_clock, self.leader_token, self.silence_s = float(words[1]), int(words[2]), float(words[3])
        except ValueError:
            raise HandshakeError("the scheduler's handshake reply is invalid") from None


def is_mindspore(data: bytes) -> bool:
    """Return whether a peer's first bytes are MindSpore's protocol; False for fewer than 4 bytes."""
    return data.startswith(_MINDSPORE_MAGIC)


def _compute_proof(secret: str, speaker: str, server_nonce: str, client_nonce: str) -> str:
    text = f"covey/{PROTOCOL}|{speaker}|{server_nonce}|{client_nonce}"
    return hmac.digest(secret.encode(), text.encode("utf-8", "replace"), "sha256").hex()


def _make_refusal(message: str) -> HandshakeError:
    return HandshakeError(message, f"no {message}\n".encode())


def _reject_other_protocols(data: bytes) -> None:
    """Raise `HandshakeError` if the bytes cannot be the beginning of a handshake."""
    if data[: len(_MAGIC)] == _MAGIC[: len(data)]:
        if b"\n" not in data[:LINE_MAX] and len(data) > LINE_MAX:
            raise HandshakeError("its handshake line is too long")
        return
    if is_mindspore(data):
        raise HandshakeError(MINDSPORE_PEER_REASON)
    if data[:1] == b"\x16" and (len(data) < 2 or data[1:2] == b"\x03"):
        raise HandshakeError("it uses TLS, but this side does not: give both sides the same TLS settings")
    if data.startswith(_HTTP_PREFIXES):
        body = b"This is a covey scheduler's cluster port, not its REST port.\n"
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        raise HandshakeError("it uses HTTP: the REST API has another port", head.encode() + body)
    if data[:1] in (b"\x15",):
        raise HandshakeError("it replies with a TLS alert: TLS is expected there")
    raise HandshakeError(f"it is not a covey peer: its first bytes are {data[:16]!r}")
