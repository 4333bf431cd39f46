"""A small learnable problem: the class is a noisy function of the inputs."""

import torch
from torch import nn

from manyclass import ClassHead
from manyclass.samplers import Importance
from manyclass.training import Callback, Training

C, D, B = 60, 6, 16


def batches(n=8, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(C, D, generator=torch.Generator().manual_seed(99))
    inputs = torch.randn(n, B, D, generator=generator)
    noise = torch.rand(n, B, C, generator=generator).log().neg().log().neg()
    return list(zip(inputs, (3 * inputs @ directions.T + noise).argmax(-1), strict=True))


def model(*, dropout=0.0, sampler=None, **options):
    torch.manual_seed(7)
    encoder = nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, D))
    sampler = Importance(torch.ones(C), 20) if sampler is None else sampler
    return encoder, ClassHead(D, C, sampler=sampler, **options)


def parameters(*modules):
    return [parameter for module in modules for parameter in module.parameters()]


def trained(source=None, *, lr=0.05, **options):
    """Train from fixed initial parameters; return encoder, head and history."""
    encoder, head = model()
    optimizer = torch.optim.Adagrad(parameters(encoder, head), lr=lr)
    training = Training(head, batches() if source is None else source, optimizer, encoder=encoder, **options)
    return encoder, head, training.run()


def assert_same(modules, others):
    for one, other in zip(parameters(*modules), parameters(*others), strict=True):
        assert torch.equal(one, other)


class Recorder(Callback):
    """A callback that logs its calls, and interrupts after a step if wanted."""

    def __init__(self, *, interrupt_after=None, log=None, name=""):
        self.log = [] if log is None else log
        self.interrupt_after = interrupt_after
        self.name = name
        self.history = None

    def on_step(self, training):
        self.log.append(f"{self.name}step {training.progress.step}")
        if training.progress.step == self.interrupt_after:
            raise KeyboardInterrupt

    def on_record(self, training, record):
        self.log.append(f"{self.name}record {record.step}")

    def on_end(self, training, history):
        self.log.append(f"{self.name}end")
        self.history = history
