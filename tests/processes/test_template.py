"""The template: restarts, modules that prevent forks, and torch."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from tests.processes.child_helpers import HOME, ChildRunner, fifo, python, read_line

from covey.agent.children import Exit
from covey.errors import CoveyError

TORCH = ["numpy", "torch", "torch._dynamo"]


@pytest.fixture
def child_runner(tmp_path: Path) -> Iterator[ChildRunner]:
    child_runner = ChildRunner(tmp_path, fork=True, preload=[])
    yield child_runner
    child_runner.close()


# -- restarts ------------------------------------------------------------------------------------------------------

# Reports that it runs, and exits with the given code.
OBEDIENT = """
    import sys
    open(sys.argv[1], "w").close()
    sys.exit(int(open(sys.argv[2]).readline()))
"""


def module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, source: str) -> str:
    """Add a module that templates started from now on can import."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), HOME]))
    return name


def test_killed_template_does_not_affect_children(child_runner: ChildRunner) -> None:
    script = child_runner.script(OBEDIENT)
    started_at, orders = fifo(child_runner, "began"), fifo(child_runner, "orders")
    pid = child_runner.start("worker:0", script, started_at, orders)
    assert read_line(started_at) == ""
    first = child_runner.children.template_pid
    os.kill(first, signal.SIGKILL)
    assert (
        child_runner.run("worker:1", child_runner.script("import os; print(os.getppid())", "parent.py")).output
        == f"{os.getpid()}\n"
    )
    assert child_runner.children.template_pid not in (0, first)
    Path(orders).write_text("9")
    assert child_runner.result("worker:0").exit == Exit("worker:0", pid, 9, "exit code 9")


def test_forked_script_is_a_child_of_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The intermediate process exits late: the script must not have it as its parent."""
    late = """
        import os, time
        template = os.getpid()
        os.register_at_fork(after_in_parent=lambda: os.getpid() == template or time.sleep(0.3))
    """
    child_runner = ChildRunner(tmp_path, fork=True, preload=[module(monkeypatch, tmp_path, "late", late)])
    assert child_runner.run("worker:0", child_runner.script("import os; print(os.getppid())")).output == f"{os.getpid()}\n"
    child_runner.close()


def test_template_that_always_fails_is_replaced_by_exec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = module(monkeypatch, tmp_path, "deadly", "import os; print('last words', flush=True); os._exit(3)")
    child_runner = ChildRunner(tmp_path, fork=True, preload=[name])
    script = child_runner.script("import sys; print(sys.orig_argv[1])")
    assert child_runner.run("worker:0", script).output == "-u\n"
    child_runner.close()
    printed = [record.message for record in caplog.records if record.name == "covey.agent"]
    assert sum("template exited (exit code 3; its output: last words)" in line for line in printed) == 5
    assert printed[-1] == "template failed 5 times: workers are started by exec from now on"


def test_modules_that_cannot_be_preloaded_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covey.agent")
    threaded = module(
        monkeypatch,
        tmp_path,
        "threaded",
        """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """,
    )
    forking = module(monkeypatch, tmp_path, "forking", "import subprocess; it = subprocess.Popen(['sleep', '1000'])")
    broken = module(monkeypatch, tmp_path, "broken", "raise SystemExit('no licence')")
    good = module(monkeypatch, tmp_path, "good", "print('imported once')")
    child_runner = ChildRunner(tmp_path, fork=True, preload=[threaded, forking, "absent", broken, good])
    script = child_runner.script("""
        import sys
        before = [name for name in ("threaded", "forking", "broken", "good", "wave") if name in sys.modules]
        import threaded, good
        print(before)
    """)
    assert child_runner.run("worker:0", script).output == "['good']\n"
    child_runner.run_async(child_runner.children.preload(["good", "wave"]))
    assert child_runner.run("worker:0", script).output == "['good', 'wave']\n"
    os.kill(child_runner.children.template_pid, signal.SIGKILL)
    assert child_runner.run("worker:0", script).output == "['good', 'wave']\n"
    child_runner.close()
    for expected in (
        "template does not import threaded, because it started 1 thread",
        "template does not import forking, because a process was started",
        "template continues without absent, which cannot be imported (ModuleNotFoundError: No module named 'absent')",
        "template continues without broken, which cannot be imported (SystemExit: no licence)",
        "template output: imported once",
    ):
        assert sum(expected in message for message in caplog.messages) >= 1, (expected, caplog.messages)


def test_template_with_late_thread_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a timer of a module fires: detected before the fork, not by a child that hangs."""
    late = module(
        monkeypatch,
        tmp_path,
        "late",
        """
        import os, signal, threading
        def begin(number, frame):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            os.close(os.open(os.environ["NEWS"], os.O_WRONLY))
        signal.signal(signal.SIGUSR1, begin)
    """,
    )
    notice = str(tmp_path / "news")
    os.mkfifo(notice)
    monkeypatch.setenv("NEWS", notice)
    child_runner = ChildRunner(tmp_path, fork=True, preload=[late])
    script = child_runner.script("import threading; print(threading.active_count())")
    assert child_runner.run("worker:0", script).output == "1\n"
    os.kill(child_runner.children.template_pid, signal.SIGUSR1)
    assert read_line(notice) == ""
    assert child_runner.run("worker:0", script).output == "1\n"
    child_runner.close()
    assert any("cannot be forked any more (it started 1 thread)" in message for message in caplog.messages)


def slow_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChildRunner:
    """A child_runner whose template imports the module `slow`, which reports its import and waits until it is released."""
    for name in ("began", "go_on"):
        os.mkfifo(tmp_path / name)
    module(
        monkeypatch,
        tmp_path,
        "slow",
        f"""
        open("{tmp_path}/began", "w").close()
        open("{tmp_path}/go_on").read()
    """,
    )
    return ChildRunner(tmp_path, fork=True, preload=[])


async def begun(child_runner: ChildRunner) -> asyncio.Future[None]:
    """Return the import when it has begun."""
    importing = asyncio.ensure_future(child_runner.children.preload(["slow"]))
    assert await asyncio.to_thread(read_line, f"{child_runner.folder}/began") == ""
    return importing


async def go_on(child_runner: ChildRunner) -> None:
    await asyncio.to_thread(lambda: open(f"{child_runner.folder}/go_on", "w").close())


def test_start_waits_for_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child_runner = slow_import(tmp_path, monkeypatch)

    async def start() -> None:
        importing = await begun(child_runner)
        spec = child_runner.spec("worker:0", child_runner.script("import sys; print('slow' in sys.modules)"))
        starting = asyncio.ensure_future(child_runner.children.start(spec))
        await asyncio.sleep(0)
        assert not starting.done()
        await go_on(child_runner)
        await asyncio.gather(importing, starting)

    child_runner.run_async(start())
    assert child_runner.result("worker:0").output == "True\n"
    child_runner.close()


def test_cancelled_start_starts_nothing_and_does_not_affect_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child_runner = slow_import(tmp_path, monkeypatch)

    async def give_up() -> None:
        importing = await begun(child_runner)
        script = child_runner.script("print('it runs')")
        starting = asyncio.ensure_future(child_runner.children.start(child_runner.spec("worker:0", script)))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await go_on(child_runner)
        await asyncio.gather(importing, child_runner.children.start(child_runner.spec("worker:1", script)))

    child_runner.run_async(give_up())
    assert child_runner.result("worker:1").output == "it runs\n"  # forked after the other, which would have run by now
    assert child_runner.log("worker:0") == ""
    child_runner.close()
    assert list(child_runner.exits) == ["worker:1"]


def test_start_during_close_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child_runner = slow_import(tmp_path, monkeypatch)

    async def overtake() -> None:
        importing = await begun(child_runner)
        starting = asyncio.ensure_future(child_runner.children.start(child_runner.spec("worker:0", child_runner.script(""))))
        await asyncio.sleep(0)
        await child_runner.children.close()
        await importing
        with pytest.raises(CoveyError, match="worker:0 is not started: the agent is shutting down"):
            await starting

    child_runner.run_async(overtake())
    child_runner.close()
    assert child_runner.exits == {}


def test_exits_are_reported_with_uvloop(tmp_path: Path) -> None:
    child_runner = ChildRunner(tmp_path, fork=True, preload=[], loop=uvloop.new_event_loop)
    child_runner.start_all(
        *(child_runner.spec(f"worker:{n}", child_runner.script(f"raise SystemExit({n})", f"{n}.py")) for n in range(8))
    )
    assert [child_runner.result(f"worker:{n}").exit.code for n in range(8)] == list(range(8))
    child_runner.close()


# -- with torch ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_child_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildRunner]:
    child_runner = ChildRunner(tmp_path_factory.mktemp("torch"), fork=True, preload=TORCH)
    yield child_runner
    child_runner.close()


def test_child_with_optimizer_prints_the_same_as_python(torch_child_runner: ChildRunner) -> None:
    """torch's first optimizer imports triton in a CUDA build, and triton checks for leaks at the interpreter's end.

    The report is not printed; what C code writes to its stream `stderr`, such as the message of a crash, is.
    """
    script = torch_child_runner.script(
        """
        import ctypes, torch

        libc = ctypes.CDLL(None)
        libc.fputs.argtypes = ctypes.c_char_p, ctypes.c_void_p

        class Held:
            def __del__(self, write=libc.fputs, stream=ctypes.c_void_p.in_dll(libc, "stderr")):
                write(b"destroyed\\n", stream)

        held = Held()
        torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).step()
        print("stepped")
        """,
        "optimizer.py",
    )
    result = torch_child_runner.run("optimizer", script)
    assert (result.exit.code, result.output) == (0, "stepped\ndestroyed\n")


def test_eight_torch_children_start_concurrently(torch_child_runner: ChildRunner) -> None:
    """Each with its own random numbers and the thread count of a single process, from a template that never computed."""
    script = torch_child_runner.script(
        """
        import json, os, random, sys
        already = [name for name in ("torch", "torch._dynamo", "numpy") if name in sys.modules]
        import numpy, torch
        json.dump({
            "already": already, "threads": torch.get_num_threads(),
            "seeds": [torch.initial_seed(), random.random(), numpy.random.random(), torch.rand(1).item()],
            "env": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
        }, sys.stdout)
    """,
        "eight.py",
    )
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    torch_child_runner.start_all(
        *(torch_child_runner.spec(f"worker:{n}", script, env=env) for n in range(7)),
        torch_child_runner.spec("worker:7", script, env={**env, "OMP_NUM_THREADS": "1"}),
    )
    seen = [json.loads(torch_child_runner.result(f"worker:{n}").output) for n in range(8)]
    alone = json.loads(python(torch_child_runner.folder, script, env=env)[1])
    assert all(child["already"] == ["torch", "torch._dynamo", "numpy"] for child in seen)
    assert len({seed for child in seen for seed in child["seeds"]}) == 8 * 4
    assert [child["threads"] for child in seen] == [alone["threads"]] * 7 + [1]
    assert [child["env"] for child in seen] == [{}] * 7 + [{"OMP_NUM_THREADS": "1"}]


def test_torch_works_in_forked_child(torch_child_runner: ChildRunner) -> None:
    """Code that hangs or fails if the template has computed, or if the main module is not the child's own."""
    matmul = torch_child_runner.script(
        """
        import numpy, torch
        torch.set_num_threads(2)
        a = torch.rand(600, 600, requires_grad=True)
        (a @ a).sum().backward()
        assert torch.isfinite(a.grad).all()
        numpy.ones((600, 600)) @ numpy.ones((600, 600))
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        print("computed")
    """,
        "matmul.py",
    )
    loaders = torch_child_runner.script(
        """
        import io, pickle, torch
        from multiprocessing import get_context
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return i * i

        class Answer:
            def __init__(self, value): self.value = value

        def ask(value): return Answer(value + 1)

        if __name__ == "__main__":
            copy = pickle.loads(pickle.dumps(Answer(3)))
            assert type(copy) is Answer and copy.value == 3
            buffer = io.BytesIO()
            torch.save(Answer(4), buffer)
            buffer.seek(0)
            assert torch.load(buffer, weights_only=False).value == 4
            for method in ("fork", "spawn"):
                loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
                print(method, [batch.tolist() for batch in loader])
            with get_context("spawn").Pool(1) as pool:
                print([answer.value for answer in pool.map(ask, [1, 2])])
    """,
        "loaders.py",
    )
    torch_child_runner.start_all(
        torch_child_runner.spec("matmul", matmul),
        torch_child_runner.spec("script", loaders),
        torch_child_runner.spec("module", "loaders", module=True),
    )
    expected = "fork [[0, 1, 4, 9], [16, 25, 36, 49]]\nspawn [[0, 1, 4, 9], [16, 25, 36, 49]]\n[2, 3]\n"
    for name, printed in (("matmul", "computed\n"), ("script", expected), ("module", expected)):
        result = torch_child_runner.result(name)
        assert (result.exit.reason, result.output) == ("exit code 0", printed)
