"""Credentials of a process for its cluster: join secret and TLS contexts, loaded from the settings."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from covey import ps_context
from covey.core.addresses import is_loopback
from covey.log import log
from covey.settings import Settings
from covey.storage import join_secret as secret
from covey.transport import tls


class Credentials(NamedTuple):
    """Join secret and TLS contexts of one process. A context is None without TLS, or if the process does not use that side."""

    secret: str = ""  # "": none
    server_context: ssl.SSLContext | None = None
    client_context: ssl.SSLContext | None = None
    secret_configured: bool = False  # the secret is from a setting: a node refuses a scheduler that does not require it

    @property
    def uses_tls(self) -> bool:
        return self.server_context is not None or self.client_context is not None


def load_credentials(settings: Settings, *, listens_at: str = "", reaches: str = "") -> Credentials:
    """Load the credentials of a process that listens at `listens_at`, or else of one that connects to `reaches`.

    Beyond loopback, the user's secret file is used if no secret is configured, and created if it is missing. On loopback, a
    process that listens uses only a configured secret; one that connects also reads the file, if it exists.

    Raise `UsageError` if a secret or TLS file is unusable or the TLS configuration has no certificate for this side, and
    `StoreError` if the secret file cannot be created.
    """
    host = listens_at or reaches
    beyond_loopback = bool(host) and not is_loopback(host)
    configured = bool(settings.secret or settings.secret_file)
    join_secret = ""
    if configured or beyond_loopback or not listens_at:
        join_secret = secret.load_join_secret(settings.secret, settings.secret_file, make=beyond_loopback)
    if not settings.tls_config and not ps_context.get_ps_context("enable_ssl"):
        return Credentials(join_secret, secret_configured=configured)
    config = settings.tls_config or str(ps_context.get_ps_context("config_file_path"))
    files = tls.read_config(config)
    unused = {"client_cert_path": ""} if listens_at else {"server_cert_path": ""}  # a side needs only its own certificate
    contexts = tls.build_contexts(
        msgspec.structs.replace(files, **unused),
        server_password=settings.tls_server_password or str(ps_context.get_ps_context("server_password")),
        client_password=settings.tls_client_password or str(ps_context.get_ps_context("client_password")),
        now=datetime.now(UTC),
    )
    for warning in contexts.warnings:
        log.warning("%s", warning)
    if listens_at and contexts.server is None:
        raise tls.tls_error(f"{config} has no server_cert_path: a scheduler with TLS needs one")
    if not listens_at and contexts.client is None:
        raise tls.tls_error(f"{config} has no client_cert_path: a node of a cluster with TLS needs one")
    if beyond_loopback and listens_at:
        log.warning("control connections are encrypted; the tensors that gloo exchanges between workers are not")
    return Credentials(join_secret, contexts.server, contexts.client, configured)
