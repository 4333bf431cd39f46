"""Work that is done once: a cell's result lies in a file, and is used again while nothing it came from has changed."""

import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from manyclass.storage import atomic_write

_PATIENCE = 10.0

Settings = Mapping[str, Any]
Compute = Callable[..., dict[str, Any]]


class Cells:
    """Computes functions of settings in processes of their own, and keeps what they return.

    A cell is a function of a module, called with settings that JSON can hold, that returns a dict that JSON can hold.
    Its file is written by the process that computed it, in one piece: a run that is killed loses what was under way.

    Args:
        folder: where the files lie.
        jobs: how many processes.
        threads: of each of them.
    """

    def __init__(self, folder: Path, *, jobs: int, threads: int = 1) -> None:
        self._folder, self._jobs, self._threads = folder, jobs, threads
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Cells":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:
            # Cells under way are waited for, a few seconds: their files are then there for the next run.
            until = time.monotonic() + _PATIENCE
            for process in multiprocessing.active_children():
                process.join(max(0.0, until - time.monotonic()))
                process.terminate()

    def map(
        self,
        compute: Compute,
        settings: Sequence[Settings],
        *,
        given: Settings | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> list[dict[str, Any]]:
        """The results in the order of the settings.

        Args:
            compute: the function.
            settings: of each call.
            given: what each call is also given and does not depend on, such as where files lie.
            on_done: is told how many are done.
        """
        paths = [self._path(compute, each) for each in settings]
        # Settings that are the same are one cell.
        missing = {path: each for path, each in zip(paths, settings, strict=True) if _read(path) is None}
        done = len(settings) - len(missing)
        if on_done is not None:
            on_done(done)
        for finished in self._submitted(compute, missing, given or {}):
            finished.result()
            done += 1
            if on_done is not None:
                on_done(done)
        results = [_read(path) for path in paths]
        assert all(result is not None for result in results)
        return [result for result in results if result is not None]

    def _submitted(self, compute: Compute, missing: Mapping[Path, Settings], given: Settings) -> Iterator[Future[None]]:
        if not missing:
            return
        if self._pool is None:
            # Spawned: a fork would copy torch's threads in whatever state they are.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._jobs, mp_context=context, initializer=_prepare, initargs=(self._threads,)
            )
        pending = {self._pool.submit(_fill, path, compute, dict(each), dict(given)) for path, each in missing.items()}
        while pending:
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from finished

    def _path(self, compute: Compute, settings: Settings) -> Path:
        module = inspect.getmodule(compute)
        assert module is not None
        name = f"{module.__name__}.{compute.__name__}"
        made_of = {
            "function": name,
            "settings": dict(settings),
            "code": _code(module.__name__),
            "torch": torch.__version__,
        }
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:24]
        return self._folder / name.removeprefix("manyclass.lab.") / f"{key}.json"


def _prepare(threads: int) -> None:
    # Ctrl-C is the parent's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _fill(path: Path, compute: Compute, settings: dict[str, Any], given: dict[str, Any]) -> None:
    start = time.perf_counter()
    result = compute(**settings, **given)
    cell = {"settings": settings, "seconds": time.perf_counter() - start, "result": result}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(cell))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        cell = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    result: dict[str, Any] = cell["result"]
    return {**result, "seconds": cell["seconds"]}


@functools.cache
def _code(module: str) -> str:
    """A digest of all that a module is made of."""
    digest = hashlib.sha256()
    for name, source in sorted(_sources(module).items()):
        digest.update(name.encode() + source)
    return digest.hexdigest()


def _sources(module: str) -> dict[str, bytes]:
    """The source of a module and of all of this package that it imports, but for what only draws."""
    found: dict[str, bytes] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        spec = None if name in found or name.startswith("manyclass.report") else importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found[name] = Path(spec.origin).read_bytes()
            todo.extend(_imported(found[name]))
    return found


def _imported(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("manyclass"):
            # A name may be a module of its own, and its room is imported in any case.
            yield node.module
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if importlib.util.find_spec(node.module) and _is_module(inner):
                    yield inner


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
