"""Edited states and files of valid form: whatever `storage.load` accepts must not crash, hang or take much memory.

A case is a subject and a seed: python -m tests.soak.states --subject "learned" --seed "0 17" repeats one.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from manyclass import ClassCounts, ClassHead, HierarchicalHead, storage
from manyclass._check import DivergedError
from manyclass.samplers import Importance, Learned, Sampler
from tests.optim.tables import OURS
from tests.samplers.test_compositions import INNER, WRAPPERS
from tests.soak.commands import called
from tests.soak.outcome import Outcome
from tests.soak.tampering import tampered, tampered_file, tampered_json
from tests.tables import SAMPLERS

NUM_CASES = 5000
LIMIT_SECONDS = 60.0  # after which a case counts as hung
LIMIT_BYTES = 1 << 30  # of address space beyond that of an idle worker
C, D, B, K = 90, 6, 16, 24
# A rebuild every 4 or 8 steps is under way after 8.
STEPS = 8
FILES = {"best.safetensors": "model", "newest.safetensors": "checkpoint", "index.safetensors": "index", "fit.json": ""}
PRELOADED = ("torch._dynamo", "manyclass.cli.fit", "manyclass.tasks", "sklearn.feature_extraction", "faiss")
_OUT_OF_MEMORY = ("allocate memory", "more memory than there is", "MemoryError", "bad_alloc")


@dataclass(frozen=True)
class Used:
    """The end of one case.

    Args:
        faults: one line each.
        refused: True if the state or file was refused, False if it was used.
        grown: bytes of memory taken at most.
    """

    faults: list[str]
    refused: bool
    grown: int = 0


@dataclass(frozen=True)
class Training:
    """A training of the command line.

    Args:
        options: options of `fit`.
        lines: lines of its data.
        queries: lines for `predict`; None: the data.
        ending: the ending of the data file.
    """

    options: tuple[object, ...]
    lines: list[str]
    queries: list[str] | None = None
    ending: str = "txt"


def states(folder: Path, share: float, seed: int, *, only: Callable[[str], bool] | None = None) -> Outcome:
    """Run a share of the cases of a seed in worker processes."""
    outcome = Outcome(seen=dict.fromkeys(("crash", "hang", "memory", "refused", "used"), 0))
    largest = 0
    names = [name for name in subjects() if only is None or only(name)]
    worker = Worker(folder / "states")
    for number in range(round(NUM_CASES * share)):
        name = names[number % len(names)]
        what, used = worker.use(name, f"{seed} {number}")
        outcome.saw("refused" if used.refused else "used")
        for fault in used.faults:
            outcome.saw(fault.split(":")[0])
        outcome.add(f"--subject {name!r} --seed '{seed} {number}': {what}", used.faults)
        largest = max(largest, used.grown)
    worker.end()
    outcome.seen["largest memory in MiB"] = largest >> 20
    return outcome


class Worker:
    """A process that uses one state after another, and is started again if one ends it.

    Args:
        folder: for files; the workers' trainings stay there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        # The server imports all modules once, with one thread, so that a new worker takes milliseconds.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *PRELOADED])
        self._process: Any = None
        self._cases = 0
        self._connection: Connection

    def use(self, name: str, seed: str) -> tuple[str, Used]:
        """Run a case; return the change made to the state, and the end."""
        if self._process is None:
            self._connection, other = self._context.Pipe()
            self._process = self._context.Process(target=_work, args=(self._folder, other), daemon=True)
            self._process.start()
            self._cases = 0
            other.close()
        what = "before any change"
        self._cases += 1
        try:
            self._connection.send((name, seed))
            for _ in range(2):
                if not self._connection.poll(LIMIT_SECONDS):
                    self.end()
                    return what, Used([f"hang: no end within {LIMIT_SECONDS:.0f} s"], refused=False)
                answer = self._connection.recv()
                if isinstance(answer, Used):
                    return what, answer
                what = answer
            raise AssertionError("a worker answers with the change and the end")
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            self.end()
            # A write beyond its memory may end the process only later.
            fault = f"crash: the process ended with {code} in its case {self._cases}"
            return what, Used([fault], refused=False)

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def _work(folder: Path, connection: Connection) -> None:
    """Use states until the connection is closed."""
    # A crash must leave no core file, and what C libraries print about it is not for the reader.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            name, seed = connection.recv()
            try:
                used = use(subjects()[name](folder), seed, connection.send)
            except Exception:
                used = Used([f"exception: {traceback.format_exc(limit=-3)!r}"], refused=False)
            connection.send(used)


def use(subject: "Subject", seed: str, tell: Callable[[str], None]) -> Used:
    """Change a state by a seed, tell the change, and use the state within bounds of memory."""
    draw = random.Random(seed)
    state = subject.changed(draw)
    tell(state.what)
    with _bounded() as grown:
        try:
            faults, refused = subject.use(state)
        except Exception:
            faults, refused = [f"exception: {traceback.format_exc(limit=-2)!r}"], False
    return Used(faults, refused, grown())


@contextlib.contextmanager
def _bounded() -> Any:
    """Bound the memory; yield a function that returns the bytes by which it has grown at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    page = resource.getpagesize()
    # Start the peak from here.
    Path("/proc/self/clear_refs").write_text("5")

    def grown() -> int:
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) << 10
        return max(0, peak - resident * page)

    resource.setrlimit(resource.RLIMIT_AS, (pages * page + LIMIT_BYTES, hard))
    try:
        yield grown
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@dataclass(frozen=True)
class Changed:
    """A changed state.

    Args:
        what: the change.
        content: the state, or the bytes of the file.
        optimiser: the name of the optimiser.
        alone: True if all other files are gone.
    """

    what: str
    content: Any
    optimiser: str = ""
    alone: bool = False


class Subject(Protocol):
    """A valid state to change, and all that a user does with it."""

    def changed(self, draw: random.Random) -> Changed:
        """Return the state with a change that follows from `draw`."""
        ...

    def use(self, state: Changed) -> tuple[list[str], bool]:
        """Use a changed state; return the faults, and True if it was refused."""
        ...


class Library:
    """A head and an optimiser in the middle of a training: load, draw, step, save.

    Args:
        make: builds the head, the same each time.
        folder: for a file.
    """

    def __init__(self, make: Callable[[], nn.Module], folder: Path) -> None:
        self._make, self._path = make, folder / "state.safetensors"
        self._states: dict[str, dict[str, Any]] = {}

    def changed(self, draw: random.Random) -> Changed:
        optimiser = draw.choice(list(OURS))
        if optimiser not in self._states:
            head, optimizer = self._built(optimiser)
            _steps(head, optimizer, range(STEPS))
            self._states[optimiser] = {"head": head.state_dict(), "optimizer": optimizer.state_dict()}
        state = self._states[optimiser]
        # The state of a head has more ways to be wrong than that of an optimiser.
        part = draw.choice(("head", "head", "optimizer"))
        what, changed = tampered(state[part], draw)
        return Changed(f"{optimiser}, {part}: {what}", {**state, part: changed}, optimiser)

    def use(self, state: Changed) -> tuple[list[str], bool]:
        try:
            storage.save(self._path, state.content, content_type="state")
            content = storage.load(self._path, content_type="state")
            head, optimizer = self._built(state.optimiser)
            head.load_state_dict(content.get("head"))
            optimizer.load_state_dict(content.get("optimizer"))
        except Exception as error:
            # Torch refuses some states with errors of other types than ours.
            return _memory_faults(f"{type(error).__name__}: {error}"), True
        try:
            _steps(head, optimizer, range(STEPS, 2 * STEPS))
            head.eval()
            head.topk(torch.randn(3, D), 5)
            if isinstance(head, ClassHead):
                head.sampler(torch.arange(B), exclude=torch.arange(B).unsqueeze(1), hidden=torch.randn(B, D))
                head.sampler.refresh()
                # A sampler of weights, not of counts, refuses this.
                with contextlib.suppress(ValueError):
                    head.resize(C + 9, optimizer=optimizer)
            storage.save(self._path, {"head": head.state_dict()}, content_type="state")
        except DivergedError:
            pass
        return [], False

    def _built(self, optimiser: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        head = self._make()
        return head, OURS[optimiser](list(head.parameters()))


def _steps(head: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, target = torch.randn(B, D, generator=generator), torch.randint(C, (B,), generator=generator)
    for step in steps:
        optimizer.zero_grad()
        draws = {"generator": torch.Generator().manual_seed(step)} if isinstance(head, ClassHead) else {}
        head(hidden, target, **draws).backward()
        optimizer.step()
    if callable(catch_up := getattr(optimizer, "catch_up", None)):
        catch_up()


class Commands:
    """A training in a folder, with a rebuild under way: info, evaluate, predict, resume.

    Args:
        training: the training.
        folder: for its files.
        file: the one to change, of `FILES`.
    """

    def __init__(self, training: Training, folder: Path, file: str) -> None:
        self._folder, self._file = folder, file
        self._data = folder / f"data.{training.ending}"
        self._queries = self._data if training.queries is None else folder / "queries.txt"
        if folder.exists():
            return
        folder.mkdir()
        self._data.write_text("".join(f"{line}\n" for line in training.lines))
        if training.queries is not None:
            self._queries.write_text("".join(f"{line}\n" for line in training.queries))
        fit = ("fit", self._data, "--out", folder / "model", *training.options, "--epochs", 10)
        for command in (
            (*fit, "--k", 8, "--no-report", "--probe-every", 0, "--evaluate-every", 250, "--checkpoint-every", 1000),
            ("predict", folder / "model", self._queries, "--index"),
        ):
            done = called(*command)
            assert done.code == 0, done.err
        progress = storage.load(folder / "model" / "newest.safetensors", content_type="checkpoint")["state"]["training"]
        step = progress["progress"]["step"]
        assert 500 <= step <= 512, f"a rebuild of each kind must be under way, got step {step}"

    def changed(self, draw: random.Random) -> Changed:
        path = self._folder / "model" / self._file
        content_type = FILES[self._file]
        if not content_type:
            # Without a checkpoint a training starts again, with whatever settings the manifest has.
            return Changed(*tampered_json(path.read_bytes(), draw), alone=draw.random() < 0.5)
        if draw.random() < 0.25:
            return Changed(*tampered_file(path.read_bytes(), draw))
        what, content = tampered(storage.load(path, content_type=content_type), draw)
        made = self._folder / "changed.safetensors"
        storage.save(made, content, content_type=content_type)
        return Changed(what, made.read_bytes())

    def use(self, state: Changed) -> tuple[list[str], bool]:
        model = self._folder / "copy"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(self._folder / "model", model)
        for path in model.glob("*") if state.alone else ():
            path.unlink()
        (model / self._file).write_bytes(state.content)
        queries = ("predict", model, self._queries, "--top", 3)
        resume = ("fit", "--out", model, "--resume", "--epochs", 1 if state.alone else 13, "--no-report")
        commands: tuple[tuple[object, ...], ...] = {
            "best.safetensors": (("info", model), ("evaluate", model, self._data), queries, resume),
            "newest.safetensors": ((*queries, "--checkpoint", "newest"), ("info", model), resume),
            "index.safetensors": (("info", model), (*queries, "--index")),
            "fit.json": (("info", model), resume),
        }[self._file]
        faults, refused = [], False
        for command in commands:
            done = called(*command)
            refused |= done.code == 2
            # A training says more than one line before it diverges.
            diverged = command[0] == "fit" and "stopped (failed)" in done.err and done.code == 2
            found = "" if diverged else done.fault()
            faults += [f"command line: {command[0]}: {found}"] if found else _memory_faults(done.err)
        return faults, refused


def _memory_faults(message: str) -> list[str]:
    return [f"memory: {message[:300]!r}"] if any(part in message for part in _OUT_OF_MEMORY) else []


@functools.cache
def subjects() -> dict[str, Callable[[Path], Subject]]:
    """Return functions of a folder that make each subject, once."""
    weights = 1 / torch.arange(1, C + 1, dtype=torch.float64)
    heads: dict[str, Callable[[], nn.Module]] = {"hierarchical": lambda: HierarchicalHead(D, C, sparse=True)}
    samplers: dict[str, Callable[[], Sampler]] = {
        "streaming": lambda: Importance(ClassCounts.streaming(C), K),
        **{name: functools.partial(make, weights, K, None) for name, make in SAMPLERS.items()},
    }
    quick: dict[str, Callable[[], Sampler]] = {
        **INNER,
        "learned by id": lambda: Learned(weights, K, every=4),
        "learned by frequency": lambda: Learned(weights, K, every=4, order="frequency"),
    }
    samplers |= {f"{name}, quick": make for name, make in quick.items()}
    for name, wrap in WRAPPERS.items():
        samplers |= {f"{inner}, {name}": functools.partial(_wrapped, wrap, make) for inner, make in quick.items()}
    heads |= {name: functools.partial(_head, make) for name, make in samplers.items()}
    made = trainings()
    library = {name: functools.cache(functools.partial(Library, make)) for name, make in heads.items()}
    commands = {
        f"{kind}, {file}": functools.cache(functools.partial(_commands, kind, file)) for file in FILES for kind in made
    }
    # One after the other in turn, so that a few cases cover both.
    stride = -(-len(library) // len(commands))
    found: dict[str, Callable[[Path], Subject]] = {}
    rest = list(library.items())
    for number, (name, make) in enumerate(commands.items()):
        found |= {name: make, **dict(rest[stride * number : stride * (number + 1)])}
    return found


def _commands(kind: str, file: str, folder: Path) -> Commands:
    return Commands(trainings()[kind], folder / kind, file)


def _wrapped(wrap: Callable[[Sampler], Sampler], make: Callable[[], Sampler]) -> Sampler:
    return wrap(make())


def _head(make: Callable[[], Sampler]) -> ClassHead:
    return ClassHead(D, C, sampler=make(), sparse=True)


@functools.cache
def trainings() -> dict[str, Training]:
    """Return a training for each kind of data; each takes 500 to 512 steps, in the middle of the rebuilds."""
    draw = random.Random(5)

    def rare(number: int) -> int:
        return int(number * draw.random() ** 2)

    rows = [(i if i < 30 else rare(30), draw.random(), draw.random()) for i in range(107)]
    features = [f"c{c} {1 + c % 7}:{x:.2f} {8 + c % 5}:{y:.2f}" for c, x, y in rows]
    table = ["label,number,words", *(f"c{c},{x:.2f},word{c % 9} other{int(9 * y)}" for c, x, y in rows)]
    words = [f"w{i}" for i in range(40)] + [f"w{rare(40)}" for _ in range(1450)]
    text = [" ".join(words[i : i + 7]) for i in range(0, len(words), 7)]
    clicks = [f"u{i % 25} i{i % 30 if i < 60 else rare(30)}" for i in range(425)]
    triples = [f"e{i % 25}\tr{draw.randrange(3)}\te{(7 * i + draw.randrange(5)) % 25}" for i in range(107)]
    small = ("--dim", 4, "--length", 8)
    return {
        "svmlight": Training(("--batch-size", 2, "--sampler", "learned"), features, ending="svm"),
        "csv": Training(
            ("--batch-size", 2, "--rank", 3, "--sampler", "clustered", "--optimizer", "adam"), table, ending="csv"
        ),
        "text": Training(("--text", *small, "--batch-size", 4, "--sampler", "learned"), text),
        "sequences": Training(("--sequences", *small, "--batch-size", 1, "--sampler", "systematic"), clicks),
        "triples": Training(
            ("--triples", "--dim", 4, "--batch-size", 4, "--sampler", "bernoulli", "--optimizer", "sgd"),
            triples,
            [line.rsplit("\t", 1)[0] for line in triples[:20]],
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.states")
    parser.add_argument("--subject", required=True, choices=[*subjects()])
    parser.add_argument("--seed", required=True, help='As printed, such as "0 17"')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="manyclass-states-") as folder:
        print(use(subjects()[options.subject](Path(folder)), options.seed, print))


if __name__ == "__main__":
    main()
