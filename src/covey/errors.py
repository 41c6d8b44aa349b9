"""Exceptions with messages for users, and the exit codes of covey."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes that covey defines. `EXIT_CODE_HELP` has the meanings of all except OK."""

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
    ExitCode.BAD_SETTING: "a setting, variable or option is invalid: correct it",
    ExitCode.PORT_IN_USE: "a given port is in use: choose another, or end the process that uses it",
    ExitCode.BAD_TLS: "a certificate, key, password or revocation list for TLS is not usable",
    ExitCode.BAD_SCRIPT: "the script or command cannot be found or read",
    ExitCode.NOT_FORMED: "too few nodes registered in time",
    ExitCode.REFUSED: "the scheduler refused this node, with a reason",
    ExitCode.UNREACHABLE: "no scheduler replied at the given address",
    ExitCode.PEER_FAILED: "another node failed first; the report names it",
    ExitCode.SCHEDULER_LOST: "the scheduler was lost and did not return",
    ExitCode.STOPPED: "the cluster was stopped on request",
    ExitCode.ROWS_LOST: "a parameter server and its replica holder died together",
    ExitCode.BAD_JOURNAL: "the journal is damaged, or belongs to another job",
    ExitCode.DISK: "the disk is full or read-only",
}


class CoveyError(Exception):
    """Base class of covey's errors for users: a message for the user, and the exit code of a process that the error ends."""

    exit_code: int = ExitCode.BAD_SETTING

    def __init__(self, sentence: str, exit_code: int | None = None) -> None:
        super().__init__(sentence)
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(CoveyError):
    """A request that cannot be carried out as given, such as an invalid setting, option or call."""


class PeerError(CoveyError):
    """Another process refused a request, failed, is unreachable, or violated the protocol."""

    exit_code = ExitCode.REFUSED


class StoreError(CoveyError):
    """Persistent data cannot be written or read."""

    exit_code = ExitCode.DISK
