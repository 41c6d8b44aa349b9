"""Client of the Kubernetes API on plain dicts: get, list, watch, create, replace, patch, apply, delete, and logs.

lightkube finds the cluster and provides the credentials: kubeconfig, service account, rotating tokens, exec plugins. Objects
stay dicts, because a plan works on the server's data and not on a model of it. Requests go through `http1_client`, which needs
less CPU time than lightkube's client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import msgspec
import yaml
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from covey.errors import ExitCode, PeerError, UsageError
from covey.kubernetes.http1_client import HttpClient

KubeObject = dict[str, Any]

PAGE_SIZE = 500
REQUEST_TIMEOUT_S = 20.0
WATCH_DURATION_S = 60  # the server ends a watch after this time; the next one continues from the last version
WATCH_SILENCE_MAX_S = 75.0  # a watch without data for longer has a dead connection
CONCURRENT_REQUESTS_MAX = 8  # more cost the server more and complete no sooner
UNAUTHORIZED = 401
ERROR_TEXT_MAX = 200  # characters quoted of another library's error message
METADATA_ONLY_HEADERS = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"}


class ResourceKind(NamedTuple):
    """A kind of object and its path in the API."""

    root: str
    plural: str
    name: str

    def path(self, namespace: str = "", name: str = "", sub: str = "") -> str:
        parts = [self.root, *(["namespaces", namespace] if namespace else []), self.plural, name, sub]
        return "/" + "/".join(part for part in parts if part)


POD = ResourceKind("api/v1", "pods", "Pod")
SERVICE = ResourceKind("api/v1", "services", "Service")
SECRET = ResourceKind("api/v1", "secrets", "Secret")
CONFIG_MAP = ResourceKind("api/v1", "configmaps", "ConfigMap")
EVENT = ResourceKind("api/v1", "events", "Event")
NODE = ResourceKind("api/v1", "nodes", "Node")
NAMESPACE = ResourceKind("api/v1", "namespaces", "Namespace")
LEASE = ResourceKind("apis/coordination.k8s.io/v1", "leases", "Lease")
CRD = ResourceKind("apis/apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition")
MSJOB = ResourceKind("apis/mindspore.gitee.com/v1", "msjobs", "MSJob")
ASCENDJOB = ResourceKind("apis/mindxdl.gitee.com/v1", "ascendjobs", "AscendJob")
POD_GROUP = ResourceKind("apis/scheduling.volcano.sh/v1beta1", "podgroups", "PodGroup")

NOT_FOUND = 404
CONFLICT = 409  # the object exists already, or has another resourceVersion or UID


class ApiError(PeerError):
    """Error response of the API server; `code` is the HTTP status, 0 if there was no response."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message, ExitCode.UNREACHABLE if code == 0 else ExitCode.REFUSED)
        self.code = code
        self.reason = reason

    @property
    def is_transient(self) -> bool:
        return self.code in (0, 408, 429) or self.code >= 500


class Page(NamedTuple):
    """All objects of a list, and the resourceVersion from which a watch can continue."""

    items: list[KubeObject]
    version: str


class ApiCredentials:
    """Authorization header, obtained from lightkube's auth flow and cached until the server refuses it."""

    def __init__(self, auth: httpx2.Auth | None) -> None:
        self._auth = auth
        self._headers: dict[str, str] | None = None if auth is not None else {}

    async def auth_headers(self, *, refused: bool = False) -> dict[str, str]:
        """Return the authorization header, {} if the user has none. `refused`: the last one got 401, so obtain a new one."""
        if self._auth is not None and (self._headers is None or refused):
            flow = self._auth.async_auth_flow(httpx2.Request("GET", "https://kubernetes"))
            request = await anext(flow)
            if refused and request.headers.get("authorization") == (self._headers or {}).get("authorization"):
                with contextlib.suppress(StopAsyncIteration):
                    request = await flow.asend(httpx2.Response(UNAUTHORIZED))
            await flow.aclose()
            self._headers = {k: v for k, v in request.headers.items() if k.lower() == "authorization"}
        return self._headers or {}


class Api:
    """Client of one API server."""

    def __init__(self, config: SingleConfig) -> None:
        self.server = str(config.cluster.server)
        self.namespace = config.namespace
        context = verify_cluster(config.cluster, config.user, config.abs_file) if config.user else None
        self._http = HttpClient(self.server, context, timeout_s=REQUEST_TIMEOUT_S)
        self._credentials = ApiCredentials(user_auth(config.user))
        self._request_slots = asyncio.Semaphore(CONCURRENT_REQUESTS_MAX)

    async def close(self) -> None:
        self._http.close()

    async def get_api_resources(self, group: str, version: str) -> KubeObject:
        """Return the resources of an API group; `ApiError` 404 if the server does not have it."""
        return await self._request("GET", f"/apis/{group}/{version}")

    async def get(self, kind: ResourceKind, namespace: str, name: str, sub: str = "") -> KubeObject:
        return await self._request("GET", kind.path(namespace, name, sub))

    async def create(
        self,
        kind: ResourceKind,
        namespace: str,
        obj: Mapping[str, Any],
        name: str = "",
        sub: str = "",
        *,
        brief: bool = False,
    ) -> KubeObject:
        """Create an object; `ApiError` 409 if it exists. With `brief` the response has its metadata only, which is cheaper."""
        return await self._request("POST", kind.path(namespace, name, sub), body=obj, brief=brief)

    async def replace(
        self, kind: ResourceKind, namespace: str, obj: Mapping[str, Any], sub: str = "", *, brief: bool = False
    ) -> KubeObject:
        """Replace an object; `ApiError` 409 if its resourceVersion differs from that in `obj`."""
        return await self._request("PUT", kind.path(namespace, obj["metadata"]["name"], sub), body=obj, brief=brief)

    async def patch(self, kind: ResourceKind, namespace: str, name: str, patch: Mapping[str, Any], sub: str = "") -> KubeObject:
        """Send a JSON merge patch; return the patched object."""
        return await self._request("PATCH", kind.path(namespace, name, sub), body=patch, content="application/merge-patch+json")

    async def apply(self, kind: ResourceKind, namespace: str, obj: Mapping[str, Any], manager: str) -> KubeObject:
        """Send a server-side apply, which takes over conflicting fields of other managers."""
        return await self._request(
            "PATCH",
            kind.path(namespace, obj["metadata"]["name"]),
            body=obj,
            content="application/apply-patch+yaml",
            query={"fieldManager": manager, "force": "true"},
        )

    async def delete(
        self, kind: ResourceKind, namespace: str, name: str, *, uid: str = "", grace: int | None = None
    ) -> KubeObject:
        """Delete an object; the server deletes dependent objects in the background.

        With `uid`, raise `ApiError` 409 if the object has another UID. `grace` is in seconds; None: the object's default.
        """
        options: KubeObject = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        return await self._request("DELETE", kind.path(namespace, name), body=options)

    async def stream_log(self, namespace: str, pod: str, container: str, *, follow: bool) -> AsyncIterator[str]:
        """Yield the lines of a container's log; with `follow`, until the container ends."""
        query = {"container": container, "follow": str(follow).lower()}
        async for line in self._stream_lines(POD.path(namespace, pod, "log"), query, None):
            yield line.decode(errors="replace")

    async def list(self, kind: ResourceKind, namespace: str = "", selector: str = "") -> Page:
        """Return all objects of a kind, requested in pages of PAGE_SIZE. "" as namespace: all namespaces."""
        items: list[KubeObject] = []
        query: dict[str, str] = {"limit": str(PAGE_SIZE), **({"labelSelector": selector} if selector else {})}
        while True:
            page = await self._request("GET", kind.path(namespace), query=query)
            items += page.get("items") or []
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return Page(items, str(metadata["resourceVersion"]))
            query["continue"] = metadata["continue"]

    async def watch(
        self, kind: ResourceKind, version: str, namespace: str = "", selector: str = ""
    ) -> AsyncIterator[tuple[str, KubeObject]]:
        """Yield the changes after a version: ADDED, MODIFIED, DELETED or BOOKMARK with the object.

        The server ends the watch after WATCH_DURATION_S. `ApiError` 410 if the version is too old.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_DURATION_S),
            **({"labelSelector": selector} if selector else {}),
        }
        async for line in self._stream_lines(kind.path(namespace), query, WATCH_SILENCE_MAX_S):
            event = msgspec.json.decode(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise ApiError(int(status.get("code", 500)), str(status.get("reason", "")), str(status.get("message", "")))
            yield event["type"], event["object"]

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
        brief: bool = False,
    ) -> KubeObject:
        data = msgspec.json.encode(body) if body is not None else None
        extra = {**({"Content-Type": content} if data is not None else {}), **(METADATA_ONLY_HEADERS if brief else {})}
        try:
            async with self._request_slots:
                response = await self._http.request(
                    method, path, query, {**await self._credentials.auth_headers(), **extra}, data
                )
                if response.status == UNAUTHORIZED:
                    headers = {**await self._credentials.auth_headers(refused=True), **extra}
                    response = await self._http.request(method, path, query, headers, data)
        except (OSError, TimeoutError, ConfigError) as error:
            raise self._unreachable_error(error) from None
        if response.status >= 400:
            raise _error_from_response(response.status, response.body, f"{method} {path}")
        obj: KubeObject = msgspec.json.decode(response.body)
        return obj

    async def _stream_lines(self, path: str, query: Mapping[str, str], silence_s: float | None) -> AsyncIterator[bytes]:
        try:
            async for part in self._http.stream_lines(path, query, await self._credentials.auth_headers(), silence_s):
                if isinstance(part, bytes):
                    yield part
                elif part.status >= 400:
                    if part.status == UNAUTHORIZED:
                        await self._credentials.auth_headers(refused=True)  # obtain a new one for the next attempt
                    raise _error_from_response(part.status, part.body, f"GET {path}")
        except (OSError, TimeoutError, ConfigError) as error:
            raise self._unreachable_error(error) from None

    def _unreachable_error(self, error: Exception) -> ApiError:
        why = str(error) or type(error).__name__
        return ApiError(0, "Unreachable", f"the API server {self.server} does not answer: {why}")


def _error_from_response(code: int, content: bytes, what: str) -> ApiError:
    try:
        status = msgspec.json.decode(content)
        reason, message = str(status.get("reason", "")), str(status.get("message", ""))
    except (msgspec.DecodeError, AttributeError):
        reason, message = "", content[:200].decode(errors="replace")
    if code == UNAUTHORIZED:
        message = "the API server does not accept the kubeconfig's user: its token or certificate may have expired"
    return ApiError(code, reason, f"{message} ({what}: {code} {reason})")


def connect(kubeconfig: str = "", context: str = "") -> Api:
    """Return a client for the API server of a kubeconfig. Raise `UsageError` if there is none or it is invalid.

    Without `kubeconfig` the first of these is used: the pod's service account, $KUBECONFIG, ~/.kube/config.
    """
    try:
        found = KubeConfig.from_file(Path(kubeconfig)) if kubeconfig else KubeConfig.from_env()
        if context and context not in found.contexts:
            known = ", ".join(sorted(found.contexts)) or "none"
            raise UsageError(f"--context {context} is not in the kubeconfig: expected one of {known}")
        single = found.get(context_name=context or None)
        if single is None or single.user is None:
            raise UsageError("the kubeconfig has no current context with a user: set one with kubectl config use-context NAME")
        return Api(single)
    except (ConfigError, FileNotFoundError) as error:
        raise UsageError(f"no Kubernetes cluster is configured: {error}; set KUBECONFIG or give --kubeconfig FILE") from None
    except (OSError, yaml.YAMLError, LookupError, AttributeError, TypeError, ValueError) as error:
        where = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        why = " ".join(str(error).split())[:ERROR_TEXT_MAX]
        raise UsageError(f"the kubeconfig {where} cannot be read: {type(error).__name__}: {why}") from None
