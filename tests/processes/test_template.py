"""The template: kept alive, left without what cannot be forked, and good for torch."""

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
from tests.processes.child_helpers import HOME, Nursery, fifo, python, read_line

from covey.agent.children import Exit
from covey.errors import CoveyError

TORCH = ["numpy", "torch", "torch._dynamo"]


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path, fork=True, preload=[])
    yield nursery
    nursery.close()


# -- kept alive ----------------------------------------------------------------------------------------------------

# Tells that it runs, and ends with the code it is told.
OBEDIENT = """
    import sys
    open(sys.argv[1], "w").close()
    sys.exit(int(open(sys.argv[2]).readline()))
"""


def module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, source: str) -> str:
    """A module that templates opened from now on can import."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), HOME]))
    return name


def test_killing_the_template_hurts_no_child(nursery: Nursery) -> None:
    script = nursery.script(OBEDIENT)
    began, orders = fifo(nursery, "began"), fifo(nursery, "orders")
    pid = nursery.start("worker:0", script, began, orders)
    assert read_line(began) == ""
    first = nursery.children.template_pid
    os.kill(first, signal.SIGKILL)
    assert nursery.run("worker:1", nursery.script("import os; print(os.getppid())", "parent.py")).said == f"{os.getpid()}\n"
    assert nursery.children.template_pid not in (0, first)
    Path(orders).write_text("9")
    assert nursery.result("worker:0").exit == Exit("worker:0", pid, 9, "exit code 9")


def test_script_begins_as_child_of_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process between template and child exits late: the script must not see it as its parent."""
    late = """
        import os, time
        template = os.getpid()
        os.register_at_fork(after_in_parent=lambda: os.getpid() == template or time.sleep(0.3))
    """
    nursery = Nursery(tmp_path, fork=True, preload=[module(monkeypatch, tmp_path, "late", late)])
    assert nursery.run("worker:0", nursery.script("import os; print(os.getppid())")).said == f"{os.getpid()}\n"
    nursery.close()


def test_a_template_that_always_fails_gives_way_to_exec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = module(monkeypatch, tmp_path, "deadly", "import os; print('last words', flush=True); os._exit(3)")
    nursery = Nursery(tmp_path, fork=True, preload=[name])
    script = nursery.script("import sys; print(sys.orig_argv[1])")
    assert nursery.run("worker:0", script).said == "-u\n"
    nursery.close()
    said = [record.message for record in caplog.records if record.name == "covey.agent"]
    assert sum("the template ended (exit code 3, after saying: last words)" in line for line in said) == 5
    assert said[-1] == "the template failed 5 times: children are started by exec from now on"


def test_modules_that_cannot_be_preloaded_are_left_to_the_children(
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
    nursery = Nursery(tmp_path, fork=True, preload=[threaded, forking, "absent", broken, good])
    script = nursery.script("""
        import sys
        before = [name for name in ("threaded", "forking", "broken", "good", "wave") if name in sys.modules]
        import threaded, good
        print(before)
    """)
    assert nursery.run("worker:0", script).said == "['good']\n"
    nursery.do(nursery.children.preload(["good", "wave"]))
    assert nursery.run("worker:0", script).said == "['good', 'wave']\n"
    os.kill(nursery.children.template_pid, signal.SIGKILL)
    assert nursery.run("worker:0", script).said == "['good', 'wave']\n"
    nursery.close()
    for expected in (
        "importing threaded in the template is impossible, because it started 1 thread",
        "importing forking in the template is impossible, because a process was started",
        "the template goes on without absent, which cannot be imported (ModuleNotFoundError: No module named 'absent')",
        "the template goes on without broken, which cannot be imported (SystemExit: no licence)",
        "the template said: imported once",
    ):
        assert sum(expected in message for message in caplog.messages) >= 1, (expected, caplog.messages)


def test_a_template_in_which_a_thread_appears_late_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a timer of some module fires: seen before the fork, not by a child that hangs."""
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
    news = str(tmp_path / "news")
    os.mkfifo(news)
    monkeypatch.setenv("NEWS", news)
    nursery = Nursery(tmp_path, fork=True, preload=[late])
    script = nursery.script("import threading; print(threading.active_count())")
    assert nursery.run("worker:0", script).said == "1\n"
    os.kill(nursery.children.template_pid, signal.SIGUSR1)
    assert read_line(news) == ""
    assert nursery.run("worker:0", script).said == "1\n"
    nursery.close()
    assert any("cannot be forked any more (it started 1 thread)" in message for message in caplog.messages)


def slow_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nursery:
    """A nursery for whose template the module `slow` says that its import has begun, and waits until somebody lets it go on."""
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
    return Nursery(tmp_path, fork=True, preload=[])


async def begun(nursery: Nursery) -> asyncio.Future[None]:
    """The import, when it is under way."""
    importing = asyncio.ensure_future(nursery.children.preload(["slow"]))
    assert await asyncio.to_thread(read_line, f"{nursery.folder}/began") == ""
    return importing


async def go_on(nursery: Nursery) -> None:
    await asyncio.to_thread(lambda: open(f"{nursery.folder}/go_on", "w").close())


def test_a_start_waits_for_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = slow_import(tmp_path, monkeypatch)

    async def start() -> None:
        importing = await begun(nursery)
        spec = nursery.spec("worker:0", nursery.script("import sys; print('slow' in sys.modules)"))
        starting = asyncio.ensure_future(nursery.children.start(spec))
        await asyncio.sleep(0)
        assert not starting.done()
        await go_on(nursery)
        await asyncio.gather(importing, starting)

    nursery.do(start())
    assert nursery.result("worker:0").said == "True\n"
    nursery.close()


def test_a_cancelled_start_starts_nothing_and_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = slow_import(tmp_path, monkeypatch)

    async def give_up() -> None:
        importing = await begun(nursery)
        script = nursery.script("print('it runs')")
        starting = asyncio.ensure_future(nursery.children.start(nursery.spec("worker:0", script)))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await go_on(nursery)
        await asyncio.gather(importing, nursery.children.start(nursery.spec("worker:1", script)))

    nursery.do(give_up())
    assert nursery.result("worker:1").said == "it runs\n"  # forked after the other, which would have run by now
    assert nursery.log("worker:0") == ""
    nursery.close()
    assert list(nursery.exits) == ["worker:1"]


def test_a_start_that_is_overtaken_by_the_end_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = slow_import(tmp_path, monkeypatch)

    async def overtake() -> None:
        importing = await begun(nursery)
        starting = asyncio.ensure_future(nursery.children.start(nursery.spec("worker:0", nursery.script(""))))
        await asyncio.sleep(0)
        await nursery.children.close()
        await importing
        with pytest.raises(CoveyError, match="worker:0 is not started: the agent is shutting down"):
            await starting

    nursery.do(overtake())
    nursery.close()
    assert nursery.exits == {}


def test_uvloop_hears_of_deaths_too(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path, fork=True, preload=[], loop=uvloop.new_event_loop)
    nursery.start_all(*(nursery.spec(f"worker:{n}", nursery.script(f"raise SystemExit({n})", f"{n}.py")) for n in range(8)))
    assert [nursery.result(f"worker:{n}").exit.code for n in range(8)] == list(range(8))
    nursery.close()


# -- with torch ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("torch"), fork=True, preload=TORCH)
    yield nursery
    nursery.close()


def test_child_with_an_optimizer_prints_what_python_prints(torch_nursery: Nursery) -> None:
    """torch's first optimizer imports triton in a CUDA build, and triton checks for leaks at the interpreter's end.

    The report is not printed; what C code writes to its stream `stderr`, such as the message of a crash, is.
    """
    script = torch_nursery.script(
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
    result = torch_nursery.run("optimizer", script)
    assert (result.exit.code, result.said) == (0, "stepped\ndestroyed\n")


def test_eight_torch_children_at_once(torch_nursery: Nursery) -> None:
    """Each with random numbers of its own and the threads it would have had alone, in a template that never computed."""
    script = torch_nursery.script(
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
    torch_nursery.start_all(
        *(torch_nursery.spec(f"worker:{n}", script, env=env) for n in range(7)),
        torch_nursery.spec("worker:7", script, env={**env, "OMP_NUM_THREADS": "1"}),
    )
    seen = [json.loads(torch_nursery.result(f"worker:{n}").said) for n in range(8)]
    alone = json.loads(python(torch_nursery.folder, script, env=env)[1])
    assert all(child["already"] == ["torch", "torch._dynamo", "numpy"] for child in seen)
    assert len({seed for child in seen for seed in child["seeds"]}) == 8 * 4
    assert [child["threads"] for child in seen] == [alone["threads"]] * 7 + [1]
    assert [child["env"] for child in seen] == [{}] * 7 + [{"OMP_NUM_THREADS": "1"}]


def test_torch_works_in_a_forked_child(torch_nursery: Nursery) -> None:
    """What hangs or fails when the template has computed, or when the main module is not the child's own."""
    matmul = torch_nursery.script(
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
    loaders = torch_nursery.script(
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
    torch_nursery.start_all(
        torch_nursery.spec("matmul", matmul),
        torch_nursery.spec("script", loaders),
        torch_nursery.spec("module", "loaders", module=True),
    )
    expected = "fork [[0, 1, 4, 9], [16, 25, 36, 49]]\nspawn [[0, 1, 4, 9], [16, 25, 36, 49]]\n[2, 3]\n"
    for name, said in (("matmul", "computed\n"), ("script", expected), ("module", expected)):
        result = torch_nursery.result(name)
        assert (result.exit.reason, result.said) == ("exit code 0", said)
