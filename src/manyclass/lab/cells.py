"""Cells: results computed in worker processes and cached in files, keyed by their settings and their source code."""

import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from manyclass.errors import InaccurateWarning
from manyclass.storage import atomic_write

SHUTDOWN_SECONDS = 10.0  # an interrupted run waits this long for cells still being computed

Settings = Mapping[str, Any]
Compute = Callable[..., dict[str, Any]]


class Cells:
    """Cache of function results, computed in worker processes.

    A cell is one call of a module-level function; its settings and the dict it returns must be JSON-serialisable. The
    worker that computed a cell writes its file atomically, so a killed run loses only the cells still being computed.

    Args:
        folder: the folder of the cached results.
        jobs: the number of worker processes.
        threads: torch threads per worker.
    """

    def __init__(self, folder: Path, *, jobs: int, threads: int = 1) -> None:
        self._folder, self._jobs, self._threads = folder, jobs, threads
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Cells":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=error is None, cancel_futures=True)
        if error is not None:
            # Give running cells a few seconds to finish, so that the next run finds their files.
            deadline = time.monotonic() + SHUTDOWN_SECONDS
            for process in multiprocessing.active_children():
                process.join(max(0.0, deadline - time.monotonic()))
                process.terminate()

    def map(
        self,
        compute: Compute,
        settings: Sequence[Settings],
        *,
        unkeyed: Settings | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the results in the order of the settings, computing those that are not cached.

        Args:
            compute: the function.
            settings: keyword arguments of each call, part of its cache key.
            unkeyed: further keyword arguments of every call that cannot change its result, such as a folder.
            on_done: callback that receives the number of finished cells.
        """
        paths = [self._path(compute, each) for each in settings]
        # Equal settings share one path, so they are computed once.
        missing = {path: each for path, each in zip(paths, settings, strict=True) if _load_result(path) is None}
        done = len(settings) - len(missing)
        if on_done is not None:
            on_done(done)
        for finished in self._completed(compute, missing, unkeyed or {}):
            finished.result()
            done += 1
            if on_done is not None:
                on_done(done)
        results = [_load_result(path) for path in paths]
        assert all(result is not None for result in results)
        return [result for result in results if result is not None]

    def _completed(self, compute: Compute, missing: Mapping[Path, Settings], extra: Settings) -> Iterator[Future[None]]:
        if not missing:
            return
        if self._pool is None:
            # Spawn, because a fork copies torch's thread pool in an undefined state.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._jobs, mp_context=context, initializer=_start_worker, initargs=(self._threads,)
            )
        pending = {
            self._pool.submit(_compute_and_store, path, compute, dict(each), dict(extra))
            for path, each in missing.items()
        }
        while pending:
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from finished

    def _path(self, compute: Compute, settings: Settings) -> Path:
        module = inspect.getmodule(compute)
        assert module is not None
        name = f"{module.__name__}.{compute.__name__}"
        code = _code_digest(module.__name__)
        parts = {"function": name, "settings": dict(settings), "code": code, "torch": torch.__version__}
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
        return self._folder / name.removeprefix("manyclass.lab.") / f"{key}.json"


def _start_worker(threads: int) -> None:
    # The parent process handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    # Experiments train with inaccurate designs on purpose.
    warnings.simplefilter("ignore", InaccurateWarning)


def _compute_and_store(path: Path, compute: Compute, settings: dict[str, Any], unkeyed: dict[str, Any]) -> None:
    start = time.perf_counter()
    result = compute(**settings, **unkeyed)
    cell = {"settings": settings, "seconds": time.perf_counter() - start, "result": result}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(cell))


def _load_result(path: Path) -> dict[str, Any] | None:
    try:
        cell = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    result: dict[str, Any] = cell["result"]
    return {**result, "seconds": cell["seconds"]}


@functools.cache
def _code_digest(module: str) -> str:
    """Return a digest of a module's source and of the package modules it imports."""
    digest = hashlib.sha256()
    for name, source in sorted(_sources(module).items()):
        digest.update(name.encode() + source)
    return digest.hexdigest()


def _sources(module: str) -> dict[str, bytes]:
    """Return the source of a module and of its imports within this package, except the report room."""
    found: dict[str, bytes] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in found and not name.startswith("manyclass.report"):
            found[name], imported = _source(name)
            todo.extend(imported)
    return found


@functools.cache
def _source(module: str) -> tuple[bytes, tuple[str, ...]]:
    """Return the source of a module of this package, and the names of those it imports."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_bytes()
    return source, tuple(_imported_modules(source))


def _imported_modules(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("manyclass"):
            # Python imports the package in any case; the imported name may itself be a module.
            yield node.module
            yield from filter(_is_module, (f"{node.module}.{alias.name}" for alias in node.names))


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
