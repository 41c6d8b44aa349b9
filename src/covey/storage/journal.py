"""The scheduler's journal in SQLite: the records that a restarted scheduler reads, and the event log.

A commit that returned survives kill -9 and a power cut. SQLite's write-ahead log is not used, because the loss of its second
file would lose commits. The journal keeps the last record per key and the last `EVENTS_MAX` events. A lock file beside it keeps
out a second scheduler. Schedulers with standbys share the lock; a fencing token then keeps out former leaders. A new journal is
written under another name and then renamed, so an empty file means damage.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from covey.atomic_file import replace_durably
from covey.core.event_log import Event, EventRow, event_row
from covey.core.incidents import INCIDENTS_MAX, Incident
from covey.core.types import AgentRecord, ClusterRecord, MemberRecord, Phase, Record, Role
from covey.errors import ExitCode, StoreError

FORMAT = 2
EVENTS_MAX = 100_000
_SCHEMA = f"""
create table facts (key text primary key, value blob not null) without rowid;
create table story (seq integer primary key, at real, node text, what text, reason text, level text, outcome text);
pragma user_version = {FORMAT};
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class FencedError(StoreError):
    """Another leader, with the fencing token `newest_token`, has written the journal, so this scheduler must not write it."""

    def __init__(self, newest: int, token: int) -> None:
        super().__init__(f"another scheduler leads, with fencing token {newest}: this one has {token}")
        self.newest_token = newest


class Journal:
    """An open journal, made by `open_journal`. It holds the lock until it is closed. If it has a fencing token, commits fail
    while a higher token is stored."""

    def __init__(self, path: Path, lock: int, database: sqlite3.Connection) -> None:
        self.path = path
        self._lock_fd = lock
        self._database = database
        self._token = 0  # fencing token; 0: the journal is not shared
        self._pending_events: list[EventRow] = []

    def claim_token(self, token: int) -> None:
        """Store the leader's token, so that earlier leaders cannot write any more. Raises `FencedError` if a higher token is
        stored, and `StoreError` if the journal cannot be written."""
        self._token = token
        self.commit()

    def read(self) -> tuple[Record, ...]:
        """Return all committed records, ordered by key. Raises `StoreError` if the journal cannot be read."""
        try:
            return tuple(_decode(value) for (value,) in self._database.execute("select value from facts order by key"))
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise _damaged_error(self.path, error) from None

    def append_event(self, event: Event) -> None:
        """Add an event to those that the next commit writes; drop it if there are already `EVENTS_MAX` of them."""
        if len(self._pending_events) < EVENTS_MAX:
            self._pending_events.append(event_row(event))

    def rewrite_if_removed(self) -> None:
        """Write the journal again if its file was removed, for example by a cleaner of temporary files.

        Does nothing if a token was claimed, because another scheduler may have replaced the journal. Raises `StoreError` if the
        journal cannot be written, or if its lock file is locked: by another scheduler, or by this one if only the journal was
        removed.
        """
        if self._token or self.path.exists():
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = _acquire_lock(self.path, shared=False)
            try:
                _create_journal(self.path, self._database.backup)
                database = _open_database(self.path)
            except BaseException:
                os.close(lock)
                raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the journal {self.path} was removed and cannot be written again ({error}): make its directory writable"
            ) from None
        self._database.close()
        os.close(self._lock_fd)
        self._lock_fd, self._database = lock, database

    def commit(self, records: Iterable[Record] = ()) -> None:
        """Write records and pending events to the disk in one transaction, after `rewrite_if_removed`.

        Raises `FencedError` if a higher token is stored, and `StoreError` if the write fails. The next commit then writes these
        events, but not these records.
        """
        self.rewrite_if_removed()
        database = self._database
        try:
            database.execute("begin immediate")
            self._check_token()
            database.executemany(
                "insert into facts values (?, ?) on conflict (key) do update set value = excluded.value",
                ((record_key(record), _encode(record)) for record in records),
            )
            database.executemany(
                "insert into story (at, node, what, reason, level, outcome) values (?, ?, ?, ?, ?, ?)", self._pending_events
            )
            database.execute("delete from story where seq <= (select max(seq) from story) - ?", (EVENTS_MAX,))
            database.execute("commit")
            self._pending_events.clear()
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                database.execute("rollback")
            raise StoreError(
                f"cannot write the journal {self.path} ({error}): free the disk or make it writable;"
                " until then no change takes effect"
            ) from None

    def _check_token(self) -> None:
        """Do nothing if this journal has no token. Raise `FencedError`, after a rollback, if a higher token is stored; replace
        a lower stored token by this journal's. Must be called in a write transaction."""
        if not self._token:
            return
        newest = self._database.execute("pragma application_id").fetchone()[0]
        if newest > self._token:
            self._database.execute("rollback")
            raise FencedError(newest, self._token)
        if newest < self._token:
            self._database.execute(f"pragma application_id = {self._token:d}")

    def read_events(self, limit: int = 1000) -> list[EventRow]:
        """Return the last `limit` committed events, oldest first. Raises `sqlite3.Error` if they cannot be read."""
        rows = self._database.execute(
            "select at, node, what, reason, level, outcome from story order by seq desc limit ?", (limit,)
        ).fetchall()
        return rows[::-1]

    def close(self) -> None:
        """Write the pending events, close the database and release the lock. Events that cannot be written are lost."""
        with contextlib.suppress(StoreError):  # the event log is informational: with a full disk only its last events are lost
            if self._pending_events:
                self.commit()
        self._database.close()
        os.close(self._lock_fd)


def open_journal(
    folder: str | os.PathLike[str], *, job: str, worker_num: int, server_num: int, token: int = 0, follows: bool = False
) -> Journal:
    """Open the journal `scheduler.journal` in a directory; create both if they are missing.

    `token` is the fencing token if schedulers share the journal, else 0. `follows`: another scheduler led before. If a new
    cluster may replace the recorded one (`may_start_new_cluster`), the journal is renamed to scheduler.journal.CLUSTER_ID and a
    new one is created; else it must be of this job (`check_job`). Raises `FencedError` if a higher token is stored, and
    `StoreError` if another scheduler holds the lock or the journal is not usable.
    """
    path = Path(folder) / "scheduler.journal"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire_lock(path, shared=token > 0)
        if not path.exists():
            _create_journal(path)
    except OSError as error:
        raise StoreError(f"cannot use the journal directory {folder}: {error.strerror}") from None
    except sqlite3.Error as error:
        raise StoreError(f"cannot create a journal in {folder}: {error}") from None
    journal = Journal(path, lock, _open_database(path))
    if token:
        try:
            journal.claim_token(token)
        except StoreError:
            journal.close()
            raise
    cluster = next((r for r in journal.read() if isinstance(r, ClusterRecord)), None)
    if cluster is None:
        return journal
    if may_start_new_cluster(cluster, follows=follows):
        journal.close()
        path.rename(path.with_name(f"{path.name}.{cluster.cluster_id}"))
        return open_journal(folder, job=job, worker_num=worker_num, server_num=server_num, token=token)
    try:
        check_job(cluster, f"the journal {path}", job=job, worker_num=worker_num, server_num=server_num)
    except StoreError:
        journal.close()
        raise
    return journal


def may_start_new_cluster(cluster: ClusterRecord, *, follows: bool) -> bool:
    """Return whether the recorded cluster has ended and its outcome need not be sent any more. False if this scheduler
    `follows` another leader, because it must then end that leader's cluster."""
    return cluster.phase is Phase.ENDED and not follows and (cluster.ended is None or cluster.ended.told)


def check_job(cluster: ClusterRecord, where: str, *, job: str, worker_num: int, server_num: int) -> None:
    """Raise `StoreError` if the recorded cluster has another job name, or another configured number of workers or parameter
    servers. `where` names the journal in the message."""
    configured = {"job": job, "MS_WORKER_NUM": worker_num, "MS_SERVER_NUM": server_num}
    recorded = {"job": cluster.job, "MS_WORKER_NUM": cluster.worker_num, "MS_SERVER_NUM": cluster.server_num}
    differences = [
        f"{name} is {recorded[name]} there and {configured[name]} here"
        for name in configured
        if configured[name] != recorded[name]
    ]
    if differences:
        raise StoreError(
            f"{where} belongs to another job ({'; '.join(differences)}):"
            " set MS_RECOVERY_PATH to another directory, or move the journal away",
            ExitCode.BAD_JOURNAL,
        )


def has_resumable_journal(folder: Path, job: str) -> bool:
    """Return whether the directory has a journal of this job whose cluster has not ended. The journal is not changed.

    Return True if the journal cannot be read because its writer was killed during a commit, and False if it is damaged.
    """
    path = folder / "scheduler.journal"
    try:
        if not path.exists() or path.stat().st_size == 0:
            return False
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        with contextlib.closing(database):
            records = [_decode(value) for (value,) in database.execute("select value from facts where key = 'cluster'")]
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK  # the journal's writer was killed during a commit
    except (OSError, sqlite3.Error, msgspec.MsgspecError):
        return False
    return any(isinstance(r, ClusterRecord) and r.job == job and r.phase is not Phase.ENDED for r in records)


def record_key(record: Record) -> str:
    if isinstance(record, MemberRecord):
        group = "server" if record.role.group is Role.PSERVER else record.role
        return f"member/{group}/{record.rank:08}"
    if isinstance(record, Incident):
        return f"incident/{record.number % INCIDENTS_MAX:08}"
    return f"agent/{record.id}" if isinstance(record, AgentRecord) else "cluster"


def _acquire_lock(path: Path, *, shared: bool) -> int:
    """Lock the file scheduler.lock beside the journal and return its descriptor.

    Schedulers with standbys share the lock, because a stopped leader must not block its successor.
    """
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise StoreError(
            f"another scheduler uses the journal {path}: end it, or set MS_RECOVERY_PATH to another directory",
            ExitCode.BAD_JOURNAL,
        ) from None
    return lock


def _create_journal(path: Path, fill: Callable[[sqlite3.Connection], object] = lambda new: new.executescript(_SCHEMA)) -> None:
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as database:
        fill(database)
    replace_durably(temporary, path)


def _open_database(path: Path) -> sqlite3.Connection:
    if path.stat().st_size == 0:
        raise _damaged_error(path, "it is empty")
    try:
        _check_journal(path)
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("pragma journal_mode = truncate")
        database.execute("pragma synchronous = full")
    except sqlite3.Error as error:
        if "readonly" in str(error) or "read-only" in str(error):
            raise StoreError(f"the journal {path} is read-only: make it writable") from None
        raise _damaged_error(path, error) from None
    return database


def _check_journal(path: Path) -> None:
    """Check a journal without changing it. If its writer was killed during a commit, check a copy, because SQLite must first
    roll that commit back."""
    try:
        _check_database(path, "ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        with tempfile.TemporaryDirectory(prefix="covey-journal-") as folder:
            for file in (path, path.with_name(f"{path.name}-journal")):
                shutil.copy(file, folder)
            _check_database(Path(folder) / path.name, "rw")


def _check_database(path: Path, mode: str) -> None:
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    try:
        version = database.execute("pragma user_version").fetchone()[0]
        verdict = database.execute("pragma quick_check").fetchone()[0]
    finally:
        database.close()
    if version < 1:
        raise _damaged_error(path, "it is not a journal of covey")
    if version != FORMAT:
        raise other_format_error(f"the journal {path}", version)
    if verdict != "ok":
        raise _damaged_error(path, verdict)


def other_format_error(journal: str, version: int) -> StoreError:
    """Return the error for a journal whose format `version` is not supported. `journal` names it in the message."""
    advice = "finish that run with the version of covey that began it, or move the journal away to start a new cluster"
    sentence = f"{journal} has format {version}, and this version of covey reads {FORMAT}: {advice}; it was not changed"
    return StoreError(sentence, ExitCode.BAD_JOURNAL)


def _damaged_error(path: Path, cause: object) -> StoreError:
    message = f"the journal {path} is damaged ({cause}): move it away to start a new cluster; it was not changed"
    return StoreError(message, ExitCode.BAD_JOURNAL)
