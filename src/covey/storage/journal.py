"""The scheduler's journal: what a restarted scheduler must know, and the story people may read.

SQLite, synchronous: a commit that returned survives kill -9 and a power cut. All of it lies in one file, which a write-ahead
log would not give: a lost second file would take back what was promised. The last record per place is kept; the story is a
bounded list of events. One process holds a journal at a time (a lock beside it); where there are standbys they share the
lock, and the newest leader's token decides. A journal is created whole under another name and renamed, so an empty or cut
file is damage, never a beginning.
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

FORMAT = 1
EVENTS_MAX = 100_000  # events kept
_SCHEMA = f"""
create table facts (key text primary key, value blob not null) without rowid;
create table story (
  seq integer primary key, at real, node text, what text, reason text, level text, outcome text not null default ''
);
pragma user_version = {FORMAT};
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class FencedError(StoreError):
    """Another scheduler leads, or has led since, by the token `newest`: what this one wants to write comes too late."""

    def __init__(self, newest: int, token: int) -> None:
        super().__init__(f"another scheduler leads, with token {newest}: this one's is {token}")
        self.newest_token = newest


class Journal:
    """Open one with `open_journal`. It is held by a lock, and, where several schedulers share that, by the leader's token."""

    def __init__(self, path: Path, lock: int, database: sqlite3.Connection) -> None:
        self.path = path
        self._lock_fd = lock
        self._database = database
        self._token = 0
        self._pending_events: list[EventRow] = []

    def claim_token(self, token: int) -> None:
        """From now on only the leader with this token writes."""
        self._token = token
        self.commit()

    def read(self) -> tuple[Record, ...]:
        """Everything the scheduler knew."""
        try:
            return tuple(_decode(value) for (value,) in self._database.execute("select value from facts order by key"))
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise _damaged_error(self.path, error) from None

    def append_event(self, event: Event) -> None:
        """Add an event to the story; it is written with the next commit."""
        if len(self._pending_events) < EVENTS_MAX:
            self._pending_events.append(event_row(event))

    def rewrite_if_removed(self) -> None:
        """Write the journal anew where somebody has removed it, as what clears temporary folders does with a file that nobody
        has touched for days. Raises `StoreError`. Not with a token: another scheduler may have done so, or begun a new one."""
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
            raise StoreError(f"the journal {self.path} was removed and cannot be written anew ({error})") from None
        self._database.close()
        os.close(self._lock_fd)
        self._lock_fd, self._database = lock, database

    def commit(self, records: Iterable[Record] = ()) -> None:
        """Make records (and the story so far) durable. Raises `StoreError`; nothing of this commit is then written."""
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
                f"the journal {self.path} cannot be written ({error}): free the disk or make it writable;"
                " until then nothing new is promised"
            ) from None

    def _check_token(self) -> None:
        """Inside the transaction, so that nobody can be stopped between looking and writing."""
        if not self._token:
            return
        newest = self._database.execute("pragma application_id").fetchone()[0]
        if newest > self._token:
            self._database.execute("rollback")
            raise FencedError(newest, self._token)
        if newest < self._token:
            self._database.execute(f"pragma application_id = {self._token:d}")

    def read_events(self, limit: int = 1000) -> list[EventRow]:
        """The newest events, oldest first."""
        rows = self._database.execute(
            "select at, node, what, reason, level, outcome from story order by seq desc limit ?", (limit,)
        ).fetchall()
        return rows[::-1]

    def close(self) -> None:
        """Write what is left of the story and let go."""
        with contextlib.suppress(StoreError):  # the story is for people; a full disk at the end loses only its last lines
            if self._pending_events:
                self.commit()
        self._database.close()
        os.close(self._lock_fd)


def open_journal(
    folder: str | os.PathLike[str], *, job: str, worker_num: int, server_num: int, token: int = 0, follows: bool = False
) -> Journal:
    """The journal of this job in a folder, created if there is none. Refuses another job's, and a damaged one. `token`: of the
    leader who opens it, where several schedulers share it; `follows`: another led before."""
    path = Path(folder) / "scheduler.journal"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire_lock(path, shared=token > 0)
        if not path.exists():
            _create_journal(path)
    except OSError as error:
        raise StoreError(f"the folder {folder} for the journal is not usable: {error.strerror}") from None
    except sqlite3.Error as error:
        raise StoreError(f"no journal can be made in {folder}: {error}") from None
    journal = Journal(path, lock, _open_database(path))
    if token:
        try:
            journal.claim_token(token)
        except StoreError:
            journal.close()
            raise
    kept = next((r for r in journal.read() if isinstance(r, ClusterRecord)), None)
    if kept is None:
        return journal
    if may_start_new_cluster(kept, follows=follows):
        journal.close()
        path.rename(path.with_name(f"{path.name}.{kept.cluster_id}"))
        return open_journal(folder, job=job, worker_num=worker_num, server_num=server_num, token=token)
    try:
        check_job(kept, f"the journal {path}", job=job, worker_num=worker_num, server_num=server_num)
    except StoreError:
        journal.close()
        raise
    return journal


def may_start_new_cluster(kept: ClusterRecord, *, follows: bool) -> bool:
    """Whether the next cluster may begin: this one has ended, and everyone was told. Who `follows` a leader that was lost ends
    what that one led, and begins nothing."""
    return kept.phase is Phase.ENDED and not follows and (kept.ended is None or kept.ended.told)


def check_job(kept: ClusterRecord, where: str, *, job: str, worker_num: int, server_num: int) -> None:
    """A journal of another job, or of a cluster of another size, is not taken over."""
    ours = {"job": job, "MS_WORKER_NUM": worker_num, "MS_SERVER_NUM": server_num}
    theirs = {"job": kept.job, "MS_WORKER_NUM": kept.worker_num, "MS_SERVER_NUM": kept.server_num}
    differences = [f"{name} is {theirs[name]} there and {ours[name]} here" for name in ours if ours[name] != theirs[name]]
    if differences:
        raise StoreError(
            f"{where} belongs to another job ({'; '.join(differences)}):"
            " set MS_RECOVERY_PATH to another folder, or move the journal away",
            ExitCode.BAD_JOURNAL,
        )


def has_resumable_journal(folder: Path, job: str) -> bool:
    """Whether a cluster of this job that has not ended can be taken up there. Nothing is changed by looking."""
    path = folder / "scheduler.journal"
    try:
        if not path.exists() or path.stat().st_size == 0:
            return False
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        with contextlib.closing(database):
            records = [_decode(value) for (value,) in database.execute("select value from facts where key = 'cluster'")]
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK  # its writer was killed in the middle of a commit
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
    """Hold the lock beside the journal; the kernel lets go of it when this process ends. Leaders share it: one that is stopped
    must not keep its successor out, but a scheduler without standbys knows nothing of tokens."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise StoreError(
            f"another scheduler holds the journal {path}: end it, or set MS_RECOVERY_PATH to another folder",
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
        if "outcome" not in {column[1] for column in database.execute("pragma table_info(story)")}:
            database.execute("alter table story add column outcome text not null default ''")  # written by covey 0.1.0
    except sqlite3.Error as error:
        if "readonly" in str(error) or "read-only" in str(error):
            raise StoreError(f"the journal {path} is read-only: make it writable") from None
        raise _damaged_error(path, error) from None
    return database


def _check_journal(path: Path) -> None:
    """Judge a journal without touching it: one that is refused must stay as it was. If its last writer was killed in the middle
    of a commit, that has to be taken back before anything can be read: then a copy is judged."""
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
    if version != FORMAT:
        raise _damaged_error(path, f"format {version}, and this version of covey reads {FORMAT}")
    if verdict != "ok":
        raise _damaged_error(path, verdict)


def _damaged_error(path: Path, why: object) -> StoreError:
    sentence = f"the journal {path} is damaged ({why}): move it away to start a new cluster; it was not changed"
    return StoreError(sentence, ExitCode.BAD_JOURNAL)
