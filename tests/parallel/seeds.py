"""Trainings of 300 steps on two processes, with several seeds."""

from tests.parallel.checks import training

STEPS = 300
SEEDS = range(5)
CHECKS = {
    f"{optimiser} {seed}": training(optimiser, STEPS, seed=seed)
    for optimiser in ("Adam", "RowAdagrad")
    for seed in SEEDS
}
