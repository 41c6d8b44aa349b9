"""The operator's console in Chromium with a real API server: the list of jobs, and the view of one job."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.http.chromium import Tab, browsers, picture
from tests.kubernetes.cluster import Kubernetes
from tests.kubernetes.test_elastic_jobs import COVEY_RUN, SLOW_S, elastic

from covey.kubernetes.operator import Operator
from covey.management import jobs_api
from covey.management.http_server import HttpServer

TOKEN = "tests-own-token"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from browsers()


@contextlib.contextmanager
def console(kubernetes: Kubernetes, operator: Operator) -> Iterator[int]:
    sock = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(jobs_api.make_app(operator, token=TOKEN), [sock])
    kubernetes.do(server.start())
    yield sock.getsockname()[1]
    kubernetes.do(server.stop())


@pytest.mark.timeout(300)
def test_console_shows_kills_scales_suspends_and_resumes_a_job(kubernetes: Kubernetes, browser: Any, tmp_path: Path) -> None:
    operator = kubernetes.operator()
    source = elastic(kubernetes, "more", 2, [*COVEY_RUN, str(kubernetes.folder / "long.py")])
    source["metadata"] |= {"labels": {"fault-scheduling": "grace"}, "annotations": {"recover-strategy": "recover-in-place"}}
    kubernetes.apply(source)
    name = f"{kubernetes.namespace}/more"
    with console(kubernetes, operator) as port:
        url = f"http://127.0.0.1:{port}"
        tab = Tab(browser)
        page = tab.page
        page.goto(f"{url}/?job=team/none")
        page.locator("main .trouble", has_text="job team/none not found").wait_for()
        for index in range(2):
            kubernetes.wait_for_log(f"more-worker-{index}", "step 4 world 2", SLOW_S)
        page.goto(f"{url}/")
        page.click(f".jobs >> text={name}")
        for rank in range(2):
            tab.row(f"worker:{rank}").wait_for()
        picture(page, tmp_path, "console-job")

        tab.row("worker:1").click()
        assert page.locator(".panel >> text=Drain").count() == 0, (
            "a job scales in by its last pods, so no Drain for a chosen worker"
        )
        page.click(".panel >> text=Kill…")
        page.click("dialog button.danger")
        page.locator(".note", has_text="recover-in-place resumed").locator("a").click()
        page.locator(".incident:focus", has_text="SIGKILL").wait_for()
        stages = page.locator(".incident", has_text="SIGKILL").locator(".stage")
        stages.nth(4).wait_for()
        assert stages.count() == 5
        page.keyboard.press("Escape")

        tab.view("logs")
        tab.until("document.querySelector('.log')?.textContent.includes('world 2')")
        page.fill("#find", "began pid")
        page.press("#find", "Enter")
        tab.until("document.querySelectorAll('.log mark').length > 0")
        tab.view("settings")
        page.locator("th", has_text="MS_WORKER_NUM").wait_for()
        tab.view("story")
        page.locator(".story li", has_text="to be killed").wait_for()

        page.click("#actions >> text=Scale…")
        page.fill('dialog input[name="wanted"]', "3")
        page.click("dialog button.primary")
        page.locator(".note", has_text="scaling to 3 workers").wait_for()
        assert kubernetes.job("more")["spec"]["msReplicaSpecs"]["Worker"]["replicas"] == 3

        page.click("#actions >> text=Stop…")
        page.click("dialog button.danger")
        page.locator("main .trouble", has_text=f"{name} is Suspended").wait_for()
        kubernetes.wait(lambda: not kubernetes.pods("more"), "the pods to be deleted")
        picture(page, tmp_path, "console-job-suspended")
        page.click("text=Resume…")
        page.click("dialog >> text=Resume >> nth=-1")
        kubernetes.wait(lambda: len(kubernetes.pods("more")) == 4, "the new number of pods")
        assert [message for message in tab.errors if "Failed to load" not in message] == []
        refused = httpx2.post(f"{url}/jobs/{name}/suspend", json={"suspend": True}, headers={"X-Forwarded-For": "192.0.2.7"})
        assert refused.status_code == 401
