"""A process of `bench.params`: a parameter server, or a server that sends back what it receives.

rows.py server RANK SERVERS COPIES     prints its endpoint, reads those of all servers, serves until the end of its input
rows.py echo                           prints its port; on one connection: reads a size and that many bytes, sends them back
"""

from __future__ import annotations

import socket
import sys

import msgspec

from covey.core.parameter_server.settings import ServingSettings
from covey.parameter_server.discovery import ServerEndpoint
from covey.parameter_server.server import ParameterServer


def serve(rank: int, servers: int, copies: int) -> None:
    peers: list[ServerEndpoint] = []
    serving = ServingSettings(servers=servers, workers=1, copies=copies)
    server = ParameterServer("127.0.0.1", serving, rank, 0, lambda number: peers[number])
    print(msgspec.json.encode(server.endpoint).decode(), flush=True)
    peers += msgspec.json.decode(sys.stdin.readline(), type=list[ServerEndpoint])
    server.recover()
    sys.stdin.read()


def echo() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    memory = memoryview(bytearray(200_000_000))
    while head := connection.recv(8, socket.MSG_WAITALL):
        size = int.from_bytes(head, "big")
        filled = 0
        while filled < size:
            filled += connection.recv_into(memory[filled:size])
        connection.sendall(memory[:size])


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(*map(int, sys.argv[2:]))
    else:
        echo()
