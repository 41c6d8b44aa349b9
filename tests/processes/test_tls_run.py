"""Clusters with TLS: from `covey tls init` to a training run, MindSpore's settings in code, and all refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.processes.command import Shell, Terminal
from tests.processes.harness import Process

from covey.transport.local_ca import make_authority

PASSWORD = "what opens the p12"
PASSWORDS = {"COVEY_TLS_SERVER_PASSWORD": PASSWORD, "COVEY_TLS_CLIENT_PASSWORD": PASSWORD}
SOON_S = 60.0  # much less than the half hour that formation may take

# MindSpore's way: the script sets everything about TLS. "-" leaves it out.
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
    with Shell(tmp_path) as shell:
        shell.script(RAW, "raw.py")
        yield shell


def certificates(shell: Shell, name: str = "tls") -> Path:
    """Create a new authority; return its settings."""
    make_authority(shell.folder / name, names=["localhost", "127.0.0.1"], password=PASSWORD)
    return shell.folder / name / "config.json"


def raw(shell: Shell, role: str, config: Path | str, password: str = PASSWORD, node_id: int | str | None = None) -> Process:
    return shell.node(role, node_id, script=shell.folder / "raw.py", args=[shell.go, config, password, PASSWORD])


def finishes(shell: Shell, scheduler: Process, config: Path | str) -> None:
    """Assert that the scheduler still works: two valid workers join, run and exit."""
    workers = [raw(shell, "MS_WORKER", config, node_id=rank) for rank in (0, 1)]
    for rank, worker in enumerate(workers):
        worker.wait_for(f"rank={rank} world=2")
    shell.release()
    assert [worker.wait() for worker in workers] == [0, 0], shell.tails()
    assert scheduler.wait() == 0, scheduler.tail()
    assert "Traceback" not in scheduler.text(), scheduler.text()


# -- training --------------------------------------------------------------------------------------------------------

TRAINS = """
import numpy as np
import covey, torch

covey.init()
print("total", covey.all_reduce(np.ones(2)).tolist(), flush=True)
"""


def test_tls_init_files_work_in_a_run(shell: Shell) -> None:
    made = shell.run_command("tls", "init", "certs", env={"COVEY_TLS_PASSWORD": PASSWORD})
    assert made.code == 0, made.tail()
    assert "covey run --tls certs/config.json" in made.text()
    again = shell.run_command("tls", "init", "certs", "--password", "x")
    assert again.code == 12 and "already contains ca.crt" in again.text()
    shell.script(TRAINS, "t.py")
    run = shell.run_command("run", "-n", "3", "--tls", "certs/config.json", "t.py", env=PASSWORDS)
    assert run.code == 0, run.tail()
    assert [shell.log(rank).splitlines()[-1] for rank in range(3)] == ["total [3.0, 3.0]"] * 3
    everything = run.text() + shell.log("scheduler") + "".join(shell.log(rank) for rank in range(3))
    assert PASSWORD not in everything
    shell.assert_no_processes()


def test_run_with_tls_refuses_plain_commands(shell: Shell) -> None:
    config = certificates(shell)
    run = shell.covey("run", "-n", "1", "--tls", config, shell.default, shell.go, env=PASSWORDS)
    shell.wait_for_log(0, "rank=0")
    entry = json.loads(next((shell.folder / "runtime" / "covey").glob("*.json")).read_text())
    worker = {"MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": entry["address"].rpartition(":")[2]}
    worker |= {"MS_WORKER_NUM": "1", "COVEY_SECRET": entry["secret"]}
    plain = shell.start(["python", "raw.py", shell.go, "-", "-", "-"], name="plain", env=worker)
    shell.wait_for_log("scheduler", r"connection from 127\.0\.0\.1 turned away: it does not use TLS")
    assert plain.text().count("rank=") == 0
    shell.release()
    assert run.wait() == 0, run.tail()


def test_passwords_are_prompted_at_a_terminal(shell: Shell) -> None:
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


def test_mindspore_tls_variables_work(shell: Shell) -> None:
    config = certificates(shell)
    scheduler = raw(shell, "MS_SCHED", config)
    finishes(shell, scheduler, config)


def test_mindspore_tls_config_is_accepted(shell: Shell) -> None:
    """Its misspelled cipher is a warning, its list limits connections to TLS 1.2, and its other keys are ignored."""
    config = certificates(shell)
    suites = "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384"
    keys = json.loads(config.read_text()) | {"cipher_list": suites, "connection_num": 10000, "recovery": {"storage_type": 1}}
    config.write_text(json.dumps(keys))
    scheduler = raw(shell, "MS_SCHED", config)
    scheduler.wait_for('cipher_list: "ECDHE-R SA-AES128-GCM-SHA256" is not a TLS 1.2 suite')
    finishes(shell, scheduler, config)


# -- errors at the start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["MS_WORKER", "MS_SCHED"])
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("password", r"cannot decrypt .*(server|client)\.p12: the (server|client) password is wrong"),
        ("expired", r"expired on \d{4}-\d\d-\d\d"),
        ("authority", r"was issued by .*, not by the authority in .*ca\.crt"),
        ("absent", r"cannot read the TLS settings .*absent\.json"),
        ("key", r"has an unknown key server_cert: did you mean server_cert_path\?"),
    ],
)
def test_invalid_tls_settings_are_a_one_line_error(shell: Shell, role: str, case: str, sentence: str) -> None:
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


def test_run_with_wrong_password_starts_nothing(shell: Shell) -> None:
    run = shell.run_command("run", "-n", "1", "--tls", certificates(shell), shell.default)
    assert run.code == 12, run.tail()
    assert "cannot decrypt " in run.text() and run.text().count("\n") == 1
    shell.assert_no_processes()


# -- errors in the handshake -----------------------------------------------------------------------------------------


def test_plain_worker_at_tls_scheduler_is_refused(shell: Shell) -> None:
    config = certificates(shell)
    scheduler = raw(shell, "MS_SCHED", config)
    worker = raw(shell, "MS_WORKER", "-")
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: it does not use TLS, but this side does")
    worker.wait_for("TLS", deadline_s=SOON_S)
    assert "Traceback" not in worker.text() and "rank=" not in worker.text()
    worker.kill()
    finishes(shell, scheduler, config)


def test_tls_worker_at_plain_scheduler_is_refused(shell: Shell) -> None:
    scheduler = raw(shell, "MS_SCHED", "-")
    worker = raw(shell, "MS_WORKER", certificates(shell))
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: it uses TLS, but this side does not")
    worker.wait_for("does not use TLS, but this side does", deadline_s=SOON_S)
    assert "Traceback" not in worker.text() and "rank=" not in worker.text()
    worker.kill()
    finishes(shell, scheduler, "-")


def test_worker_of_other_authority_refuses_scheduler(shell: Shell) -> None:
    config = certificates(shell)
    scheduler = raw(shell, "MS_SCHED", config)
    worker = raw(shell, "MS_WORKER", certificates(shell, "other"))
    # Each side sees the other's certificate: the worker refuses the scheduler's and disconnects.
    worker.wait_for("comes from another authority than this side's", deadline_s=SOON_S)
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: (it does not have the authority|the other side closed)")
    assert "Traceback" not in worker.text() and "rank=" not in worker.text()
    worker.kill()
    finishes(shell, scheduler, config)


def test_scheduler_refuses_certificate_of_other_authority(shell: Shell) -> None:
    """The reverse: the worker trusts the scheduler's authority, but its own certificate is of another."""
    config = certificates(shell)
    both = certificates(shell, "both")
    authority = (shell.folder / "tls" / "ca.crt").read_text() + (shell.folder / "both" / "ca.crt").read_text()
    (shell.folder / "both" / "ca.crt").write_text(authority)
    both.write_text(json.dumps(json.loads(both.read_text()) | {"crl_path": ""}))
    scheduler = raw(shell, "MS_SCHED", config)
    worker = raw(shell, "MS_WORKER", both)
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: .*(another authority|no revocation list)")
    worker.wait_for("(refuses|rejects|does not have the authority of) this side's certificate", deadline_s=SOON_S)
    assert "Traceback" not in worker.text() and "rank=" not in worker.text()
    worker.kill()
    finishes(shell, scheduler, config)


@pytest.mark.parametrize("version", ["1.3", "1.2"])
def test_revoked_worker_is_refused(shell: Shell, version: str) -> None:
    """Its own revocation list is older and does not contain it. With TLS 1.3 it is connected before it is refused."""
    config = certificates(shell)
    if version == "1.2":
        suites = {"cipher_list": "ECDHE-ECDSA-AES128-GCM-SHA256"}
        config.write_text(json.dumps(json.loads(config.read_text()) | suites))
    shutil.copytree(shell.folder / "tls", shell.folder / "revoked")
    result = shell.run_command("tls", "revoke", "tls", "tls/client.p12", env={"COVEY_TLS_PASSWORD": PASSWORD})
    assert "added the certificate to tls/crl.pem" in result.text(), result.text()
    # The scheduler needs no client certificate, and the list now contains the one in its directory.
    server_only = {key: value for key, value in json.loads(config.read_text()).items() if key != "client_cert_path"}
    config.write_text(json.dumps(server_only))
    scheduler = raw(shell, "MS_SCHED", config)
    worker = raw(shell, "MS_WORKER", shell.folder / "revoked" / "config.json")
    scheduler.wait_for(r"connection from 127\.0\.0\.1 turned away: its certificate is revoked")
    worker.wait_for("(refuses|rejects) this side's certificate", deadline_s=SOON_S)
    assert "Traceback" not in worker.text() + scheduler.text() and "rank=" not in worker.text()
    worker.kill()
    query = shell.run_command("check", f"127.0.0.1:{shell.port}", env={"XDG_RUNTIME_DIR": str(shell.folder / "home")})
    assert "the scheduler requires TLS" in query.text() and scheduler.alive, "the scheduler must keep running"
