"""Builds the C++ of this folder with the machine's own compiler, once, and keeps it in the user's cache."""

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
# A compiler that knows no OpenMP, or no name for its own processor, still gives correct code.
_FLAGS: tuple[list[str], ...] = (["-march=native", "-fopenmp"], ["-march=native"], [])
# Errno and traps would keep loops from being vectorised; infinities and NaN keep their meaning.
_COMMON = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]

# What the names of functions that come in several precisions end in.
SUFFIXES = {torch.float32: "float32", torch.float64: "float64"}

log = logging.getLogger("manyclass")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no compiler, or MANYCLASS_NATIVE=0 in the environment says so."""
    if os.environ.get("MANYCLASS_NATIVE") == "0":
        return None
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None or platform.system() == "Windows":
        log.info("no C++ compiler found: manyclass runs without its compiled CPU kernels, somewhat slower")
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("manyclass runs without its compiled CPU kernels, somewhat slower: %s", _reason(error))
        return None


def is_available(*tensors: Tensor) -> bool:
    """Whether compiled kernels can work on these tensors."""
    return is_plain(*tensors) and library() is not None


def is_plain(*tensors: Tensor) -> bool:
    """Whether these are their memory, on the CPU: not a graph being compiled, no subclass, none of torch.func's."""
    if torch.compiler.is_compiling():
        return False
    return all(
        tensor.is_cpu
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def bind(name: str, *argtypes: type) -> Callable[..., None]:
    """A C function of the library that returns nothing."""
    kernels = library()
    assert kernels is not None
    call = kernels[name]
    call.argtypes, call.restype = argtypes, None
    return call


def _built(compiler: str) -> Path:
    """The shared library, from the cache or made now."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    # -march=native makes code for one processor, and home folders are shared between machines.
    key = hashlib.sha256(version + _processor().encode() + repr((_COMMON, _FLAGS)).encode())
    for source in _SOURCES:
        key.update(source.read_bytes())
    name = f"native-{key.hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manyclass"
    if (cache / name).exists():
        return cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        beside = tempfile.mkdtemp(dir=cache)
    except OSError:
        # No cache to write to: this process builds for itself.
        cache = Path(tempfile.mkdtemp())
        beside = str(cache)
    made = Path(beside) / "made.so"
    try:
        _compile(compiler, made)
        # Renaming is atomic: processes that build at the same time do not see each other's halves.
        return made.rename(cache / name)
    finally:
        if Path(beside) != cache:
            shutil.rmtree(beside, ignore_errors=True)


def _compile(compiler: str, made: Path) -> None:
    for flags in _FLAGS:
        command = [compiler, *_COMMON, *flags, *map(str, _SOURCES), "-o", str(made)]
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
