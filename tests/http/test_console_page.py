"""The web console in Chromium: actions on a real training, the token, other web pages, a thousand nodes, accessibility.

Screenshots go to the test's directory, or, with COVEY_PICTURES=docs/images, to the images of the documents.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.http.chromium import Tab, browsers, picture
from tests.http.serving import TOKEN, FakeScheduler, example_node, example_view, serving
from tests.processes.command import Shell
from tests.processes.harness import until

from covey.core.cluster.view import ClusterView, NodeView
from covey.core.effects import Level, PublishEvent
from covey.core.event_log import EventLog
from covey.core.messages import KillRequest, ScaleRequest
from covey.core.types import NodeState, Role
from covey.errors import ExitCode, PeerError
from covey.management import jobs_api

pytestmark = pytest.mark.timeout(240)
SCRIPT = """
import pathlib, sys, time
import torch
from torch import nn
import covey

covey.init()
torch.manual_seed(1)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
x = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
loop = covey.Loop(net, optimizer, covey.Data(data, 8), steps=1_000_000, checkpoint=covey.Checkpoint(sys.argv[1], every=10**6))
for inputs, wanted in loop:
    optimizer.zero_grad()
    loss = (net(inputs) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    covey.report(loss=loss)
    print(f"step {loop.step} loss {loss.item():.4f}", flush=True)
    time.sleep(0.04)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as shell:
        yield shell


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from browsers()


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    opened = Tab(browser)
    yield opened
    opened.context.close()


def test_console_kills_scales_drains_and_dumps_a_training(shell: Shell, tab: Tab, tmp_path: Path) -> None:
    shell.script(SCRIPT, "train.py")
    port = shell.port
    words = ("run", "-n", "3", "--manage-port", str(port), "train.py", str(tmp_path / "checkpoints"))
    run = shell.covey(*words, env={"COVEY_STRATEGY": None})
    shell.wait_for_log(2, "step 3 ")
    shell.listening(port)
    tab.page.goto(f"http://127.0.0.1:{port}/")
    for rank in range(3):
        tab.row(f"worker:{rank}").wait_for()
    ready(tab)
    tab.until("[...document.querySelectorAll('.chart .curve')].every((path) => path.getAttribute('d').includes('L'))")

    kill_a_worker(tab, tmp_path)
    check_recovery_view(tab, tmp_path)
    scale_out(tab, tmp_path)
    drain(tab)
    send_request_to_killed_scheduler(tab, shell, port)
    check_log_view(tab, port)
    check_settings_and_event_views(tab, tmp_path)

    tab.page.click("#actions >> text=Dump…")
    tab.page.fill('dialog input[name="reason"]', "seen enough")
    tab.page.click("dialog button.danger")
    assert run.wait() == ExitCode.STOPPED, run.tail()
    assert "seen enough" in run.text() and list((tmp_path / "checkpoints").iterdir())
    tab.until("document.querySelector('#line').textContent !== 'live'")
    elsewhere = [url for url in tab.requested if not url.startswith(f"http://127.0.0.1:{port}/")]
    errors = [text for text in tab.errors if "ERR_" not in text and "Failed to load" not in text]
    assert elsewhere == [] and errors == []


def ready(tab: Tab) -> None:
    tab.until("document.querySelector('#phase').textContent === 'ready'")


def kill_a_worker(tab: Tab, folder: Path) -> None:
    page = tab.page
    tab.row("worker:1").click()
    page.locator(".panel dd", has_text="train").wait_for()
    before = page.locator(".panel .facts div", has_text="process").locator("dd").inner_text()
    page.click(".panel >> text=Kill…")
    picture(page, folder, "console-confirm")
    page.click("dialog >> text=Cancel")
    assert tab.row("worker:1").locator(".c-restarts").inner_text() == "0", "the action must wait for the confirmation"
    page.click(".panel >> text=Kill…")
    page.click("dialog button.danger")
    tab.until("document.querySelector('[id=\"row-worker:1\"] .c-restarts').textContent === '1'")
    tab.row("worker:1").wait_for()
    page.locator(".panel .story li", has_text="died").wait_for()
    page.locator(".note", has_text="worker:1 (rank 1): killed by SIGKILL. recover-in-place resumed after").wait_for()
    assert page.locator(".panel .facts div", has_text="process").locator("dd").inner_text() != before
    page.keyboard.press("Escape")


def check_recovery_view(tab: Tab, folder: Path) -> None:
    page = tab.page
    page.keyboard.press("2")  # the recoveries
    incident = page.locator(".incident", has=page.locator(".badge", has_text="resumed")).first
    incident.wait_for()
    stages = incident.locator(".stage").evaluate_all("(rows) => rows.map((row) => row.dataset.stage)")
    assert stages == ["detected", "decided", "re-formed", "restored", "resumed"]
    assert "SIGKILL" in incident.inner_text() and "worker:1 is restarted" in incident.inner_text()
    tab.close_notes()
    picture(page, folder, "console-recovery")


def scale_out(tab: Tab, folder: Path) -> None:
    page = tab.page
    tab.view("nodes")
    page.click("#actions >> text=Scale…")
    page.fill('dialog input[name="wanted"]', "4")
    page.click("dialog button.primary")
    tab.row("worker:3").wait_for()
    tab.until("document.querySelector('[data-of=\"workers\"]').textContent === '4 / 4'")
    ready(tab)
    tab.close_notes()
    picture(page, folder, "console")


def drain(tab: Tab) -> None:
    """Draining all workers is refused, one is drained. The scale dialog is open at the end."""
    page = tab.page
    tab.row("worker:0").click()
    page.click(".panel >> text=Drain host…")
    page.click("dialog button.primary")
    page.locator("dialog .trouble", has_text="not all workers can be removed").wait_for()
    page.keyboard.press("Escape")
    tab.row("worker:3").click()
    page.click(".panel >> text=Drain…")
    page.click("dialog button.primary")
    tab.until("document.querySelector('[data-of=\"workers\"]').textContent.startsWith('3 /')")
    page.keyboard.press("Escape")
    page.click("#actions >> text=Scale…")
    page.click("dialog button.primary")
    page.locator("dialog .trouble", has_text="the cluster has 3 workers already").wait_for()


def send_request_to_killed_scheduler(tab: Tab, shell: Shell, port: int) -> None:
    page = tab.page
    scheduler = next(node["pid"] for node in shell.nodes() if node["role"] == "scheduler")
    os.kill(scheduler, signal.SIGKILL)
    page.fill('dialog input[name="wanted"]', "2")
    page.click("dialog button.primary")  # received by the restarted scheduler, or lost: the page reports either
    page.locator("dialog .trouble:not(:empty)").or_(page.locator(".note", has_text="begin to scale in")).first.wait_for()
    page.keyboard.press("Escape")
    shell.listening(port)
    tab.until("document.querySelector('#line').textContent === 'live'")
    ready(tab)


def check_log_view(tab: Tab, port: int) -> None:
    page = tab.page
    page.goto(f"http://127.0.0.1:{port}/#logs/worker:0")
    tab.until("document.querySelector('.log')?.childElementCount > 5")
    shown = page.locator(".log > span").count()
    tab.until(f"document.querySelector('.log').childElementCount > {shown}")  # the log is followed
    page.fill("#find", "STEP 3 ")
    page.press("#find", "Enter")
    tab.until("document.querySelectorAll('.log mark').length === 1")
    assert page.locator(".log").inner_text().startswith("step 3 loss ")


def check_settings_and_event_views(tab: Tab, folder: Path) -> None:
    page = tab.page
    tab.view("settings")
    number = page.locator('.plain-table tr:has(th:text-is("MS_WORKER_NUM"))')
    number.wait_for()
    assert number.locator("td").nth(0).inner_text() == "3" and number.locator("td").nth(1).inner_text() != "default"
    tab.view("story")
    page.locator(".story li", has_text="to be killed").wait_for()
    picture(page, folder, "console-story")


def test_remote_user_needs_token_and_other_pages_are_blocked(browser: Any, tmp_path: Path) -> None:
    source, other = FakeScheduler(example_view()), FakeScheduler(example_view())
    with serving(source) as port, serving(other) as elsewhere:
        remote = Tab(browser, extra_http_headers={"X-Forwarded-For": "192.0.2.7"})
        page = remote.page
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#login")
        assert page.locator("#figures dd").count() == 0
        page.fill("#token", "guess")
        page.click("#login >> text=Open")
        page.locator("#login .trouble", has_text="does not have this cluster's token").wait_for()
        picture(page, tmp_path, "console-token")
        page.fill("#token", TOKEN)
        page.click("#login >> text=Open")
        remote.until("document.querySelector('#line').textContent === 'live'")
        page.reload()  # the tab keeps the token
        remote.until("document.querySelector('#line').textContent === 'live'")
        remote.context.close()

        evil = Tab(browser)
        evil.page.goto(f"http://127.0.0.1:{elsewhere}/")
        tries = """async (url) => {
          const of = (path, options) => fetch(url + path, options).then((a) => a.type + a.status, () => "blocked");
          const post = { method: "POST", mode: "no-cors" };
          return [await of("/key"), await of("/key", { mode: "no-cors" }), await of("/stop", post)];
        }"""
        assert evil.page.evaluate(tries, f"http://127.0.0.1:{port}") == ["blocked", "blocked", "blocked"]
        evil.context.close()
    assert source.stops == []


class LargeCluster(FakeScheduler):
    """A thousand workers whose steps and heartbeats change in every view."""

    size = 1000

    def view(self) -> ClusterView:
        now = time.time()
        rng, step = random.Random(int(now * 10)), int(now * 25) % 1_000_000
        nodes = [
            NodeView(
                *(Role.WORKER, str(rank), rank, f"gpu-{rank // 8:03}", f"10.0.{rank // 800}.{rank // 8 % 100}"),
                *(NodeState.ALIVE, True, step + rng.randrange(2), "train"),
                beat_age_s=rng.random() * 3,
                loss=rng.random(),
                busy_s=0.03,
            )
            for rank in range(self.size)
        ]
        return msgspec.structs.replace(example_view(*nodes), now=now, goal=self.size)


def test_update_of_thousand_nodes_touches_only_visible_rows(tab: Tab, tmp_path: Path) -> None:
    """Only visible rows exist, and an update changes no others. The duration is printed and not asserted."""
    with serving(LargeCluster(example_view())) as port:
        page = tab.page
        page.goto(f"http://127.0.0.1:{port}/")
        tab.until("document.querySelectorAll('.cells i').length === 1000")
        assert page.locator(".scroller .row").count() < 60
        touched = """() => new Promise((done) => {
          const rows = new Set(), drawn = [];
          const one = (change) => rows.add(change.target.closest?.(".row, .cells i") ?? change.target);
          const seen = new MutationObserver((changes) => changes.forEach(one));
          seen.observe(document.querySelector("main"), { subtree: true, childList: true, attributes: true });
          document.addEventListener("drawn", (event) => {
            drawn.push(Math.round(event.detail));
            if (drawn.length === 5) done([rows.size, document.querySelectorAll("*").length, drawn]);
          });
        })"""
        rows, elements, drawn = page.evaluate(touched)
        print(
            f"1000 nodes: {rows} elements of {elements} touched by {len(drawn)} drawings, which took {drawn} ms",
            file=sys.stderr,
        )
        assert 0 < rows < 400
        page.locator(".scroller").evaluate("(box) => { box.scrollTop = box.scrollHeight; }")
        tab.row("worker:999").wait_for()
        page.keyboard.press("/")
        page.keyboard.type("worker:77 gpu-096")
        tab.until("document.querySelectorAll('.scroller .row:not([hidden])').length < 12")
        page.fill("#filter", "")
        page.evaluate("scrollTo(0, 0)")
        picture(page, tmp_path, "console-thousand")
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 360, "height": 780})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "the page must not scroll horizontally on a phone"
        )
        page.evaluate("scrollTo(0, 0)")
        picture(page, tmp_path, "console-phone")
        assert tab.errors == []


# Returns every visible text with its contrast to the background, by WCAG's formula.
CONTRASTS = """() => {
  const channels = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const [r, g, b, a = 1] = channels(getComputedStyle(e).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility() || !element.getBoundingClientRect().width) continue;
    const style = getComputedStyle(element);
    const ink = light(channels(element instanceof SVGElement ? style.fill : style.color).slice(0, 3));
    const paper = light(behind(element));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    found.push([contrast, `${element.tagName}.${element.getAttribute("class")} ${element.textContent.slice(0, 30)}`]);
  }
  return found;
}"""


NOTES = (
    "import('/console/actions.js').then(({ note }) => { note('text', { link: 'to', to: '#' }); note('bad', { bad: true }); })"
)


def all_states() -> FakeScheduler:
    """Return a cluster with every node state and event level, because each has a colour."""
    states = (NodeState.ALIVE, NodeState.SUSPECT, NodeState.DEAD, NodeState.LEFT)
    nodes = [example_node(Role.WORKER, rank, state) for rank, state in enumerate(states)]
    slow = msgspec.structs.replace(example_node(Role.WORKER, 4), busy_s=0.5, straggles=3.0, log="rank-4.log")
    source = FakeScheduler(example_view(*nodes, slow))
    for level in Level:
        source.event_log.add(PublishEvent("worker-1", "died", "killed by SIGKILL", level), 1.0)
    return source


def test_texts_have_contrast_and_fit_a_small_phone(browser: Any, tmp_path: Path) -> None:
    with serving(all_states()) as port:
        for scheme in ("light", "dark"):
            tab = Tab(browser, color_scheme=scheme)
            page = tab.page
            page.goto(f"http://127.0.0.1:{port}/")
            tab.row("worker:worker-4", "slow").click()
            page.locator(".panel >> text=Kill…").click()
            page.locator("dialog .danger").hover()
            seen = page.evaluate(CONTRASTS)
            page.keyboard.press("Escape")
            page.keyboard.press("Escape")
            page.evaluate(NOTES)
            page.set_viewport_size({"width": 360, "height": 700})
            for view in ("nodes", "recoveries", "story", "logs", "settings"):
                tab.view(view)
                seen += page.evaluate(CONTRASTS)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
                picture(page, tmp_path, f"console-{scheme}-{view}")
            assert [(round(contrast, 2), what) for contrast, what in seen if contrast < 4.5] == [] and len(seen) > 60
            tab.context.close()


def test_all_actions_work_by_keyboard(tab: Tab) -> None:
    source = all_states()
    with serving(source) as port:
        page, press = tab.page, tab.page.keyboard.press
        page.goto(f"http://127.0.0.1:{port}/")
        tab.row("worker:worker-4", "slow").wait_for()
        focused = "(e => e.textContent.slice(0, 20) || e.id || e.getAttribute('aria-label'))(document.activeElement)"
        outlined = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        reached = []
        for _ in range(40):
            press("Tab")
            reached.append(page.evaluate(focused))
            assert page.evaluate(outlined), reached
            if page.evaluate("document.activeElement.matches('.scroller')"):
                break
        order = ["Skip to the content", "covey", "Scale…", "Dump…", "Stop…", "?", "Cluster", "Settings", "filter", "restarts"]
        assert [name for name in reached if name in order] == order
        press("End")
        press("Enter")  # the last row is that of rank 4
        page.locator(".panel h2", has_text="worker-4").wait_for()
        for button, recorded in (("Drain…", "scales"), ("Kill…", "requests")):
            while page.evaluate(focused) != button:
                press("Tab")
            press("Enter")
            page.wait_for_selector("dialog[open]")
            press("Escape")
            tab.until("!document.querySelector('dialog')")
            assert page.evaluate(focused) == button and getattr(source, recorded) == []
            press("Enter")
            while page.evaluate(focused) != button.rstrip("…"):
                press("Tab")
            press("Enter")
            until(partial(getattr, source, recorded), recorded, 60)
            tab.until("!document.querySelector('dialog')")
        assert source.requests == [KillRequest("worker:worker-4", "requested by 127.0.0.1")]
        assert source.scales == [ScaleRequest(node_ids=["worker:worker-4"])]
        press("Escape")
        tab.until("!document.querySelector('.panel') && document.activeElement.matches('.scroller')")
        for key, view in zip("2345", ("recoveries", "story", "logs", "settings"), strict=True):
            press(key)
            tab.until(f"document.querySelector('#tabs [aria-current]').dataset.view === '{view}'")
        press("s")
        page.keyboard.type("7")
        assert page.evaluate("document.querySelector('dialog input').value") == "7"
        press("Enter")
        until(lambda: len(source.scales) == 2, "the scale request", 60)
        assert source.scales[1].more_workers == 3 and tab.errors == []


class FakeOperator:
    """An operator with two jobs, one running and one pending."""

    def __init__(self) -> None:
        self.event_log = EventLog()
        self.event_log.add(PublishEvent("team/digits", "Recovered", "worker-1 runs again"), 1.0)

    async def forward_request(self, key: tuple[str, str], method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        raise PeerError(f"{'/'.join(key)} has no scheduler here")

    def stream(self, key: tuple[str, str]) -> AsyncIterator[bytes]:
        raise PeerError(f"{'/'.join(key)} has no scheduler here")

    async def scale(self, key: tuple[str, str], workers: int) -> str:
        raise PeerError("not here")

    suspend = scale

    def list_jobs(self) -> list[dict[str, Any]]:
        progress = {"phase": "ready", "step": 1200, "world": 4, "recovery": "recover of worker:1, 140 ms"}
        status = {"state": "Running", "workers": "4/4", "restartsTotal": 1, "progress": progress}
        pending = {"state": "Created", "workers": "0/8", "waiting": "8 pods wait for a node"}
        return [{"metadata": {"namespace": "team", "name": n}, "status": s} for n, s in (("digits", status), ("text", pending))]


def test_operator_page_lists_jobs(tab: Tab, tmp_path: Path) -> None:
    with serving(app=jobs_api.make_app(FakeOperator(), token=TOKEN)) as port:
        tab.page.goto(f"http://127.0.0.1:{port}/")
        cells = tab.page.locator(".jobs tbody tr").filter(has_text="digits").locator("th, td")
        cells.first.wait_for()
        row = ["team/digits", "Running", "4/4", "1\u202f200", "1", "ready", "recover of worker:1, 140 ms", ""]
        assert cells.all_inner_texts() == row
        assert "8 pods wait for a node" in tab.page.locator(".jobs tbody").inner_text()
        picture(tab.page, tmp_path, "console-jobs")
        tab.page.keyboard.press("2")
        tab.page.locator(".story li", has_text="worker-1 runs again").wait_for()
        assert tab.page.locator("#actions button").count() == 0 and tab.errors == []
