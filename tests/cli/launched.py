"""Commands that torchrun's processes run together: torchrun -m tests.cli.launched FILE, a JSON list of arguments."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from manyclass.cli import main
from tests.soak.commands import ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a command on one rank."""

    code: int
    out: str
    err: str


def torchrun(*arguments, processes=2, options=()):
    """Return the command line that starts `manyclass ARGUMENTS`, or another module, on several processes."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, *options, "-m")
    return [str(part) for part in (*launcher, *arguments)]


def together(folder, *commands, processes=2):
    """Run `manyclass` with each list of arguments on several processes; return the results by command, then rank."""
    (folder / "commands.json").write_text(json.dumps([[str(part) for part in command] for command in commands]))
    command = torchrun("tests.cli.launched", folder, processes=processes)
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    by_rank = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(processes)]
    return [[Result(**result) for result in of_command] for of_command in zip(*by_rank, strict=True)]


def _run(arguments):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["manyclass", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return {"code": code or 0, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    # torchrun's store is for one group, which all commands share.
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    results = [_run(arguments) for arguments in json.loads((folder / "commands.json").read_text())]
    (folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
