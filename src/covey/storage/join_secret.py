"""The join secret, by which the scheduler and the nodes of a cluster authenticate each other.

It comes from COVEY_SECRET, else from the file named by COVEY_SECRET_FILE, else from the user's secret file. If the hosts do not
share a home directory, copy that file to each of them or set COVEY_SECRET.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from covey.atomic_file import sync_directory, write_synced
from covey.errors import StoreError, UsageError


def user_secret_path() -> Path:
    """Return the path of the user's secret file: covey/secret in XDG_CONFIG_HOME, else in ~/.config. It may not exist. Raises
    `RuntimeError` if the home directory is unknown."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "covey" / "secret"


def load_join_secret(secret: str, secret_file: str, *, make: bool) -> str:
    """Return `secret` if not empty, else the content of `secret_file` if that is set, else the content of the user's secret
    file.

    If the user's file is missing or its directory is unknown: with `make`, create the file with a random secret; without
    `make`, return "". Raises `UsageError` if a file cannot be read, is not UTF-8, is empty or has permissions for group or
    others, and `StoreError` if the user's file cannot be created.
    """
    if secret:
        return secret
    if secret_file:
        return _read_secret(Path(secret_file))
    try:
        path = user_secret_path()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # the home directory is not readable, or there is none
        if not make:
            return ""
        raise StoreError(f"no directory for the user's secret file ({error}): set COVEY_SECRET or HOME") from None
    if not exists:
        if not make:
            return ""
        _create_secret(path)
    return _read_secret(path)


def _read_secret(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read the secret file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the secret file {path} is not valid UTF-8: write one line into it, the same on every host") from None
    if mode & 0o077:
        raise UsageError(f"the secret file {path} is readable by other users: chmod 600 {path}")
    if not text:
        raise UsageError(f"the secret file {path} is empty: write one line into it, the same on every host")
    return text


def _create_secret(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"secret.{secrets.token_hex(8)}")
        write_synced(temporary, f"{secrets.token_hex(32)}\n".encode(), mode=0o600)
        try:
            os.link(temporary, path)  # fails if another process was first: its secret is then used
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        sync_directory(path.parent)
    except OSError as error:
        raise StoreError(f"cannot create the secret file {path} ({error.strerror}): set COVEY_SECRET") from None
