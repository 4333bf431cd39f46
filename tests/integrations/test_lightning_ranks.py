"""Lightning trains a head on two processes as on one."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.integrations.lightning_model import assert_same
from tests.integrations.lightning_ranks import RANKS, joint

ROOT = Path(__file__).parents[2]
SECONDS = 120  # the most that all trainings on two processes may take

pytestmark = [
    # Lightning's own: it calls a class that torch 2.13 deprecates,
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # and advises more processes that load data, which these few examples do not need.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function from the name of a training to its results on both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.integrations.lightning_ranks", folder]
    # In a process apart, which pytest's threads cannot disturb; the ranks end with it.
    threads = {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    results = [torch.load(folder / f"results-{rank}", weights_only=True) for rank in range(RANKS)]
    return lambda name: [result[name] for result in results]


@pytest.mark.parametrize("name", ["sparse", "dense"])
def test_two_ranks_train_as_one_process_with_the_joint_batch(ranks, name):
    first, second = ranks(name)
    assert_same(first, second)
    rows = {} if name == "sparse" else {"sparse": False, "rows": partial(torch.optim.Adagrad, lr=0.3)}
    for key, value in joint(1, **rows).items():
        torch.testing.assert_close(first[key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["whole", "bf16-mixed", "bf16-true"])
def test_ranks_keep_equal_weights_samplers_and_optimisers_and_draw_apart(ranks, name):
    (first, loss, drawn), (second, other_loss, other_drawn) = ranks(name)
    assert_same(first, second)
    assert loss == other_loss
    assert not torch.equal(drawn, other_drawn)


def test_a_training_that_crashed_on_two_ranks_goes_on_bit_for_bit(ranks):
    for whole, resumed in zip(ranks("whole"), ranks("resumed"), strict=True):
        assert_same(whole, resumed)


def test_a_sparse_head_without_the_callback_is_refused_in_one_sentence(ranks):
    for error in ranks("unprepared"):
        assert "must be given to DistributedDataParallel as DistributedDataParallel(manyclass.parallel.prepare" in error
