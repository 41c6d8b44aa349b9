"""The join secret: what a node must know to enter a cluster that listens beyond loopback.

It comes from COVEY_SECRET, else from the file named by COVEY_SECRET_FILE, else from this user's own secret file, which is
made on first use. Hosts that share a home folder share it; on others, copy the file or set the variable.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from covey.errors import StoreError, UsageError


def user_secret_path() -> Path:
    """This user's own secret file."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "covey" / "secret"


def load_join_secret(secret: str, secret_file: str, *, make: bool) -> str:
    """The secret to use, "" if there is none. With `make`, this user's file is created when nothing else is there."""
    if secret:
        return secret
    if secret_file:
        return _read_secret(Path(secret_file))
    try:
        path = user_secret_path()
        there = path.exists()
    except (OSError, RuntimeError) as error:  # a home of somebody else, or none
        if not make:
            return ""
        raise StoreError(f"this user has no folder for a secret ({error}): set COVEY_SECRET, or HOME") from None
    if not there:
        if not make:
            return ""
        _create_secret(path)
    return _read_secret(path)


def _read_secret(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except OSError as error:
        raise UsageError(f"the secret file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the secret file {path} is not text: write one line into it, the same on every host") from None
    if mode & 0o077:
        raise UsageError(f"the secret file {path} can be read by others: chmod 600 {path}")
    if not text:
        raise UsageError(f"the secret file {path} is empty: write one line into it, the same on every host")
    return text


def _create_secret(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"secret.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(temporary, path)  # fails if another process was first: then its secret stands
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    except OSError as error:
        raise StoreError(f"no secret file can be made at {path} ({error.strerror}): set COVEY_SECRET") from None
