"""Broken data files: each is refused in one line, or read."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.corruptions import corruptions
from tests.soak.commands import Ended, called
from tests.soak.models import Small, smalls, write
from tests.soak.outcome import Outcome

NUM_FILES = 200
SAME, REFUSED, EITHER = "same", "refused", "either"
_BOM = b"\xef\xbb\xbf"


def files(folder: Path, share: float, seed: int) -> Outcome:
    """Train on, evaluate and predict from broken files of all formats."""
    outcome = Outcome()
    folder = folder / "files"
    folder.mkdir()
    made = smalls(folder)
    models: dict[str, tuple[Path, Ended]] = {}
    cases = _cases(made, seed)
    random.Random(seed).shuffle(cases)
    for name, what, data, expected in cases[: round(NUM_FILES * share)]:
        small = made[name]
        if name not in models:
            model = small.train(folder / name)
            models[name] = model, called("evaluate", model, folder / name / small.file, *small.flags)
        _one(outcome, f"{name}, {what}", small, folder / name, data, expected, models[name])
    return outcome


def _one(
    outcome: Outcome, case: str, small: Small, folder: Path, data: bytes, expected: str, trained: tuple[Path, Ended]
) -> None:
    model, intact = trained
    broken = folder / "broken"
    broken.mkdir()
    path = write(broken / small.file, data)
    out = broken / "model"
    fit = called(*small.fit(path, out))
    evaluated = called("evaluate", model, path, *small.flags)
    predicted = called("predict", model, path, *small.flags)
    faults = [f"{name}: {done.fault()}" for name, done in _named(fit, evaluated, predicted) if done.fault()]
    if expected == SAME and (evaluated.out != intact.out or fit.code):
        faults.append(f"not read as the file that it equals: {fit.err or evaluated.err or evaluated.out}")
    if expected == REFUSED:
        faults += [f"{name}: not refused" for name, done in _named(fit, evaluated) if done.code == 0]
    if fit.code == 2:
        outcome.saw("refused")
        # The same command succeeds once the file is repaired.
        write(path, small.data)
        again = called(*small.fit(path, out))
        faults += [f"the folder cannot be used again: {again.err}"] if again.code else []
    else:
        outcome.saw("read")
    outcome.add(case, faults)
    shutil.rmtree(broken)


def _named(*ended: Ended) -> list[tuple[str, Ended]]:
    return list(zip(("fit", "evaluate", "predict"), ended, strict=False))


def _cases(made: dict[str, Small], seed: int) -> list[tuple[str, str, bytes, str]]:
    """Return data set, damage, bytes and expected result of each case: first common faults, then random damage."""
    found = [
        (name, what, make(small.data), expected)
        for name, small in made.items()
        for what, make, expected in _known(name, small)
    ]
    each = -(-(NUM_FILES - len(found)) // len(made))
    chance = [
        (name, f"corruption {i} of seed {seed}", data, EITHER)
        for name, small in made.items()
        for i, data in enumerate(corruptions(small.data, each, seed))
    ]
    return found + chance[: NUM_FILES - len(found)]


def _known(name: str, small: Small) -> list[tuple[str, Callable[[bytes], bytes], str]]:
    found: list[tuple[str, Callable[[bytes], bytes], str]] = [("empty", lambda data: b"", REFUSED)]
    if small.text:
        found += [
            ("a byte order mark", lambda data: _BOM + data, SAME),
            ("lines of Windows", lambda data: data.replace(b"\n", b"\r\n"), SAME),
            ("mixed line ends", _mixed, SAME),
            ("no last line end", lambda data: data.removesuffix(b"\n"), SAME),
            ("invalid UTF-8", lambda data: _within(data, b"\xff\xfe"), REFUSED),
            ("half a character", lambda data: _within(data, "é".encode()[:1]), REFUSED),
            ("a NUL", lambda data: _within(data, b"\0"), REFUSED),
        ]
    else:
        found += [
            ("cut", lambda data: data[:-20], REFUSED),
            ("text", lambda data: b"no such file\n", REFUSED),
            ("a pickle", lambda data: b"\x80\x04N.", REFUSED),
        ]
    if "svm" in name and small.text:
        found += [
            ("a value that is not finite", lambda data: data + b"1 1:nan\n", REFUSED),
            ("a value beyond 32 bits", lambda data: data + b"1 1:1e39\n", REFUSED),
            ("a word for a number", lambda data: data + b"1 1:many\n", REFUSED),
            ("a label beyond 64 bits", lambda data: data + b"99999999999999999999 1:1\n", EITHER),
            ("a label of two thousand letters", lambda data: data + b"A" * 2000 + b" 1:1\n", REFUSED),
            ("a feature beyond 64 bits", lambda data: data + b"1 99999999999999999999:1\n", REFUSED),
            ("a feature that no memory holds", lambda data: data + b"1 2147483000:1\n", REFUSED),
        ]
    if name.endswith((".csv", ".tsv")):
        found += [
            ("a cell too many", lambda data: data.replace(b"\n", b",\t1\n", 3), REFUSED),
            ("a quote that is never closed", lambda data: _within(data, b'\n"'), EITHER),
            ("words for numbers", lambda data: data.replace(b"0.", b"nought"), EITHER),
            ("an infinite number", lambda data: data.replace(b"\n0.", b"\ninf"), EITHER),
        ]
    return found


def _within(data: bytes, strange: bytes) -> bytes:
    return data[: len(data) // 2] + strange + data[len(data) // 2 :]


def _mixed(data: bytes) -> bytes:
    ends = (b"\n", b"\r\n", b"\r")
    return b"".join(line + ends[i % 3] for i, line in enumerate(data.split(b"\n")[:-1]))
