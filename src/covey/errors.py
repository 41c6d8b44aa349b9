"""What can go wrong, who must act, and with which code the process ends.

An error is one sentence: what, where, what to do. Exit codes come in families of ten; a training process that failed by
itself keeps its own code (128 + n for signal n), so these are only ours.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Numbered by family: 1x you, 2x the cluster did not form, 3x a peer, 4x the disk."""

    OK = 0
    BAD_SETTING = 10
    PORT_IN_USE = 11
    BAD_TLS = 12
    BAD_SCRIPT = 13
    NOT_FORMED = 20
    REFUSED = 21
    UNREACHABLE = 22
    PEER_FAILED = 30
    SCHEDULER_LOST = 31
    STOPPED = 32
    ROWS_LOST = 33
    BAD_JOURNAL = 40
    DISK = 41


EXIT_CODE_HELP: dict[ExitCode, str] = {
    ExitCode.BAD_SETTING: "a setting, variable or option has a value that is not allowed: correct it",
    ExitCode.PORT_IN_USE: "a port given by you is taken: choose another or end its holder",
    ExitCode.BAD_TLS: "a certificate, key, password or list for TLS is not usable",
    ExitCode.BAD_SCRIPT: "the script or command to run cannot be found",
    ExitCode.NOT_FORMED: "too few nodes came in time",
    ExitCode.REFUSED: "the scheduler refused this node: its reason says why",
    ExitCode.UNREACHABLE: "no scheduler answered at the given address",
    ExitCode.PEER_FAILED: "another node failed first: the report names it",
    ExitCode.SCHEDULER_LOST: "the scheduler is gone and did not come back",
    ExitCode.STOPPED: "the cluster was asked to stop",
    ExitCode.ROWS_LOST: "a parameter server and the holder of its copy died together",
    ExitCode.BAD_JOURNAL: "the journal is damaged, or belongs to another job",
    ExitCode.DISK: "the disk is full or read-only",
}


class CoveyError(Exception):
    """One sentence for a person, and the code the process ends with."""

    exit_code: int = ExitCode.BAD_SETTING

    def __init__(self, sentence: str, exit_code: int | None = None) -> None:
        super().__init__(sentence)
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(CoveyError):
    """You asked for something that cannot be: change the setting, the option or the call."""


class PeerError(CoveyError):
    """The other side misbehaved, refused or went away."""

    exit_code = ExitCode.REFUSED


class StoreError(CoveyError):
    """What must outlive the process cannot be written or read."""

    exit_code = ExitCode.DISK
