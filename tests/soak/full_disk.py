"""A disk that is full while a training saves, for a while or until it ends."""

import contextlib
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.soak.commands import called, ended, run, started
from tests.soak.outcome import Outcome
from tests.soak.trainings import Reference, fit_command, left, reference
from tests.storage.trees import difference

_DISK_BYTES = 16 << 20  # the report of each training takes 5 MB
_NO_LIMIT = (-1, -1)


def full_disk(folder: Path, share: float, seed: int) -> Outcome:
    """Fill the disk after a checkpoint, by a limit on file size and, with permission to mount, by filling a disk."""
    outcome = Outcome()
    kinds = ("text", "features") if share >= 1 else ("text",)
    for kind in kinds:
        whole = reference(kind, folder, share >= 1)
        _until_the_end(outcome, kind, whole, folder / f"{kind}-limited", _limit)
        if share >= 1:
            _for_a_while(outcome, kind, whole, folder / f"{kind}-relieved")
    if share < 1:
        return outcome
    with _small_disk(folder / "disk") as disk:
        if disk is None:
            outcome.saw("no small disk, without permission to mount")
        else:
            for kind in kinds:
                _until_the_end(outcome, kind, reference(kind, folder, True), disk / kind, _fill)
    return outcome


def _until_the_end(
    outcome: Outcome, kind: str, whole: Reference, out: Path, fill: Callable[[Path, int], Callable[[], None]]
) -> None:
    process = started(*fit_command(kind, whole.data, out, report=whole.report))
    _wait_for(out / "previous.safetensors", process)
    free = fill(out, process.pid)
    done = ended(process)
    last = done.err.strip().splitlines()[-1]
    outcome.saw("full to the end")
    outcome.add(
        f"{kind}, full to the end",
        [
            f"exit code {done.code}" if done.code != 2 else "",
            f"it ends otherwise: {last}"
            if not last.startswith("manyclass: disk full") or "--resume" not in last
            else "",
            "a traceback" if "Traceback" in done.err else "",
            "" if "goes on" in done.err else f"nothing is said while it trains: {done.err[-500:]!r}",
        ],
    )
    free()
    # The earlier checkpoint is there, and can be used for predictions.
    for arguments in (("info", out), ("predict", out, whole.data, "--top", 1, "--checkpoint", "newest")):
        again = called(*arguments)
        outcome.add(f"{kind}, {arguments[0]} after a full disk", [again.fault(), again.err if again.code else ""])
    again = run(*whole.resume(out))
    same = difference(left(out), whole.left) if again.code == 0 else "its end"
    outcome.add(f"{kind}, resumed after a full disk", [again.fault(), f"another outcome, at {same}" if same else ""])


def _for_a_while(outcome: Outcome, kind: str, whole: Reference, out: Path) -> None:
    process = started(*fit_command(kind, whole.data, out, report=whole.report))
    _wait_for(out / "previous.safetensors", process)
    free = _limit(out, process.pid)
    time.sleep(0.3)
    free()
    done = ended(process)
    same = difference(left(out), whole.left) if done.code == 0 else "its end"
    outcome.saw("full for a while")
    outcome.add(
        f"{kind}, full for a while",
        [
            f"exit code {done.code}: {done.err[-500:]!r}" if done.code else "",
            "a traceback" if "Traceback" in done.err else "",
            f"another outcome, at {same}" if same else "",
        ],
    )


def _wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.001)


def _limit(out: Path, process: int) -> Callable[[], None]:
    """Limit the file size of a process to a few bytes; return a function that lifts the limit."""
    resource.prlimit(process, resource.RLIMIT_FSIZE, (100, -1))

    def free() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_FSIZE, _NO_LIMIT)

    return free


def _fill(out: Path, process: int) -> Callable[[], None]:
    """Fill the disk of a folder to the last byte; return a function that frees it."""
    ballast = out.parent / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 14)):
            pass
    return ballast.unlink


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[Path | None]:
    """Mount a disk of a few megabytes; yield None without permission to."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(place)]
    try:
        made = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        made = False
    try:
        yield place if made else None
    finally:
        if made:
            subprocess.run(["umount", str(place)], check=True)
