"""Build of the C++ in this folder with the local compiler, once; the library is kept in the user's cache.

ctypes on purpose: the package stays pure Python, installs without a compiler, depends on no C++ ABI of torch, and the
code is compiled for the processor that runs it.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
# Tried in this order: a compiler without OpenMP, or without -march=native, still gives correct code.
_OPTIONAL_FLAGS: tuple[list[str], ...] = (["-march=native", "-fopenmp"], ["-march=native"], [])
# Setting errno and trapping would prevent vectorisation; infinities and NaN keep their meaning.
_COMMON_FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]

# Endings of the names of C functions that exist in several precisions.
SUFFIXES = {torch.float32: "float32", torch.float64: "float64"}

log = logging.getLogger("manyclass")


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
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("manyclass runs without its compiled CPU kernels, somewhat slower: %s", _reason(error))
        return None


def is_available(*tensors: Tensor) -> bool:
    """Return True if compiled kernels can work on these tensors."""
    return is_plain(*tensors) and library() is not None


def is_plain(*tensors: Tensor) -> bool:
    """Return True if data_ptr() of these gives CPU memory: no torch.compile, no subclasses, no torch.func wrappers."""
    if torch.compiler.is_compiling():
        return False
    return all(
        tensor.is_cpu
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def bind(name: str, *argtypes: type) -> Callable[..., None]:
    """Return a C function of the library that returns nothing."""
    kernels = library()
    assert kernels is not None
    call = kernels[name]
    call.argtypes, call.restype = argtypes, None
    return call


def _build(compiler: str) -> Path:
    """Return the path of the shared library, from the cache or built now."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    # The key holds the processor: -march=native compiles for it, and home folders are shared between machines.
    key = hashlib.sha256(version + _processor().encode() + repr((_COMMON_FLAGS, _OPTIONAL_FLAGS)).encode())
    for source in _SOURCES:
        key.update(source.read_bytes())
    name = f"native-{key.hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manyclass"
    if (cache / name).exists():
        return cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=cache))
    except OSError:
        # Without a writable cache, this process builds for itself.
        cache = folder = Path(tempfile.mkdtemp())
    made = folder / "made.so"
    try:
        _compile(compiler, made)
        # The rename is atomic: processes that build at the same time never load a partial file.
        return made.rename(cache / name)
    finally:
        if folder != cache:
            shutil.rmtree(folder, ignore_errors=True)


def _compile(compiler: str, made: Path) -> None:
    for flags in _OPTIONAL_FLAGS:
        command = [compiler, *_COMMON_FLAGS, *flags, *map(str, _SOURCES), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return "".join(sorted({line for line in file if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor() + platform.machine()


def _reason(error: Exception) -> str:
    return error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
