"""Cells: named values that several processes may change, each change only in the place of the version it was made from.

On one host, or on a disk that several hosts share, a cell is a file. Between hosts it is a key of etcd, spoken to
through its JSON gateway: two requests are all that is needed, so there is no client library. (`kubernetes.cas_store` keeps them
in Kubernetes.) Who cannot reach its store gets a `StoreError`, and does not know whether its last write arrived.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from covey.atomic_file import write_synced
from covey.errors import StoreError, UsageError

ETCD_TIMEOUT_S: Final = 2.0  # of one request
OLD_VERSIONS_MAX: Final = 8  # that may have been left behind by somebody who ended in between
ETCD_VALUE_MAX: Final = 1_000_000  # bytes; etcd takes a request of 1.5 MiB, in base64


class CasStore(Protocol):
    """A store of cells. The version of a cell that is not there is 0."""

    async def get(self, key: str) -> tuple[bytes, int]:
        """A cell's value and its version."""

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        """Change a cell from a version; returns the new one, or None if it is not that version any more."""

    async def close(self) -> None: ...


class FileCasStore:
    """Cells in a folder, a file per version: its name can be taken once, and no lock is held by somebody who is stopped."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._writer_id = secrets.token_hex(8)  # not the process's number: two hosts, or containers, may have the same
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._folder_error(error) from None

    async def get(self, key: str) -> tuple[bytes, int]:
        try:
            while version := self._newest_version(key):
                with contextlib.suppress(FileNotFoundError):  # a newer one came, and this one was removed
                    return self._version_path(key, version).read_bytes(), version
        except OSError as error:
            raise self._folder_error(error) from None
        return b"", 0

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        draft = self._folder / f"{key}-{self._writer_id}.draft"
        try:
            try:
                write_synced(draft, value)
                done = self._claim_version(draft, key, version)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise self._folder_error(error) from None
        return version + 1 if done else None

    async def close(self) -> None:
        """Nothing is held between two calls."""

    def _claim_version(self, draft: Path, key: str, version: int) -> bool:
        """Give the draft the next version's name. A version that came and went long ago leaves its name free again, for one who
        was stopped meanwhile: but then there is a newer one."""
        if self._newest_version(key) != version:
            return False
        mine = self._version_path(key, version + 1)
        try:
            mine.hardlink_to(draft)
        except FileExistsError:
            return False
        if self._newest_version(key) > version + 1:
            mine.unlink()
            return False
        for old in range(max(1, version - OLD_VERSIONS_MAX), version + 1):
            self._version_path(key, old).unlink(missing_ok=True)
        return True

    def _newest_version(self, key: str) -> int:
        names = (path.name for path in self._folder.glob(f"{key}.*"))
        return max((int(name.rpartition(".")[2]) for name in names), default=0)

    def _version_path(self, key: str, version: int) -> Path:
        return self._folder / f"{key}.{version}"

    def _folder_error(self, error: OSError) -> StoreError:
        return StoreError(f"the lease in {self._folder} cannot be read or written ({error.strerror}): make the folder usable")


class EtcdCasStore:
    """Cells as keys of etcd, below a prefix."""

    def __init__(self, url: str, prefix: str) -> None:
        import httpx2  # takes longer to import than a small cluster to form, and only this store needs it

        self._url = url
        self._prefix = prefix
        self._client = httpx2.AsyncClient(base_url=url, timeout=ETCD_TIMEOUT_S, trust_env=False)
        self._http_error = httpx2.HTTPError
        self._newest_revision = 0  # the store's revision: each change makes it higher
        self._data_loss_reason = ""

    async def get(self, key: str) -> tuple[bytes, int]:
        answer = await self._post("range", {"key": self._encode_key(key)})
        found = answer.get("kvs") or [{}]
        return base64.b64decode(found[0].get("value", "")), int(found[0].get("mod_revision", 0))

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        if len(value) > ETCD_VALUE_MAX:
            raise StoreError(f"{key} has {len(value)} bytes, and etcd takes {ETCD_VALUE_MAX}: this cluster is too large for it")
        name, encoded = self._encode_key(key), base64.b64encode(value).decode()
        compare = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(version)}
        change = {"request_put": {"key": name, "value": encoded}}
        answer = await self._post("txn", {"compare": [compare], "success": [change]})
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    async def close(self) -> None:
        await self._client.aclose()

    def _encode_key(self, key: str) -> str:
        return base64.b64encode(f"{self._prefix}/{key}".encode()).decode()

    async def _post(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        known = self._newest_revision  # answers to questions under way at once may come in any order
        try:
            reply = await self._client.post(f"/v3/kv/{what}", content=msgspec.json.encode(body))
            answer = msgspec.json.decode(reply.content)
        except (self._http_error, msgspec.MsgspecError) as error:
            why = str(error) or type(error).__name__
            raise StoreError(f"etcd at {self._url} does not answer as it should ({why}): check that it runs") from None
        if reply.status_code != 200 or not isinstance(answer, dict):
            raise StoreError(f"etcd at {self._url} refused: {str(answer)[:200]}")
        self._check_revision(int((answer.get("header") or {}).get("revision", 0)), known)
        return answer

    def _check_revision(self, revision: int, known: int) -> None:
        """A store that was emptied, or set back to a copy, has forgotten who leads and what was promised. Whoever saw that it
        knew more believes it no longer, even when it has grown again."""
        if revision < known and not self._data_loss_reason:
            self._data_loss_reason = (
                f"etcd at {self._url} has lost data (it was at revision {known}, and then at {revision}):"
                " put it back and start the schedulers again, or end the cluster"
            )
        if self._data_loss_reason:
            raise StoreError(self._data_loss_reason)
        self._newest_revision = max(self._newest_revision, revision)


def open_cas_store(
    where: str, *, folder: str, job: str, factories: Mapping[str, Callable[[str], CasStore]] | None = None
) -> CasStore:
    """Open the store that COVEY_LEASE names: `file`, `etcd://HOST:PORT[/PREFIX]`, or `SCHEME://REST` if `factories` has SCHEME.

    A factory receives REST. The caller supplies the stores of packages above this one, such as Kubernetes.
    """
    scheme, _, rest = where.partition("://")
    if scheme == "file":
        return FileCasStore(Path(rest or folder) / "lease")
    if scheme in ("etcd", "etcds"):
        authority, _, prefix = rest.partition("/")
        return EtcdCasStore(f"{'https' if scheme == 'etcds' else 'http'}://{authority}", prefix or f"covey/{job}")
    if factories is not None and scheme in factories:
        return factories[scheme](rest)
    raise UsageError(f"COVEY_LEASE={where} is no store: file, etcd://HOST:PORT or kubernetes://NAME is")
