"""Frames: the length of the message in 4 bytes (big-endian), then the message as msgpack of a tagged Struct. No I/O."""

from __future__ import annotations

import threading
from typing import Any, Final

import msgspec

from covey.core.messages import FromAgent, FromChild, FromNode, FromScheduler, LastHeardRequest, Message
from covey.errors import PeerError

FRAME_MAX: Final = 16 * 1024 * 1024  # bytes of a received message; a view of 50,000 nodes fits
HEADER_BYTES: Final = 4

_encoder = msgspec.msgpack.Encoder()
from_node_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(FromNode)
from_scheduler_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(FromScheduler)
from_child_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(FromChild | LastHeardRequest)
from_agent_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(FromAgent)


class _LastFrame(threading.local):
    """The last frame encoded on this thread, so that a message sent to many nodes in a row is encoded once."""

    message: Message | None = None
    data = b""


_last_frame = _LastFrame()


def encode_frame(message: Message) -> bytes:
    """Return the frame of a message. Its size is not limited to `FRAME_MAX`."""
    if message is not _last_frame.message:
        body = _encoder.encode(message)
        _last_frame.message, _last_frame.data = message, len(body).to_bytes(HEADER_BYTES, "big") + body
    return _last_frame.data


class FrameDecoder:
    """Incremental decoder of a stream of frames, each with a message of at most `limit` bytes."""

    __slots__ = ("_buffer", "_decoder", "_limit")

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any], limit: int = FRAME_MAX) -> None:
        self._decoder = decoder
        self._limit = limit
        self._buffer = b""

    def feed(self, data: bytes) -> list[Any]:
        """Add received bytes and return the messages that are now complete, maybe none. Raises `PeerError` for an invalid or
        too large message; earlier messages in `data` are then lost, and the decoder must not be used again."""
        buffer = self._buffer + data if self._buffer else data
        messages: list[Any] = []
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + HEADER_BYTES], "big")
            if size > self._limit:
                raise PeerError(f"a message of {size} bytes exceeds the limit of {self._limit} bytes")
            end = start + HEADER_BYTES + size
            if len(buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(buffer[start + HEADER_BYTES : end]))
            # msgspec does not convert the last two to DecodeError.
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise PeerError(f"invalid message: {error}") from None
            start = end
        self._buffer = buffer[start:]
        return messages
