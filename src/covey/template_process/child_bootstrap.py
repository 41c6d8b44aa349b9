"""Set-up of a forked child before the script's first line, so that the script runs as in a fresh interpreter.

State of the template, such as thread counts, random states and the main module, is replaced. Effects of imports stay, including
exit and signal handlers, because an import in the child would have the same effects. Variables that Python reads only at its
start, such as PYTHONHASHSEED, have no effect in the child. The child ends as an interpreter does (threads joined, exit handlers
run, files flushed), except that the teardown of the template's modules is skipped.
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
from covey.runtime.full_disk_output import install_log_streams
from covey.template_process import script_loader
from covey.template_process.import_recorder import RECORD_IMPORTS_VARIABLE, ImportRecorder
from covey.template_process.protocol import ChildSpec
from covey.template_process.thread_counts import restore_threads

GLOO_THREAD_END_S = 0.1  # pause in which a gloo thread can finish
# Key of nanobind's internal data in the interpreter, with its version.
NANOBIND_KEY_PREFIX = "__nb_internals_v17_system_libstdcpp_"
LEAK_WARNINGS_OFFSET = 0x1F8  # offset of the flag print_leak_warnings in nb_internals of that version
_template_modules: list[str] = []  # imported before the fork, without the standard library; empty in the template itself


def run(spec: ChildSpec) -> None:
    """Set up the process as the spec says and run its code. Raises the exception that ends it, `SystemExit` included.

    If `spec.error_folder` is set, the description of an error is written there first.
    """
    pid = os.getpid()
    excluded = {*sys.stdlib_module_names, "__main__", "__mp_main__"}
    _template_modules[:] = [name for name in sys.modules if name.partition(".")[0] not in excluded]
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
        if process_exit := sys.modules.get("covey.worker.process_exit"):
            process_exit.note_exit(end.code)
        raise
    except BaseException as error:
        first_frame = trim_traceback(error)
        describe = (sys.modules.get("covey.worker.process_exit") or exception_record).describe
        described = describe(error, first_frame) if spec.error_folder and os.getpid() == pid else None
        if described is not None:
            exception_record.write_error(spec.error_folder, described)
        raise


def restore_process(spec: ChildSpec) -> None:
    """Set SIGINT's handler, environment, CPU binding and directory. Exit with `BAD_SETTING` if the binding or the directory
    fails."""
    # An agent that a shell started in the background ignores SIGINT, and the template inherits that. A child must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(spec.env)
    time.tzset()
    if message := lifeline.bind_to_cores(spec.cores):
        script_loader.exit_with_message(message, ExitCode.BAD_SETTING)
    try:
        os.chdir(spec.cwd)
    except OSError as error:
        script_loader.exit_with_message(
            f"covey: cannot change to the directory {spec.cwd!r}: {error.strerror}", ExitCode.BAD_SETTING
        )


def restore_libraries() -> None:
    """Reset state that loaded libraries have from the template: random generators, temporary directory, multiprocessing's
    directory and key, thread counts."""
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
    """Set output streams, arguments, process title and `sys.path`, and record imports if the environment requests it."""
    install_log_streams()  # line-buffered
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
    """Keep the end of the interpreter from freeing the template's modules. Must be the last exit handler.

    Freeing torch takes 0.2 s of CPU time and copies memory that was shared until then. The interpreter begins its end by
    setting modules to None. This function does so for the template's modules, with an additional reference that keeps their
    contents alive.
    """
    if "torch.distributed" in sys.modules:
        # Freeing a group joins gloo's thread while the interpreter lock is held. A thread that has just finished its last work
        # may still need that lock, which would be a deadlock. Let it finish first.
        time.sleep(GLOO_THREAD_END_S)
    modules = [sys.modules.get(name) for name in _template_modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    sys.modules.update(dict.fromkeys(_template_modules))  # type: ignore[arg-type]
    silence_leak_checks()


def silence_leak_checks() -> None:
    """Keep nanobind from reporting the objects kept alive as leaks (27 lines for triton, which torch's CUDA build imports).

    Freeing them would take 1.1 s of CPU time per worker. nanobind checks after the interpreter's end unless a flag in its
    internal data is false. Only a C++ function can set it, so the flag is changed in memory here. Internal data of another
    version is not changed; the report is then printed.
    """
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.restype = ctypes.py_object
    extensions = api.PyInterpreterState_GetDict(ctypes.c_void_p(api.PyInterpreterState_Get()))
    for capsule in [value for name, value in extensions.items() if str(name).startswith(NANOBIND_KEY_PREFIX)]:
        internals = api.PyCapsule_GetPointer(ctypes.py_object(capsule), b"nb_internals")
        flags = (ctypes.c_uint8 * 2).from_address(internals + LEAK_WARNINGS_OFFSET)
        if bytes(flags) == b"\1\1":  # print_leak_warnings and the next flag, which is also true by default
            flags[0] = 0


def trim_traceback(error: BaseException) -> TracebackType | None:
    """Let `sys.excepthook` print the traceback without covey's frames before the script's code. Return the remaining
    traceback; None if it is empty."""
    first_frame = error.__traceback__
    while first_frame is not None and _is_covey_frame(first_frame):
        first_frame = first_frame.tb_next
    print_exception = sys.excepthook
    sys.excepthook = lambda kind, value, _: print_exception(kind, value.with_traceback(first_frame), first_frame)
    return first_frame


def _is_covey_frame(step: TracebackType) -> bool:
    name = step.tb_frame.f_code.co_filename
    return name in (__file__, script_loader.__file__, importlib.util.__file__) or name.startswith("<frozen importlib")
