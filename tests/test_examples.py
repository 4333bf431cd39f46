"""Examples and benchmarks run, in small."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_the_demo():
    output = run("examples/next_token.py", "--files", 60, "--seconds", 3)
    losses = [
        float(line.split()[3]) for line in output.splitlines() if line[:8].strip().isdigit() and len(line.split()) == 5
    ]
    unigram = next(float(line.split()[2]) for line in output.splitlines() if "frequencies alone" in line)
    assert losses[-1] < unigram
    assert "error of log Z̃" in output
    assert "for i in range" in output


def test_the_lines_of_python_in_the_readme():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    assert names["head"].weight.grad is not None


@pytest.mark.parametrize("name", ["importance", "bernoulli", "systematic", "minibatch explicit, systematic"])
def test_a_row_of_the_draws_benchmark(name):
    row = json.loads(run("benchmarks/draws.py", "--row", name, "--sizes", "3e3", "--repeats", 3).splitlines()[-1])
    assert row["num_classes"] == 3000
    assert row["draw_us"] > 0
    assert row["slots"] >= 1000


def test_the_draws_results_are_whole():
    with (ROOT / "benchmarks" / "results" / "draws.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {int(row["num_classes"]) for row in rows} == {10**n for n in range(4, 9)}
    assert {row["huge_pages"] for row in rows} == {"0", "1"}
