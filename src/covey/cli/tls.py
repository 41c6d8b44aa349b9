"""The commands `covey tls init` and `covey tls revoke`."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click

from covey.cli.common import print_result
from covey.errors import UsageError

SERIAL_DIGITS_MAX = 48  # of a certificate's serial number; more digits are taken as a file name


def create_certificates(folder: str, names: tuple[str, ...], days: int, password: str, *, as_json: bool) -> None:
    """Create the files of `covey tls init` in `folder` and print their paths.

    Without `names` the certificates are for this host. A `password` of "" comes from COVEY_TLS_PASSWORD, else from a prompt.
    Raise UsageError for an invalid argument, a missing password or an existing file, and StoreError if a write fails.
    """
    from covey.transport import local_ca

    password = _resolve_password(password, new=True)
    hosts = list(names) or ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    made = [str(path) for path in local_ca.make_authority(Path(folder), names=hosts, days=days, password=password)]
    for path in [] if as_json else made:
        click.echo(path)
    print_result(as_json, f"use them with: covey run --tls {Path(folder) / 'config.json'} -n 4 train.py", files=made)


def revoke_certificate(folder: str, certificate: str, password: str, *, as_json: bool) -> None:
    """Add a certificate, given as a p12 file or as a decimal serial number, to crl.pem in `folder`, and print the path of
    crl.pem.

    `password` is as in `create_certificates`. Raise UsageError if an argument or file is not usable, and StoreError if crl.pem
    cannot be written.
    """
    from covey.transport import local_ca

    target = int(certificate) if certificate.isdecimal() and len(certificate) <= SERIAL_DIGITS_MAX else Path(certificate)
    path = local_ca.revoke_certificate(Path(folder), target, password=_resolve_password(password, new=False))
    print_result(
        as_json, f"added the certificate to {path}: copy this file to every host; processes read it at start", file=str(path)
    )


def _resolve_password(given: str, *, new: bool) -> str:
    password = given or os.environ.get("COVEY_TLS_PASSWORD", "")
    if not password:
        if not sys.stdin.isatty():
            raise UsageError("no password for the p12 files: give --password or set COVEY_TLS_PASSWORD")
        password = click.prompt("Password of the p12 files", hide_input=True, confirmation_prompt=new)
    return password
