"""Runs `make run` and `make test` on new machines: the program of `make test-fresh`.

For each suite of Debian in SUITES the program creates a root with debootstrap (the minimal packages, python3, make and pip). It
clones this repository into the root and runs COMMANDS there, once for each user in USERS, in separate namespaces. The clone has
the commit that is checked out here, without uncommitted changes.

    make test-fresh                                               both suites, both users, both commands
    make test-fresh SUITES=trixie USERS=user COMMANDS="make run"  one machine, one command (several are separated by ";")

Needs root, debootstrap and git. The new machine uses the Debian mirror, the proxies and the pip configuration of this one: the
values are copied, and each local file or directory that a value names is mounted at the same path, read-only. Downloads and
logs stay in .fresh/, roots are removed. With KEEP=1 roots and clones stay, and the next run uses them with the newest commit.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".fresh"
PACKAGES = "ca-certificates,make,python3,python3-pip"
HOMES = {"root": "/root", "user": "/home/user"}
KEEP = bool(os.environ.get("KEEP"))
MADE = ".made"  # exists in a complete root
UID = 1000  # of the ordinary user
PASSED_ON = re.compile(
    r"PIP_(?!CONFIG_FILE|CACHE_DIR).*|(https?|ftp|all|no)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE", re.IGNORECASE
)
# `make run` must print none of these: each is an error message about something that works, or about a bug.
FALSE_ERRORS = re.compile(r"not created successfully|ensurepip is not|^ERROR|Traceback", re.MULTILINE)

# Makes a machine of directory $1: devices, /proc, /sys and the mounts named by the arguments up to "--". Then runs the rest.
# The old root is left with pivot_root: in a chroot the kernel refuses user namespaces, which a real machine may have.
ENTER = """
root=$1; shift
PATH=$PATH:/usr/sbin:/sbin
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"; ln -s /proc/self/fd/1 "$root/dev/stdout"; ln -s /proc/self/fd/2 "$root/dev/stderr"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$(dirname "$root$1")"; touch "$root$1"; fi
    mount --bind "$1" "$root$1"
    mount -o remount,bind,ro "$root$1"
    shift
done
shift
cd "$root"
mkdir -p .old
pivot_root . .old
cd /
umount -l .old
rmdir .old
exec "$@"
"""


class Unusable(Exception):
    """This machine lacks something that is needed to create another one."""


def main() -> int:
    suites = os.environ.get("SUITES", "bookworm trixie").split()
    users = os.environ.get("USERS", "root user").split()
    commands = [word.strip() for word in os.environ.get("COMMANDS", "make run; make test").split(";") if word.strip()]
    try:
        check(users)
        mirror = debian_mirror()
        rows = [row for suite in suites for row in on_suite(suite, mirror, users, commands)]
    except Unusable as problem:
        print(f"make test-fresh cannot run: {problem}", file=sys.stderr)
        return 2
    print("\nresults:")
    print("\n".join(text for text, _ in rows))
    return 0 if all(passed for _, passed in rows) else 1


def check(users: list[str]) -> None:
    """Raise `Unusable` unless this machine has what the program needs."""
    if unknown := set(users) - set(HOMES):
        raise Unusable(f"USERS={' '.join(sorted(unknown))} is invalid: expected root, user or both")
    if os.geteuid():
        raise Unusable("it mounts file systems: run it as root")
    for program, package in (("debootstrap", "debootstrap"), ("git", "git"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            raise Unusable(f"{program} is missing: apt-get install {package}")


def debian_mirror() -> str:
    """Return the address of the Debian archive from which apt of this machine installs."""
    result = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)\t$(LABEL)", "Created-By: Packages"], capture_output=True, text=True
    )
    for line in result.stdout.splitlines():
        address, _, label = line.partition("\t")
        if label == "Debian":
            return address
    raise Unusable("apt has no Debian archive among its sources: add one, then run apt-get update")


def on_suite(suite: str, mirror: str, users: list[str], commands: list[str]) -> list[tuple[str, bool]]:
    """Create a root of this suite, run the commands and remove it. Return a line for each command, and whether it passed."""
    root = FOLDER / f"root-{suite}"
    if not (KEEP and (root / MADE).exists()):
        remove(root)
        bootstrap(suite, root, mirror)
    try:
        return [row for user in users for row in as_user(suite, root, user, commands)]
    finally:
        if not KEEP:
            remove(root)


def remove(root: Path) -> None:
    """Delete a root. All mounts are in namespaces that ended with their processes."""
    if root.exists():
        subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=True)


def bootstrap(suite: str, root: Path, mirror: str) -> None:
    """Create a root with the minimal packages of a suite and the network configuration of this machine."""
    cache = FOLDER / "packages" / suite
    cache.mkdir(parents=True, exist_ok=True)
    print(f"-- {suite}: debootstrap", flush=True)
    words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", f"--cache-dir={cache}", suite, str(root), mirror]
    log = FOLDER / f"debootstrap-{suite}.log"
    with log.open("wb") as output:
        if subprocess.run(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL).returncode:
            raise Unusable(f"debootstrap failed; its last lines, of {log}:\n{log.read_text()[-2000:]}")
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", root / "etc" / name)
    (root / "etc/pip.conf").write_text(pip_configuration())
    subprocess.run(
        ["chroot", str(root), "useradd", "--create-home", "--uid", str(UID), "--shell", "/bin/bash", "user"], check=True
    )
    (root / MADE).touch()


def pip_settings() -> dict[str, str]:
    """Return pip's settings of this machine: from all configuration files, and from the environment as `:env:.NAME`."""
    result = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    if result.returncode:
        raise Unusable(f"{sys.executable} has no pip: apt-get install python3-pip")
    pairs = (line.partition("=") for line in result.stdout.splitlines())
    return {name: str(ast.literal_eval(value)) for name, _, value in pairs}


def pip_configuration() -> str:
    """Return a pip.conf with the settings of all configuration files of this machine."""
    sections: dict[str, list[str]] = {}
    for name, value in pip_settings().items():
        section, _, key = name.rpartition(".")
        if section != ":env:":
            sections.setdefault(section, []).append(f"{key} = {' '.join(value.split())}")
    return "".join("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())


def local_paths(values: Iterable[str]) -> list[str]:
    """Return the files and directories of this machine that the values name, as paths or as file:// addresses."""
    words = [word for value in values for word in value.split()]
    paths = [unquote(urlsplit(word).path) if word.startswith("file://") else word for word in words]
    existing = {folder for path in paths if path.startswith("/") and (folder := top(Path(path))).exists()}
    return sorted(str(path) for path in existing if not existing & set(path.parents))


def top(path: Path) -> Path:
    """Return the directory to mount for a path: pages of an index link to files beside its directory `simple`."""
    return path.parent if path.name == "simple" else path


def as_user(suite: str, root: Path, user: str, commands: list[str]) -> list[tuple[str, bool]]:
    """Clone the repository into a user's home and run the commands there."""
    home = HOMES[user]
    clone = root / home.lstrip("/") / "covey"
    ids = "0:0" if user == "root" else f"{UID}:{UID}"
    clone_to(clone, ids)
    passed_on = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    environment = {
        "HOME": home,
        "USER": user,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin" + (":/usr/local/sbin:/usr/sbin:/sbin" if user == "root" else ""),
        **passed_on,
    }
    mounts = local_paths([*pip_settings().values(), *passed_on.values()])
    rows = []
    for command in commands:
        enter = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-euc",
            ENTER,
            "enter",
            str(root),
            *mounts,
            "--",
        ]
        typed = f"cd {home}/covey && {command}; exit $?"  # bash stays the first process, which reaps orphans
        become = ["chroot", f"--userspec={ids}", "--groups=", "/", "env", f"PATH={environment['PATH']}"]
        print(f"-- {suite}, as {user}: {command}", flush=True)
        start = time.monotonic()
        log = FOLDER / f"{suite}-{user}-{re.sub(r'[^a-z0-9]+', '-', command.lower())[:40]}.log"
        code, text = run([*enter, *become, "bash", "-c", typed], log, environment)
        wrong = FALSE_ERRORS.search(text) if command == "make run" else None
        minutes = (time.monotonic() - start) / 60
        result = f"printed {wrong[0]!r}" if wrong else "passed" if code == 0 else f"failed with {code}"
        rows.append(
            (f"{suite:10} {user:5} {shlex.quote(command):20} {result}, {minutes:.1f} minutes, {log}", not (code or wrong))
        )
        print(rows[-1][0], flush=True)
        if rows[-1][1] is False and command == commands[0]:
            break  # the later commands use what the first one installs
    if not KEEP:
        remove(clone)  # its environment takes up to 6 GB
    return rows


def clone_to(clone: Path, ids: str) -> None:
    """Clone this repository, or update an existing clone to the commit that is checked out here; change its owner."""
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    else:
        git = ["git", "-c", f"safe.directory={clone}", "-C", str(clone)]
        subprocess.run([*git, "fetch", "--quiet", str(ROOT), "HEAD"], check=True)
        subprocess.run([*git, "reset", "--quiet", "--hard", "FETCH_HEAD"], check=True)
    subprocess.run(["chown", "-R", "--no-dereference", ids, str(clone)], check=True)


def run(words: list[str], log: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command with an environment, copy its output to the terminal and to a file; return its exit code and its output.

    The values may contain passwords, so they are not in a command line, which all users can read.
    """
    with (
        log.open("w", buffering=1) as file,
        subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            file.write(line)
            print(f"   {line}", end="", flush=True)
    return process.returncode, log.read_text()


if __name__ == "__main__":
    sys.exit(main())
