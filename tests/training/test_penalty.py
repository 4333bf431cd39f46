"""A penalty is added to the loss of a batch."""

import torch

from manyclass.training import Training
from tests.training.problems import assert_same, batches, model, parameters


def run(*, penalty=None, lr=0.05, **options):
    encoder, head = model()
    optimizer = torch.optim.SGD(parameters(encoder, head), lr=lr)
    added = None if penalty is None else lambda batch: penalty(encoder, head, batch)
    training = Training(head, batches(), optimizer, encoder=encoder, epochs=2, report_every=1, penalty=added, **options)
    return encoder, head, training.run()


def test_a_penalty_is_added_to_the_loss():
    encoder, head = model()
    optimizer = torch.optim.SGD(parameters(encoder, head), lr=0.05)
    draws = torch.Generator().manual_seed(0)
    for inputs, target in batches() * 2:
        optimizer.zero_grad()
        loss = head(encoder(inputs), target, generator=draws)
        (loss + 0.1 * head.weight.square().sum() + 0.01 * inputs.abs().mean() * encoder[0].weight.sum()).backward()
        optimizer.step()

    def penalty(encoder, head, batch):
        return 0.1 * head.weight.square().sum() + 0.01 * batch.inputs.abs().mean() * encoder[0].weight.sum()

    assert_same((encoder, head), run(penalty=penalty)[:2])


def test_records_hold_the_loss_without_the_penalty():
    plain, heavy = (run(penalty=penalty)[2] for penalty in (None, lambda encoder, head, batch: torch.tensor(1e6)))
    assert [record.loss for record in plain.records] == [record.loss for record in heavy.records]


def test_a_zero_penalty_changes_nothing():
    assert_same(run()[:2], run(penalty=lambda encoder, head, batch: 0 * head.weight.sum())[:2])
