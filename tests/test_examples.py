"""The examples run at a small scale."""

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


def test_the_example_learns_more_than_frequencies():
    output = run("examples/next_token.py", "--files", 60, "--steps", 100)
    losses = [float(loss) for loss in re.findall(r"^step .*  held-out loss (\S+)", output, re.MULTILINE)]
    unigram = float(re.search(r"frequencies alone (\S+),", output)[1])
    assert min(losses) < unigram
    assert "error of log Z̃" in output
    assert "for i in range" in output


def test_sentence_embeddings_find_the_module_of_a_docstring():
    output = run("examples/sentence_pairs.py", "--files", 120, "--steps", 60)
    before, after = map(float, re.search(r"docstrings (\S+) before training, (\S+) after", output).groups())
    assert after > 4 * before
    assert "parse a date" in output


def test_the_example_under_lightning_learns_more_than_frequencies():
    output = run("examples/lightning_module.py", "--files", 60, "--steps", 20, "--epochs", 1, "--accelerator", "cpu")
    unigram = float(re.search(r"^held-out loss of frequencies alone: (\S+)$", output, re.MULTILINE)[1])
    loss = float(re.search(r"^held-out loss: (\S+)$", output, re.MULTILINE)[1])
    assert loss < unigram
    assert "error of log Z̃" in output


def test_the_example_of_transformers_learns_more_than_frequencies():
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    output = run("examples/transformers_trainer.py", "--files", 30, "--steps", 40, "--vocabulary", 4000)
    unigram = float(re.search(r"frequencies alone (\S+)", output)[1])
    assert float(re.search(r"^held-out loss (\d\S+)", output, re.MULTILINE)[1]) < unigram
    assert "'import os" in output
