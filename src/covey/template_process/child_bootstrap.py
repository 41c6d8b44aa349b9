"""What happens in a forked child until the user's first line, so that the user's code wakes up in a fresh interpreter.

The template has imported much and decided a little: thread counts, random states, the main module. Each of these is made here
what it would be, had `python script.py` been typed. What libraries did while they were imported stays, their exit handlers
and signal handlers included: their import in the child would have done the same, and the template has none of its own. The
end, too, is the interpreter's own (threads joined, exit handlers run, files flushed, SystemExit read), since nothing of
the template is left on the stack that could go on.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from types import TracebackType

from covey.errors import ExitCode
from covey.runtime import exception_record, lifeline, linux
from covey.runtime.log_stream import install_log_streams
from covey.template_process import script_loader
from covey.template_process.import_recorder import RECORD_IMPORTS_VARIABLE, ImportRecorder
from covey.template_process.protocol import ChildSpec
from covey.template_process.thread_counts import restore_threads

GLOO_THREAD_END_S = 0.1
NANOBIND_KEY_PREFIX = (
    "__nb_internals_v17_system_libstdcpp_"  # the key of nanobind's internal data in the interpreter, with their version
)
LEAK_WARNINGS_OFFSET = 0x1F8  # where the flag print_leak_warnings is in that version of nanobind's nb_internals
_template_modules: list[str] = []  # by the template, before this child was forked


def run(spec: ChildSpec) -> None:
    """Become the process that the spec describes and run its code; raise what ends it."""
    pid = os.getpid()
    known = {*sys.stdlib_module_names, "__main__", "__mp_main__"}
    _template_modules[:] = [name for name in sys.modules if name.partition(".")[0] not in known]
    restore_process(spec)
    restore_libraries()
    restore_interpreter(spec)
    try:
        main, code = (
            script_loader.load_module(spec.argv[0])
            if spec.module
            else script_loader.load_script(spec.argv[0], spec.script_source)
        )
        exec(code, main.__dict__)
    except SystemExit as end:
        if ending := sys.modules.get("covey.worker.process_exit"):
            ending.note_exit(end.code)
        raise
    except BaseException as error:
        begin = trim_traceback(error)
        describe = (sys.modules.get("covey.worker.process_exit") or exception_record).describe
        described = describe(error, begin) if spec.error_folder and os.getpid() == pid else None
        if described is not None:
            exception_record.write_error(spec.error_folder, described)
        raise


def restore_process(spec: ChildSpec) -> None:
    # An agent in the background has SIGINT ignored by its shell; who sends one to a child means it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(spec.env)
    time.tzset()
    if sentence := lifeline.bind_to_cores(spec.cores):
        script_loader.exit_with_message(sentence, ExitCode.BAD_SETTING)
    try:
        os.chdir(spec.cwd)
    except OSError as error:
        script_loader.exit_with_message(
            f"covey: cannot work in the folder {spec.cwd!r}: {error.strerror}", ExitCode.BAD_SETTING
        )


def restore_libraries() -> None:
    """Only those that are loaded: the rest finds the right environment when it comes."""
    if random := sys.modules.get("random"):
        random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if tempfile := sys.modules.get("tempfile"):
        tempfile.tempdir = None  # type: ignore[attr-defined]
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
        process.current_process().authkey = os.urandom(32)
    restore_threads()


def restore_interpreter(spec: ChildSpec) -> None:
    install_log_streams()  # and line by line, as an unbuffered log would be
    flags = ["-m"] if spec.module else []
    sys.argv = [*(flags or spec.argv[:1]), *spec.argv[1:]]
    sys.orig_argv = [sys.executable, *flags, *spec.argv]
    linux.set_process_title(sys.orig_argv)
    if path := os.environ.pop(RECORD_IMPORTS_VARIABLE, ""):
        sys.meta_path.insert(0, ImportRecorder(path))
    for folder in reversed(spec.env.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and (path := str(Path(folder).absolute())) not in sys.path:
            sys.path.insert(0, path)


def skip_module_teardown() -> None:
    """Spare the interpreter, at its end, the taking apart of what the template had imported.

    It would free every object of every module: for torch 0.2 s of computing, and a private copy of all the memory that was
    shared until then. The interpreter begins its end by setting each module to None. Here it finds that done for these, and
    what they hold has one reference too many to be freed. Must be the last of the exit handlers.
    """
    if "torch.distributed" in sys.modules:
        # Freeing a group joins gloo's thread with the interpreter locked; one that has just finished its last work may
        # still need the interpreter to let go of it, and both would wait for ever. Let it finish first.
        time.sleep(GLOO_THREAD_END_S)
    modules = [sys.modules.get(name) for name in _template_modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    sys.modules.update(dict.fromkeys(_template_modules))  # type: ignore[arg-type]
    silence_leak_checks()


def silence_leak_checks() -> None:
    """Keep nanobind from reporting the objects set aside as leaks (27 lines for triton, which torch's CUDA build imports).

    Freeing them instead costs each worker 1.1 s of computing. nanobind checks after the interpreter's end unless a flag in its
    internal data is false. Only C++ has a function that sets it, so it is set in memory here. Internal data of another version
    are left alone: then the report is printed. All other output to stderr is unchanged.
    """
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.restype = ctypes.py_object
    extensions = api.PyInterpreterState_GetDict(ctypes.c_void_p(api.PyInterpreterState_Get()))
    for capsule in [value for name, value in extensions.items() if str(name).startswith(NANOBIND_KEY_PREFIX)]:
        internals = api.PyCapsule_GetPointer(ctypes.py_object(capsule), b"nb_internals")
        flags = (ctypes.c_uint8 * 2).from_address(internals + LEAK_WARNINGS_OFFSET)
        if bytes(flags) == b"\1\1":  # print_leak_warnings and its neighbour, which is true by default too
            flags[0] = 0


def trim_traceback(error: BaseException) -> TracebackType | None:
    """Let the interpreter print this error without the frames that led to the user's code; return the others."""
    begin = error.__traceback__
    while begin is not None and _is_covey_frame(begin):
        begin = begin.tb_next
    print_it = sys.excepthook
    sys.excepthook = lambda kind, value, _: print_it(kind, value.with_traceback(begin), begin)
    return begin


def _is_covey_frame(step: TracebackType) -> bool:
    name = step.tb_frame.f_code.co_filename
    return name in (__file__, script_loader.__file__, importlib.util.__file__) or name.startswith("<frozen importlib")
