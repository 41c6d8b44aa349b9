"""The first lines of a connection: who speaks, which protocol, and the proof of a shared secret. No I/O.

    first:          covey/1                     the node
                    covey/1 NONCE secret        the scheduler ("open" instead of "secret" where none is asked for)
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
_MINDSPORE: Final = b"RPC0"  # begins every message between MindSpore's own processes
_HTTP: Final = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS ", b"DELETE ", b"PATCH ", b"CONNECT ", b"TRACE ", b"HTTP/")

SPEAKS_MINDSPORE: Final = (
    "it speaks MindSpore's own protocol, not covey's: start a MindSpore script with covey run --framework mindspore"
)


class GreetingError(PeerError):
    """The other side is not a peer. `reply` is what it may be told, in its own language where that is known.

    `final`: a peer it is, but one that will say the same the next time.
    """

    def __init__(self, sentence: str, reply: bytes = b"", *, final: bool = False) -> None:
        super().__init__(sentence, ExitCode.REFUSED)
        self.reply = reply
        self.final = final


class SecretNotRequired(GreetingError):
    """The other side requires no join secret, but this side has one that it insists on."""


class ServerGreeting:
    """The scheduler's side."""

    def __init__(self, secret: str, token: int = 0, silence_s: float = -1.0) -> None:
        self._secret = secret
        self._token = token  # of this scheduler as leader: it holds for everything said over this link
        self._silence_s = silence_s  # after which another one should be looked for; below 0: there is none
        self._nonce = secrets.token_hex(16)
        self._buffer = b""

    def opening(self) -> bytes:
        """What is said before anything is heard."""
        return f"covey/{PROTOCOL} {self._nonce} {'secret' if self._secret else 'open'}\n".encode()

    def feed(self, data: bytes, clock: float) -> tuple[bytes, bytes] | None:
        """None while the lines are incomplete; then the reply and what followed them."""
        self._buffer += data
        _refuse_strangers(self._buffer)
        hello, newline, rest = self._buffer.partition(b"\n")
        if newline and hello.strip() != f"covey/{PROTOCOL}".encode():
            said = hello.decode("ascii", "replace").strip()
            raise _no(f"protocol {said[:40]} is not spoken here, covey/{PROTOCOL} is: use the same version everywhere")
        line, newline, rest = rest.partition(b"\n")
        if not newline:
            if len(self._buffer) > LINE_MAX:
                raise _no("the greeting has no end")
            return None
        words = line.decode("ascii", "replace").split()
        if len(words) != 2:
            raise _no("the greeting has the wrong number of words")
        nonce, proof = words
        if self._secret and not hmac.compare_digest(proof.encode(), _proof(self._secret, "node", self._nonce, nonce).encode()):
            missing = "none was used" if proof == "-" else "it is another one"
            raise _no(f"wrong secret ({missing}): set COVEY_SECRET to the scheduler's")
        answer = _proof(self._secret, "scheduler", self._nonce, nonce) if self._secret else "-"
        return f"ok {answer} {clock:.6f} {self._token} {self._silence_s:g}\n".encode(), rest


class ClientGreeting:
    """A node's, an agent's or a visitor's side. `where` names the other side in an error."""

    def __init__(self, secret: str, *, insist: bool = False, where: str = "the scheduler") -> None:
        self._secret = secret
        self._insist = insist and bool(secret)
        self._where = where
        self._nonce = secrets.token_hex(16)
        self._theirs = ""
        self._asked = False
        self._said = False
        self._buffer = b""
        self.clock = 0.0  # the scheduler's wall clock, once greeted
        self.token = 0  # the scheduler's, as its leader
        self.silence_s = -1.0  # of the scheduler, after which another one is looked for

    def insist(self) -> None:
        """Refuse a peer that does not require the secret, if this side has one."""
        self._insist = bool(self._secret)

    def opening(self) -> bytes:
        """What is said before anything is heard."""
        return f"covey/{PROTOCOL}\n".encode()

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """What to send, and, once greeted, what followed the greeting."""
        self._buffer += data
        reply = b""
        if not self._said:
            _refuse_strangers(self._buffer)
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                return b"", None
            reply, self._buffer = self._answer(line), rest
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            if len(self._buffer) > LINE_MAX:
                raise GreetingError("the answer to the greeting has no end")
            return reply, None
        self._check(line.decode("utf-8", "replace"))
        return reply, rest

    def _answer(self, line: bytes) -> bytes:
        words = line.decode("ascii", "replace").split()
        if len(words) != 3 or words[2] not in ("secret", "open"):
            raise GreetingError("what answers there greets like covey, but not in a way this version understands")
        if words[0] != f"covey/{PROTOCOL}":
            sentence = f"the scheduler speaks {words[0]}, this is covey/{PROTOCOL}: use the same version everywhere"
            raise GreetingError(sentence, final=True)
        self._theirs, self._asked, self._said = words[1], words[2] == "secret", True
        if self._insist and not self._asked:
            sentence = (
                f"{self._where} does not require a join secret, but this process has one: check the address, or start what "
                "listens there with the same secret (COVEY_SECRET or COVEY_SECRET_FILE)"
            )
            raise SecretNotRequired(sentence, final=True)
        proof = _proof(self._secret, "node", self._theirs, self._nonce) if self._asked and self._secret else "-"
        return f"{self._nonce} {proof}\n".encode()

    def _check(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "no":
            raise GreetingError(rest, final=True)
        words = rest.split()
        if kind != "ok" or len(words) != 4:
            raise GreetingError("the scheduler's answer to the greeting makes no sense")
        if self._asked and not hmac.compare_digest(
            words[0].encode(), _proof(self._secret, "scheduler", self._theirs, self._nonce).encode()
        ):
            raise GreetingError("what answers there does not know the secret: it is not this cluster's scheduler")
        try:
            self.clock, self.token, self.silence_s = float(words[1]), int(words[2]), float(words[3])
        except ValueError:
            raise GreetingError("the scheduler's answer to the greeting makes no sense") from None


def is_mindspore(heard: bytes) -> bool:
    """Whether these first bytes are those of a node of MindSpore's."""
    return heard.startswith(_MINDSPORE)


def _proof(secret: str, speaker: str, server_nonce: str, client_nonce: str) -> str:
    text = f"covey/{PROTOCOL}|{speaker}|{server_nonce}|{client_nonce}"
    return hmac.digest(secret.encode(), text.encode("utf-8", "replace"), "sha256").hex()


def _no(sentence: str) -> GreetingError:
    return GreetingError(sentence, f"no {sentence}\n".encode())


def _refuse_strangers(heard: bytes) -> None:
    """Raise for what can no longer become a greeting, saying what it looks like."""
    if heard[: len(_MAGIC)] == _MAGIC[: len(heard)]:
        if b"\n" not in heard[:LINE_MAX] and len(heard) > LINE_MAX:
            raise GreetingError("its greeting has no end")
        return
    if is_mindspore(heard):
        raise GreetingError(SPEAKS_MINDSPORE)
    if heard[:1] == b"\x16" and (len(heard) < 2 or heard[1:2] == b"\x03"):
        raise GreetingError("it speaks TLS, and this side does not: give both sides the same TLS settings")
    if heard.startswith(_HTTP):
        body = b"This is a covey scheduler's cluster port, not its REST port.\n"
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        raise GreetingError("it speaks HTTP: the REST API has a port of its own", head.encode() + body)
    if heard[:1] in (b"\x15",):
        raise GreetingError("it answers with a TLS alert: TLS is expected there")
    raise GreetingError(f"it is not a covey peer: its first bytes are {heard[:16]!r}")
