"""Two processes of torchrun train a model that was given to `apply`, through Trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STEPS = 4
ROOT = Path(__file__).parents[2]


def train(out, design):
    """Train on the examples of this process, and write the weights and the state of the sampler."""
    from manyclass.integrations.transformers import SamplerCheckpoint, apply
    from manyclass.optim import for_model
    from manyclass.parallel import prepare
    from manyclass.samplers import Exhaustive
    from tests.integrations.test_transformers import CLASSES, COUNTS, gpt2
    from tests.integrations.test_transformers_trainer import trainer_of

    torch.manual_seed(0)
    model = gpt2()
    if design == "exact":
        apply(model, sampler=Exhaustive(CLASSES))
    elif design != "plain":
        head = apply(model, counts=COUNTS, k=16, sparse=design == "sparse")
    ids = torch.randint(CLASSES, (32, 8), generator=torch.Generator().manual_seed(0))
    trainer = trainer_of(
        model,
        out,
        [{"input_ids": row, "labels": row} for row in ids],
        callbacks=[] if design == "plain" else [SamplerCheckpoint()],
        optimizer=for_model(model) if design == "sparse" else None,
        max_steps=STEPS,
        optim="sgd",
        per_device_train_batch_size=int(os.environ["EXAMPLES"]),
        save_strategy="steps",
        save_steps=2,
        # Torch warns that it is not needed.
        ddp_find_unused_parameters=False,
    )
    if design == "sparse":
        prepare(model)
    trainer.train()
    sums = [float(value.double().square().sum()) for value in model.state_dict().values()]
    steps = int(head.sampler.progress[0]) if design in ("learned", "sparse") else None
    rank = os.environ.get("RANK", "0")
    content = {"sums": sums, "steps": steps, "random": torch.rand(()).item()}
    (Path(out) / f"rank-{rank}.json").write_text(json.dumps(content))


def results(out, design, ranks):
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, __file__, out, design]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "EXAMPLES": str(4 // ranks)}
    subprocess.run(list(map(str, command)), env=environment, check=True, capture_output=True, timeout=300)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("design", ["learned", "sparse"])
def test_processes_learn_the_same(design, tmp_path):
    first, second = results(tmp_path / "out", design, 2)
    assert first["sums"] == second["sums"]
    assert first["steps"] == second["steps"] == STEPS
    # From draws of other classes.
    assert first["random"] != second["random"]


def test_two_processes_make_the_steps_of_a_plain_training(tmp_path):
    found, expected = (results(tmp_path / design, design, 2)[0]["sums"] for design in ("exact", "plain"))
    assert found == pytest.approx(expected, rel=1e-5)


if __name__ == "__main__":
    train(*sys.argv[1:])
