"""Compare-and-swap stores: named values with versions; a write succeeds only if the version is unchanged.

`FileCasStore` keeps values in files, on one host or on a file system that several hosts share. `EtcdCasStore` keeps them in
etcd and uses its JSON gateway. A third store is in `covey.kubernetes.cas_store`. After `put` has raised `StoreError`, the value
may have been written or not.
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

ETCD_TIMEOUT_S: Final = 2.0  # limit of one request
OLD_VERSIONS_MAX: Final = 8  # removed after a write besides the replaced one: a killed writer may have left some behind
ETCD_VALUE_MAX: Final = 1_000_000  # bytes; etcd accepts requests of 1.5 MiB, and the value is sent as base64


class CasStore(Protocol):
    """A store of versioned values. The version of a missing value is 0. `get` and `put` raise `StoreError` if they fail."""

    async def get(self, key: str) -> tuple[bytes, int]:
        """Return a value and its version; b"" and 0 if it is missing."""

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        """Write a value if its stored version is `version` (0: missing). Return the new version, or None if the stored version
        differs."""

    async def close(self) -> None: ...


class FileCasStore:
    """Values in the files of a directory, which is created if missing. A write creates the file of the next version and fails
    if another writer has created it. No lock is used, because a stopped process could keep it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._writer_id = secrets.token_hex(8)  # not the pid: two hosts or containers may have the same
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._folder_error(error) from None

    async def get(self, key: str) -> tuple[bytes, int]:
        try:
            while version := self._newest_version(key):
                with contextlib.suppress(FileNotFoundError):  # a newer version was written, and this one was removed
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
        """Do nothing: no resource is held between calls."""

    def _claim_version(self, draft: Path, key: str, version: int) -> bool:
        """Link the draft as version + 1 and remove older versions. Return False if another writer was first."""
        if self._newest_version(key) != version:
            return False
        new_path = self._version_path(key, version + 1)
        try:
            new_path.hardlink_to(draft)
        except FileExistsError:
            return False
        # Checked again: a removed version's name is free, so a suspended writer can take it.
        if self._newest_version(key) > version + 1:
            new_path.unlink()
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
        return StoreError(
            f"cannot read or write the lease in {self._folder} ({error.strerror}): check the directory and its permissions"
        )


class EtcdCasStore:
    """Values at the keys PREFIX/KEY of etcd, each of at most `ETCD_VALUE_MAX` bytes."""

    def __init__(self, url: str, prefix: str) -> None:
        import httpx2  # imported here: a slow import that only this store needs

        self._url = url
        self._prefix = prefix
        self._client = httpx2.AsyncClient(base_url=url, timeout=ETCD_TIMEOUT_S, trust_env=False)
        self._http_error = httpx2.HTTPError
        self._newest_revision = 0  # highest revision in a reply; etcd increases it with each change
        self._data_loss_reason = ""  # message of every further `StoreError`; empty: no data loss was found

    async def get(self, key: str) -> tuple[bytes, int]:
        decoded = await self._post("range", {"key": self._encode_key(key)})
        entries = decoded.get("kvs") or [{}]
        return base64.b64decode(entries[0].get("value", "")), int(entries[0].get("mod_revision", 0))

    async def put(self, key: str, value: bytes, version: int) -> int | None:
        if len(value) > ETCD_VALUE_MAX:
            raise StoreError(
                f"{key} has {len(value)} bytes, the limit for etcd is {ETCD_VALUE_MAX}: the cluster is too large for this store"
            )
        name, encoded = self._encode_key(key), base64.b64encode(value).decode()
        compare = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(version)}
        change = {"request_put": {"key": name, "value": encoded}}
        decoded = await self._post("txn", {"compare": [compare], "success": [change]})
        return int(decoded["header"]["revision"]) if decoded.get("succeeded") else None

    async def close(self) -> None:
        await self._client.aclose()

    def _encode_key(self, key: str) -> str:
        return base64.b64encode(f"{self._prefix}/{key}".encode()).decode()

    async def _post(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        revision_before = self._newest_revision  # replies to concurrent requests may arrive in any order
        try:
            reply = await self._client.post(f"/v3/kv/{what}", content=msgspec.json.encode(body))
            decoded = msgspec.json.decode(reply.content)
        except (self._http_error, msgspec.MsgspecError) as error:
            cause = str(error) or type(error).__name__
            raise StoreError(f"no valid answer from etcd at {self._url} ({cause}): check that it is running") from None
        if reply.status_code != 200 or not isinstance(decoded, dict):
            raise StoreError(f"etcd at {self._url} refused the request: {str(decoded)[:200]}")
        self._check_revision(int((decoded.get("header") or {}).get("revision", 0)), revision_before)
        return decoded

    def _check_revision(self, revision: int, revision_before: int) -> None:
        """Raise `StoreError`, for this and all later replies, if the revision of a reply is lower than one received before the
        request: etcd was then wiped or restored from a backup."""
        if revision < revision_before and not self._data_loss_reason:
            self._data_loss_reason = (
                f"etcd at {self._url} has lost data (its revision decreased from {revision_before} to {revision}):"
                " restore it and restart the schedulers, or end the cluster"
            )
        if self._data_loss_reason:
            raise StoreError(self._data_loss_reason)
        self._newest_revision = max(self._newest_revision, revision)


def open_cas_store(
    where: str, *, folder: str, job: str, factories: Mapping[str, Callable[[str], CasStore]] | None = None
) -> CasStore:
    """Return the store that `where`, the value of COVEY_LEASE, names.

    `file` is the directory FOLDER/lease, `file://DIR` is DIR/lease. `etcd://HOST:PORT[/PREFIX]` is etcd over HTTP, `etcds://`
    over HTTPS; the default prefix is covey/JOB. For another SCHEME://REST, `factories[SCHEME]` is called with REST. Raises
    `UsageError` for an unknown scheme, and `StoreError` if the directory cannot be created.
    """
    scheme, _, rest = where.partition("://")
    if scheme == "file":
        return FileCasStore(Path(rest or folder) / "lease")
    if scheme in ("etcd", "etcds"):
        authority, _, prefix = rest.partition("/")
        return EtcdCasStore(f"{'https' if scheme == 'etcds' else 'http'}://{authority}", prefix or f"covey/{job}")
    if factories is not None and scheme in factories:
        return factories[scheme](rest)
    raise UsageError(f"COVEY_LEASE={where} is invalid: expected file, etcd://HOST:PORT or kubernetes://NAME")
