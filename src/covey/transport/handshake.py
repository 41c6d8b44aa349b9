"""The first lines of a connection: who speaks, which protocol, and the proof of a shared secret. No I/O.

    first:          covey/2                     the node
                    covey/2 NONCE secret        the scheduler ("open" instead of "secret" where none is asked for)
    then the node:  NONCE PROOF
    the scheduler:  ok PROOF CLOCK TOKEN SILENCE    or: no SENTENCE

A proof is an HMAC over both nonces; the secret itself is never sent, and both sides prove that they know it. The lines are
text, so that `telnet HOST PORT` shows what answers there, and a node does not wait for the scheduler's line, so that a peer
that expected TLS or something else altogether is known at once. The scheduler sends its line after the peer's first bytes, or
after a second without any, because a MindSpore process closes a connection that receives bytes before it has sent its own.
Frames follow.
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
    "it speaks MindSpore's own protocol, not covey's: start a MindSpore script with covey run --framework mindspore"
)


class HandshakeError(PeerError):
    """The other side is not a peer. `reply` is what it may be told, in its own language where that is known.

    `final`: a peer it is, but one that will say the same the next time.
    """

    def __init__(self, sentence: str, reply: bytes = b"", *, final: bool = False) -> None:
        super().__init__(sentence, ExitCode.REFUSED)
        self.reply = reply
        self.final = final


class SecretNotRequired(HandshakeError):
    """The other side requires no join secret, but this side has one that it insists on."""


class ServerHandshake:
    """The scheduler's side."""

    def __init__(self, secret: str, token: int = 0, silence_s: float = -1.0) -> None:
        self._secret = secret
        self._leader_token = token  # of this scheduler as leader: it holds for everything said over this link
        self._silence_s = silence_s  # after which another one should be looked for; below 0: there is none
        self._nonce = secrets.token_hex(16)
        self._buffer = b""

    def first_line(self) -> bytes:
        """What is said before anything is heard."""
        return f"covey/{PROTOCOL} {self._nonce} {'secret' if self._secret else 'open'}\n".encode()

    def feed(self, data: bytes, clock: float) -> tuple[bytes, bytes] | None:
        """None while the lines are incomplete; then the reply and what followed them."""
        self._buffer += data
        _reject_other_protocols(self._buffer)
        hello, newline, rest = self._buffer.partition(b"\n")
        if newline and hello.strip() != f"covey/{PROTOCOL}".encode():
            said = hello.decode("ascii", "replace").strip()
            raise _make_refusal(
                f"protocol {said[:40]} is not spoken here, covey/{PROTOCOL} is: use the same version everywhere"
            )
        line, newline, rest = rest.partition(b"\n")
        if not newline:
            if len(self._buffer) > LINE_MAX:
                raise _make_refusal("the greeting has no end")
            return None
        words = line.decode("ascii", "replace").split()
        if len(words) != 2:
            raise _make_refusal("the greeting has the wrong number of words")
        nonce, proof = words
        if self._secret and not hmac.compare_digest(
            proof.encode(), _compute_proof(self._secret, "node", self._nonce, nonce).encode()
        ):
            missing = "none was used" if proof == "-" else "it is another one"
            raise _make_refusal(f"wrong secret ({missing}): set COVEY_SECRET to the scheduler's")
        answer = _compute_proof(self._secret, "scheduler", self._nonce, nonce) if self._secret else "-"
        return f"ok {answer} {clock:.6f} {self._leader_token} {self._silence_s:g}\n".encode(), rest


class ClientHandshake:
    """A node's, an agent's or a visitor's side. `where` names the other side in an error."""

    def __init__(self, secret: str, *, insist: bool = False, where: str = "the scheduler") -> None:
        self._secret = secret
        self._requires_secret = insist and bool(secret)
        self._peer_description = where
        self._nonce = secrets.token_hex(16)
        self._server_nonce = ""
        self._secret_requested = False
        self._hello_received = False
        self._buffer = b""
        self.scheduler_clock = 0.0  # the scheduler's wall clock, once greeted
        self.leader_token = 0  # the scheduler's, as its leader
        self.silence_s = -1.0  # of the scheduler, after which another one is looked for

    def insist(self) -> None:
        """Refuse a peer that does not require the secret, if this side has one."""
        self._requires_secret = bool(self._secret)

    def first_line(self) -> bytes:
        """What is said before anything is heard."""
        return f"covey/{PROTOCOL}\n".encode()

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """What to send, and, once greeted, what followed the greeting."""
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
                raise HandshakeError("the answer to the greeting has no end")
            return reply, None
        self._check_result_line(line.decode("utf-8", "replace"))
        return reply, rest

    def _reply_to_hello(self, line: bytes) -> bytes:
        words = line.decode("ascii", "replace").split()
        if len(words) != 3 or words[2] not in ("secret", "open"):
            raise HandshakeError("what answers there greets like covey, but not in a way this version understands")
        if words[0] != f"covey/{PROTOCOL}":
            sentence = f"the scheduler speaks {words[0]}, this is covey/{PROTOCOL}: use the same version everywhere"
            raise HandshakeError(sentence, final=True)
        self._server_nonce, self._secret_requested, self._hello_received = words[1], words[2] == "secret", True
        if self._requires_secret and not self._secret_requested:
            sentence = (
                f"{self._peer_description} does not require a join secret, but this process has one: check the "
                "address, or start what "
                "listens there with the same secret (COVEY_SECRET or COVEY_SECRET_FILE)"
            )
            raise SecretNotRequired(sentence, final=True)
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
            raise HandshakeError("the scheduler's answer to the greeting makes no sense")
        if self._secret_requested and not hmac.compare_digest(
            words[0].encode(), _compute_proof(self._secret, "scheduler", self._server_nonce, self._nonce).encode()
        ):
            raise HandshakeError("what answers there does not know the secret: it is not this cluster's scheduler")
        try:
            self.scheduler_clock, self.leader_token, self.silence_s = float(words[1]), int(words[2]), float(words[3])
        except ValueError:
            raise HandshakeError("the scheduler's answer to the greeting makes no sense") from None


def is_mindspore(heard: bytes) -> bool:
    """Whether these first bytes are those of a node of MindSpore's."""
    return heard.startswith(_MINDSPORE_MAGIC)


def _compute_proof(secret: str, speaker: str, server_nonce: str, client_nonce: str) -> str:
    text = f"covey/{PROTOCOL}|{speaker}|{server_nonce}|{client_nonce}"
    return hmac.digest(secret.encode(), text.encode("utf-8", "replace"), "sha256").hex()


def _make_refusal(sentence: str) -> HandshakeError:
    return HandshakeError(sentence, f"no {sentence}\n".encode())


def _reject_other_protocols(heard: bytes) -> None:
    """Raise for what can no longer become a greeting, saying what it looks like."""
    if heard[: len(_MAGIC)] == _MAGIC[: len(heard)]:
        if b"\n" not in heard[:LINE_MAX] and len(heard) > LINE_MAX:
            raise HandshakeError("its greeting has no end")
        return
    if is_mindspore(heard):
        raise HandshakeError(MINDSPORE_PEER_REASON)
    if heard[:1] == b"\x16" and (len(heard) < 2 or heard[1:2] == b"\x03"):
        raise HandshakeError("it speaks TLS, and this side does not: give both sides the same TLS settings")
    if heard.startswith(_HTTP_PREFIXES):
        body = b"This is a covey scheduler's cluster port, not its REST port.\n"
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        raise HandshakeError("it speaks HTTP: the REST API has a port of its own", head.encode() + body)
    if heard[:1] in (b"\x15",):
        raise HandshakeError("it answers with a TLS alert: TLS is expected there")
    raise HandshakeError(f"it is not a covey peer: its first bytes are {heard[:16]!r}")
