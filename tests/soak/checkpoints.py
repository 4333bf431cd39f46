"""Broken checkpoints: each is refused in one line, loses nothing and runs no code."""

import hashlib
import io
import os
import pickle
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyclass import storage
from tests.corruptions import corruptions
from tests.soak.commands import Ended, called, run
from tests.soak.models import Small, smalls
from tests.soak.outcome import Outcome
from tests.soak.tampering import resealed, tampered, tampered_json
from tests.soak.trainings import left
from tests.storage.trees import difference

NUM_CHECKPOINTS = 200
KINDS = ("a.svm", "text", "sequences", "triples")
FILES = {
    "best.safetensors": "model",
    "newest.safetensors": "checkpoint",
    "previous.safetensors": "checkpoint",
    "index.safetensors": "index",
    "fit.json": "",
    "log.csv": "",
}


@dataclass(frozen=True)
class Broken:
    """A broken file of a training.

    Args:
        fault: a description.
        file: its name.
        data: its bytes.
        right: True if its digest is right: then a command may accept its content.
    """

    fault: str
    file: str
    data: bytes
    right: bool = False


def checkpoints(folder: Path, share: float, seed: int) -> Outcome:
    """Run all commands on trainings with one broken file."""
    outcome = Outcome()
    folder = folder / "checkpoints"
    folder.mkdir()
    marker = folder / "it ran"
    made = smalls(folder)
    number = round(NUM_CHECKPOINTS * share)
    kinds = KINDS if number >= 50 else KINDS[:2]
    for i, kind in enumerate(kinds):
        trained = _Trained(made[kind], folder / kind)
        draw = random.Random(f"{seed} {kind}")
        for j, broken in zip(range(-(-number // len(kinds))), _broken(trained, marker, draw, seed), strict=False):
            # Some run in a new process, in which no state of this one can hide a fault.
            trained.use(outcome, f"{kind}, {broken.file}, {broken.fault}", broken, apart=i == 0 and j % 40 == 39)
            if marker.exists():
                outcome.add(f"{kind}, {broken.file}, {broken.fault}", ["its code ran"])
                marker.unlink()
    return outcome


class _Trained:
    """A finished training to break copies of, and the output of commands on the intact one."""

    def __init__(self, small: Small, folder: Path) -> None:
        self._small, self._folder = small, folder
        self.model = small.train(folder)
        self._data = folder / small.file
        self._queries = folder / "queries" if small.queries is not None else self._data
        # Make the index now, and a resumed training to compare others with.
        called(*self._commands(self.model)["index"])
        self._expected: dict[str, Ended] = {}
        for name, command in self._commands(self.model).items():
            if name not in ("resume", "resume from previous"):
                self._expected[name] = called(*command)
                assert self._expected[name].code == 0, f"{command}: {self._expected[name].err}"
        shutil.copytree(self.model, folder / "resumed")
        done = called(*self._commands(folder / "resumed")["resume"])
        assert done.code == 0, done.err
        self._resumed = left(folder / "resumed")

    def _commands(self, model: Path) -> dict[str, tuple[object, ...]]:
        flags, goes_on = self._small.flags, ("--epochs", 8, "--no-report")
        return {
            "predict": ("predict", model, self._queries, *flags),
            "evaluate": ("evaluate", model, self._data, *flags),
            "predict newest": ("predict", model, self._queries, *flags, "--checkpoint", "newest"),
            "predict previous": ("predict", model, self._queries, *flags, "--checkpoint", "previous"),
            "index": ("predict", model, self._queries, *flags, "--index"),
            "info": ("info", model),
            "resume": ("fit", "--out", model, "--resume", *goes_on),
            "resume from previous": ("fit", "--out", model, "--resume", "--from-previous", *goes_on),
        }

    def use(self, outcome: Outcome, case: str, broken: Broken, *, apart: bool) -> None:
        """Put a broken file in its place and run all commands."""
        model = self._folder / "broken"
        faults = []
        shutil.copytree(self.model, model)
        (model / broken.file).write_bytes(broken.data)
        refused = False
        for name, command in self._commands(model).items():
            before = _contents(model)
            done = run(*command) if apart else called(*command)
            if fault := done.fault():
                faults.append(f"{name}: {fault}")
            if done.code == 2:
                refused = True
                if (after := _contents(model)) != before:
                    changed = {path for path, _ in before.items() ^ after.items()}
                    faults.append(f"{name}: refused, but it changed {sorted(changed)}")
            elif done.code == 0 and not broken.right:
                faults += self._differences(name, done, model)
            if name.startswith("resume"):
                shutil.rmtree(model)
                shutil.copytree(self.model, model)
                (model / broken.file).write_bytes(broken.data)
        outcome.saw("refused by some command" if refused else "done all the same")
        outcome.add(case, faults)
        shutil.rmtree(model)

    def _differences(self, name: str, done: Ended, model: Path) -> list[str]:
        """Return the differences from the result with the intact file."""
        if name == "resume":
            place = difference(left(model)[:3], self._resumed[:3])
            return [f"another training was resumed: {place}"] if place else []
        # These commands list the files, and report the damaged one.
        if name in ("info", "resume from previous"):
            return []
        return [] if done.out == self._expected[name].out else [f"{name}: it says something else: {done.out[:200]!r}"]


def _broken(trained: _Trained, marker: Path, draw: random.Random, seed: int) -> Iterator[Broken]:
    """Yield broken files: faults of people and attackers, random damage and tampering, in turn."""
    model = trained.model
    chosen = [*_disguised(model, marker), *_swapped(model)]
    draw.shuffle(chosen)
    data = {name: (model / name).read_bytes() for name in FILES}
    chance = {name: corruptions(data[name], 10_000, seed) for name in FILES}
    names = [name for name, times in zip(FILES, (4, 4, 1, 1, 3, 1), strict=True) for _ in range(times)]
    for i in range(10_000):
        yield from chosen[i : i + 1]
        name = draw.choice(names)
        yield Broken(f"corruption {i} of seed {seed}", name, next(chance[name]))
        name = draw.choice(names)
        if name == "fit.json":
            change, text = tampered_json(data[name], draw)
            yield Broken(f"{change}, seed {seed}", name, text, right=True)
        elif FILES[name]:
            change, content = tampered(storage.load(model / name, content_type=FILES[name]), draw)
            yield Broken(f"{change}, seed {seed}", name, _saved(model, content, FILES[name]), right=True)


def _saved(model: Path, content: dict[str, Any], content_type: str) -> bytes:
    path = model.parent / "tampered.safetensors"
    storage.save(path, content, content_type=content_type)
    return path.read_bytes()


class _Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (str(self._marker), os.O_CREAT | os.O_WRONLY)


def _disguised(model: Path, marker: Path) -> Iterator[Broken]:
    pickled = pickle.dumps(_Payload(marker))
    zipped = io.BytesIO()
    torch.save(_Payload(marker), zipped)
    header = b'{"__metadata__":{}}     '
    within = struct.pack("<Q", len(header)) + header + pickled
    for file in ("best.safetensors", "newest.safetensors", "index.safetensors", "fit.json"):
        yield Broken("a pickle", file, pickled)
        yield Broken("a file of torch.save", file, zipped.getvalue())
    yield Broken("a pickle behind a header", "best.safetensors", within)
    content = storage.load(model / "best.safetensors", content_type="model")
    hidden = {**content, "names": torch.frombuffer(bytearray(pickled), dtype=torch.uint8)}
    yield Broken("a pickle for names", "best.safetensors", _saved(model, hidden, "model"), right=True)


def _swapped(model: Path) -> Iterator[Broken]:
    data = {name: (model / name).read_bytes() for name in FILES}
    for one, other in (
        ("best.safetensors", "newest.safetensors"),
        ("newest.safetensors", "best.safetensors"),
        ("best.safetensors", "index.safetensors"),
        ("index.safetensors", "best.safetensors"),
        ("fit.json", "best.safetensors"),
        ("best.safetensors", "fit.json"),
        ("log.csv", "best.safetensors"),
    ):
        yield Broken(f"{other} in its place", one, data[other])
    for name in ("best.safetensors", "newest.safetensors", "index.safetensors"):
        yield Broken("of a newer format", name, _newer(data[name]))
    yield Broken("of a newer format", "fit.json", data["fit.json"].replace(b'"format": 1', b'"format": 2', 1))


def _newer(data: bytes) -> bytes:
    """Return the same file with the number of a later format and the right digest."""
    changed = data.replace(rb"\"format\":2", rb"\"format\":7")
    assert changed != data
    return resealed(changed)


def _contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
