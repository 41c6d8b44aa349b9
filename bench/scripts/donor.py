"""Serves a state of some MB, by covey's transfer and by a plain socket: donor.py MB

Prints `PORT TOKEN RAW_PORT`, and exits at the end of its input.
"""

import socket
import sys
import threading

import torch

from covey.training.state.transfer import DonatedState, TransferServer

PARTS = 16
ADDRESS = "127.0.0.1"


def a_state(megabytes: int) -> dict[str, torch.Tensor]:
    return {f"layer {n}": torch.ones(megabytes * 250_000 // PARTS) for n in range(PARTS)}


def serve(plain: socket.socket, views: list[memoryview]) -> None:
    while True:
        connection, _ = plain.accept()
        with connection:
            for view in views:
                connection.sendall(view)


def main() -> None:
    torch.set_num_threads(1)
    state = a_state(int(sys.argv[1]))
    given = TransferServer(ADDRESS, state=lambda _: DonatedState(step=1, state=state))
    plain = socket.create_server((ADDRESS, 0))
    views = [memoryview(tensor.numpy()).cast("B") for tensor in state.values()]
    threading.Thread(target=serve, args=(plain, views), daemon=True).start()
    print(given.port, given.token, plain.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
