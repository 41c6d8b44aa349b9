"""Clusters with TLS: from `covey tls init` to a training run, the seeds' way in code, and every way it can be refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.processes.command import Shell, Terminal, shells
from tests.processes.harness import Process

from covey.transport.local_ca import make_authority

PASSWORD = "what opens the p12"
PASSWORDS = {"COVEY_TLS_SERVER_PASSWORD": PASSWORD, "COVEY_TLS_CLIENT_PASSWORD": PASSWORD}
SOON_S = 60.0  # much less than the half hour for which a cluster may form

# The seeds' way: everything about TLS is said in the script. "-" leaves it out.
RAW = """
import pathlib, sys, time
import covey

go, config, client, server = sys.argv[1:]
if config != "-":
    covey.set_ps_context(config_file_path=config, enable_ssl=True, client_password=client, server_password=server)
covey.init()
print(f"rank={covey.get_rank()} world={covey.get_group_size()}", flush=True)
while not pathlib.Path(go).exists():
    time.sleep(0.02)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    for shell in shells(tmp_path):
        shell.script(RAW, "raw.py")
        yield shell


def certificates(shell: Shell, name: str = "tls") -> Path:
    """The settings of a new authority."""
    make_authority(shell.folder / name, names=["localhost", "127.0.0.1"], password=PASSWORD)
    return shell.folder / name / "config.json"


def raw(shell: Shell, role: str, config: Path | str, password: str = PASSWORD, node_id: int | str | None = None) -> Process:
    return shell.node(role, node_id, script=shell.folder / "raw.py", args=[shell.go, config, password, PASSWORD])


def finishes(shell: Shell, scheduler: Process, config: Path | str) -> None:
    """The scheduler is as well as ever: two good workers come, work and go."""
    workers = [raw(shell, "MS_WORKER", config, node_id=rank) for rank in (0, 1)]
    for rank, worker in enumerate(workers):
        worker.wait_for(f"rank={rank} world=2")
    shell.release()
    assert [worker.wait() for worker in workers] == [0, 0], shell.tails()
    assert scheduler.wait() == 0, scheduler.tail()
    assert "Traceback" not in scheduler.text(), scheduler.text()


# -- trained ---------------------------------------------------------------------------------------------------------

TRAINS = """
import numpy as np
import covey, torch

covey.init()
print("total", covey.all_reduce(np.ones(2)).tolist(), flush=True)
"""


def test_from_tls_init_to_a_training_run(shell: Shell) -> None:
    made = shell.ask("tls", "init", "certs", env={"COVEY_TLS_PASSWORD": PASSWORD})
    assert made.code == 0, made.tail()
    assert "covey run --tls certs/config.json" in made.text()
    again = shell.ask("tls", "init", "certs", "--password", "x")
    assert again.code == 12 and "already holds ca.crt" in again.text()
    shell.script(TRAINS, "t.py")
    run = shell.ask("run", "-n", "3", "--tls", "certs/config.json", "t.py", env=PASSWORDS)
    assert run.code == 0, run.tail()
    assert [shell.log(rank).splitlines()[-1] for rank in range(3)] == ["total [3.0, 3.0]"] * 3
    everything = run.text() + shell.log("scheduler") + "".join(shell.log(rank) for rank in range(3))
    assert PASSWORD not in everything
    shell.nobody()


def test_a_run_with_tls_is_not_readable_without(shell: Shell) -> None:
    config = certificates(shell)
    run = shell.covey("run", "-n", "1", "--tls", config, shell.default, shell.go, env=PASSWORDS)
    shell.heard(0, "rank=0")
    entry = json.loads(next((shell.folder / "runtime" / "covey").glob("*.json")).read_text())
    worker = {"MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": entry["address"].rpartition(":")[2]}
    worker |= {"MS_WORKER_NUM": "1", "COVEY_SECRET": entry["secret"]}
    plain = shell.start(["python", "raw.py", shell.go, "-", "-", "-"], name="plain", env=worker)
    shell.heard("scheduler", r"connection from 127\.0\.0\.1 turned away: it does not speak TLS")
    assert plain.text().count("rank=") == 0
    shell.release()
    assert run.wait() == 0, run.tail()


def test_the_passwords_are_asked_for_at_a_terminal(shell: Shell) -> None:
    config = certificates(shell)
    terminal = Terminal()
    screen: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.theirs)
    run = shell.covey("run", "-n", "1", "--no-live", "--tls", config, shell.default, **screen)
    for side in ("server", "client"):
        terminal.wait_for(f"Password of the {side}'s p12 file: ")
        terminal.type(f"{PASSWORD}\n")
    assert run.wait() == 0, terminal.text()
    assert PASSWORD not in terminal.text()
    assert "rank=0 world=1" in shell.log(0)
    terminal.close()


def test_the_seeds_way(shell: Shell) -> None:
    config = certificates(shell)
    scheduler = raw(shell, "MS_SCHED", config)
    finishes(shell, scheduler, config)


def test_the_seeds_own_config_is_understood(shell: Shell) -> None:
    """Its misspelt cipher is a warning, its list holds the connection at TLS 1.2, and its other keys are let be."""
    config = certificates(shell)
    suites = "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384"
    keys = json.loads(config.read_text()) | {"cipher_list": suites, "connection_num": 10000, "recovery": {"storage_type": 1}}
    config.write_text(json.dumps(keys))
    scheduler = raw(shell, "MS_SCHED", config)
    scheduler.wait_for('cipher_list: "ECDHE-R SA-AES128-GCM-SHA256" is no TLS 1.2 suite')
    finishes(shell, scheduler, config)


# -- found at the start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["MS_WORKER", "MS_SCHED"])
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("password", r"(server|client)\.p12 does not open: the (server|client) password is wrong"),
        ("expired", r"expired on \d{4}-\d\d-\d\d"),
        ("authority", r"was issued by .*, not by the authority in .*ca\.crt"),
        ("absent", r"cannot read the TLS settings .*absent\.json"),
        ("key", r"has an unknown key server_cert: did you mean server_cert_path\?"),
    ],
)
def test_what_cannot_work_is_one_sentence(shell: Shell, role: str, case: str, sentence: str) -> None:
    config, password = certificates(shell), PASSWORD
    if case == "password":
        password = "another"
    elif case == "expired":
        long_ago = datetime.now(UTC) - timedelta(days=30)
        make_authority(shell.folder / "old", names=["localhost"], days=7, password=PASSWORD, now=long_ago)
        config = shell.folder / "old" / "config.json"
    elif case == "authority":
        certificates(shell, "other")
        shutil.copy(shell.folder / "other" / "ca.crt", shell.folder / "tls" / "ca.crt")
        shutil.copy(shell.folder / "other" / "crl.pem", shell.folder / "tls" / "crl.pem")
    elif case == "absent":
        config = shell.folder / "absent.json"
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"server_cert": "x"}))
    node = shell.node(role, script=shell.folder / "raw.py", args=[shell.go, config, password, password])
    assert node.wait() == 12, node.tail()
    assert re.search(sentence, node.text()), node.text()
    assert "Traceback" not in node.text() and node.text().count("\n") == 1
    assert PASSWORD not in node.text() and "another" not in node.text()


def test_a_run_with_a_wrong_password_starts_nothing(shell: Shell) -> None:
    run = shell.ask("run", "-n", "1", "--tls", certificates(shell), shell.default)
    assert run.code == 12, run.tail()
    assert "p12 does not open" in run.text() and run.text().count("\n") == 1
    shell.nobody()


# -- found at the handshake ------------------------------------------------------------------------------------------


def test_a_plain_worker_at_a_scheduler_with_tls(shell: Shell) -> None:
    config = certificates(shell)
    scheduler = raw(shell, "MS_SCHED", config)
    worker = raw(shell, "MS_WORKER", "-")
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: it does not speak TLS, and this side does")
    worker.wait_for("TLS", deadline_s=SOON_S)
    assert "Traceback" not in worker.text() and "rank=" not in worker.text()
    worker.kill()
    finishes(shell, scheduler, config)


def test_a_worker_with_tls_at_a_plain_scheduler(shell: Shell) -> None:
    scheduler = raw(shell, "MS_SCHED", "-")
    worker = raw(shell, "MS_WORKER", certificates(shell))
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: it speaks TLS, and this side does not")
    worker.wait_for("does not speak TLS, and this side does", deadline_s=SOON_S)
    assert "Traceback" not in worker.text() and "rank=" not in worker.text()
    worker.kill()
    finishes(shell, scheduler, "-")


def test_a_worker_of_another_authority(shell: Shell) -> None:
    config = certificates(shell)
    scheduler = raw(shell, "MS_SCHED", config)
    worker = raw(shell, "MS_WORKER", certificates(shell, "other"))
    # Each side sees the other's: the worker refuses the scheduler's certificate and hangs up.
    worker.wait_for("comes from another authority than ours", deadline_s=SOON_S)
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: (it does not know the authority|the other side cut)")
    assert "Traceback" not in worker.text() and "rank=" not in worker.text()
    worker.kill()
    finishes(shell, scheduler, config)


def test_a_worker_whose_certificate_the_scheduler_does_not_believe(shell: Shell) -> None:
    """The other way round: it trusts the scheduler's authority, but its own certificate is of another."""
    config = certificates(shell)
    both = certificates(shell, "both")
    authority = (shell.folder / "tls" / "ca.crt").read_text() + (shell.folder / "both" / "ca.crt").read_text()
    (shell.folder / "both" / "ca.crt").write_text(authority)
    both.write_text(json.dumps(json.loads(both.read_text()) | {"crl_path": ""}))
    scheduler = raw(shell, "MS_SCHED", config)
    worker = raw(shell, "MS_WORKER", both)
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: .*(another authority|no revocation list)")
    worker.wait_for("(refuses|does not know the authority of) our certificate", deadline_s=SOON_S)
    assert "Traceback" not in worker.text() and "rank=" not in worker.text()
    worker.kill()
    finishes(shell, scheduler, config)


@pytest.mark.parametrize("version", ["1.3", "1.2"])
def test_a_revoked_worker(shell: Shell, version: str) -> None:
    """It does not know that it is: its own list is an older one. With TLS 1.3 it is connected before it is refused."""
    config = certificates(shell)
    if version == "1.2":
        suites = {"cipher_list": "ECDHE-ECDSA-AES128-GCM-SHA256"}
        config.write_text(json.dumps(json.loads(config.read_text()) | suites))
    shutil.copytree(shell.folder / "tls", shell.folder / "revoked")
    told = shell.ask("tls", "revoke", "tls", "tls/client.p12", env={"COVEY_TLS_PASSWORD": PASSWORD})
    assert "added the certificate to tls/crl.pem" in told.text(), told.text()
    # The scheduler needs no client certificate of its own, and the list now names the one in its folder.
    server_only = {key: value for key, value in json.loads(config.read_text()).items() if key != "client_cert_path"}
    config.write_text(json.dumps(server_only))
    scheduler = raw(shell, "MS_SCHED", config)
    worker = raw(shell, "MS_WORKER", shell.folder / "revoked" / "config.json")
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: its certificate is revoked")
    worker.wait_for("refuses our certificate", deadline_s=SOON_S)
    assert "Traceback" not in worker.text() + scheduler.text() and "rank=" not in worker.text()
    worker.kill()
    asked = shell.ask("check", f"127.0.0.1:{shell.port}", env={"XDG_RUNTIME_DIR": str(shell.folder / "home")})
    assert "the scheduler requires TLS" in asked.text() and scheduler.alive, "it goes on"
