"""Build of the C++ in this folder with the local compiler, once; the library is kept in the user's cache.

ctypes on purpose: the package stays pure Python, installs without a compiler, depends on no C++ ABI of torch, and the
code is compiled for the processor that runs it.

A library that is loaded runs with all rights of the user, and one that was cut off ends the process. So a file of the
cache is loaded only if this user alone can have written it, and if its content has the digest in its name.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
# Tried in this order: a compiler without OpenMP, or without -march=native, still gives correct code.
_OPTIONAL_FLAGS: tuple[list[str], ...] = (["-march=native", "-fopenmp"], ["-march=native"], [])
# Setting errno and trapping would prevent vectorisation; infinities and NaN keep their meaning.
_COMMON_FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]

# A build takes about 3 seconds; a compiler that hangs must not hang the program.
COMPILER_SECONDS = 120.0
_MAX_REASON_CHARACTERS = 300

# Endings of the names of C functions that exist in several precisions.
SUFFIXES = {torch.float32: "float32", torch.float64: "float64"}
_KERNELS = ("log_sum_exp", "pair_sum", "pull_back", "exponentials", "adagrad", "adam")
SYMBOLS = frozenset(
    {
        "manyclass_locate",
        "manyclass_comb",
        "manyclass_put_in_front",
        "manyclass_likely_float32",
        "manyclass_likely_bfloat16",
        "manyclass_probe",
        *(f"manyclass_{kernel}_{suffix}" for kernel in _KERNELS for suffix in SUFFIXES.values()),
    }
)

_PLAIN = (Tensor, torch.nn.Parameter)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

log = logging.getLogger("manyclass")


class _BuildError(Exception):
    """A reason to run without compiled kernels."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if there is no compiler or the environment variable MANYCLASS_NATIVE is 0."""
    if os.environ.get("MANYCLASS_NATIVE") == "0":
        return None
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None or platform.system() == "Windows":
        log.info("no C++ compiler found: manyclass runs without its compiled CPU kernels, somewhat slower")
        return None
    try:
        return _load_or_build(compiler)
    except (OSError, _BuildError) as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARACTERS]
        log.warning("manyclass runs without its compiled CPU kernels, somewhat slower: %s", reason)
        return None


def is_available(*tensors: Tensor) -> bool:
    """Return True if compiled kernels can work on these tensors."""
    return is_plain(*tensors) and library() is not None


def is_plain(*tensors: Tensor) -> bool:
    """Return True if data_ptr() of these gives CPU memory: no torch.compile, no subclasses, no torch.func wrappers."""
    if torch.compiler.is_compiling():
        return False
    # A loop: this is called several times a step, and a generator takes longer than the checks.
    for tensor in tensors:  # noqa: SIM110
        if not tensor.is_cpu or type(tensor) not in _PLAIN or _is_wrapped(tensor):
            return False
    return True


def bind(name: str, *argtypes: type, restype: type | None = None) -> Callable[..., Any]:
    """Return a C function of the library, one of `SYMBOLS`."""
    kernels = library()
    assert kernels is not None
    # Only these are looked up when the library is loaded; another one may be missing.
    assert name in SYMBOLS
    call = kernels[name]
    call.argtypes, call.restype = argtypes, restype
    return call


def _load_or_build(compiler: str) -> ctypes.CDLL:
    """Return the kernels from the cache, or build them now.

    Raises:
        OSError: the compiler cannot be started, or the library cannot be synced or loaded.
        _BuildError: the compiler fails or takes too long, or the library lacks a function.
    """
    deadline = time.monotonic() + COMPILER_SECONDS
    code, version = _run([compiler, "--version"], deadline)
    if code != 0:
        raise _BuildError(f"{compiler} --version failed: {version.decode(errors='replace')}")
    # The key holds the processor: -march=native compiles for it, and home folders are shared between machines.
    key = hashlib.sha256(version + _processor() + repr((_COMMON_FLAGS, _OPTIONAL_FLAGS)).encode())
    for source in (*_SOURCES, *_HEADERS):
        key.update(source.read_bytes())
    name = f"native-{key.hexdigest()[:16]}"
    cache = _cache()
    found = None if cache is None else next(filter(_is_whole, sorted(cache.glob(f"{name}-*.so"))), None)
    return _build(compiler, cache, name, deadline) if found is None else _loaded(found)


def _cache() -> Path | None:
    """Return the folder of the cache, made if needed; None if there is none that can be trusted."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "manyclass"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_trusted(folder.stat()):
            return folder
        _log_uncached(f"others can write to the cache {folder}: remove it, or make it yours with mode 700")
    except (OSError, RuntimeError) as error:
        # Path.home() raises RuntimeError if the user has no home folder.
        _log_uncached(error)
    return None


def _log_uncached(reason: object) -> None:
    log.warning("manyclass builds its CPU kernels at every start, which takes some seconds: %s", reason)


def _is_trusted(found: os.stat_result) -> bool:
    """Return True if only this user, or root, can write to a file or folder."""
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _build(compiler: str, cache: Path | None, name: str, deadline: float) -> ctypes.CDLL:
    """Build the library and load it; in the cache its file has this name and the digest of its content."""
    try:
        work = tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True)
    except OSError as error:
        if cache is None:
            raise
        _log_uncached(error)
        cache, work = None, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with work as folder:
        made = Path(folder) / "made.so"
        _compile(compiler, made, deadline)
        if cache is not None:
            made.chmod(0o700)
            with made.open("rb") as file:
                path = cache / f"{name}-{hashlib.sha256(file.read()).hexdigest()}.so"
                # After a power failure a file that was not synced may be cut off.
                os.fsync(file.fileno())
            # The rename is atomic: processes that build at the same time never load a partial file.
            made = made.rename(path)
        # A library that is loaded needs the name of its file no longer.
        return _loaded(made)


def _is_whole(path: Path) -> bool:
    """Return True if only this user can have written the file, and its content has the digest in its name."""
    try:
        # A link may lead to a file that others can write; opening a pipe would wait.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or not _is_trusted(found):
                return False
            return path.stem.rpartition("-")[2] == hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return False


def _loaded(path: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(path))
    for name in sorted(SYMBOLS):
        if not hasattr(kernels, name):
            raise _BuildError(f"{path} has no function {name}")
    return kernels


def _compile(compiler: str, made: Path, deadline: float) -> None:
    output = b""
    for flags in _OPTIONAL_FLAGS:
        code, output = _run([compiler, *_COMMON_FLAGS, *flags, *map(str, _SOURCES), "-o", str(made)], deadline)
        if code == 0 and made.is_file():
            return
    raise _BuildError(output.decode(errors="replace").strip() or f"{compiler} made no library")


def _run(command: list[str], deadline: float) -> tuple[int, bytes]:
    """Run a command; return its exit code and its output, of which the end is dropped if it is long.

    Raises:
        OSError: the command cannot be started.
        _BuildError: it has not ended by the deadline. It and all that it started are killed.
    """
    # A file, since a process that the compiler leaves behind could keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise _BuildError(f"{command[0]} did not end within {COMPILER_SECONDS:.0f} seconds") from None
            raise
        output.seek(0)
        return code, output.read(1 << 16)


def _processor() -> bytes:
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return b"".join(sorted({line for line in file if line.startswith((b"model name", b"flags", b"Features"))}))
    except OSError:
        return (platform.processor() + platform.machine()).encode()
