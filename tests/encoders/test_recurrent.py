"""A sequence gives the same vectors whole, at its last position, and after a context."""

import pytest
import torch
from torch import nn

from manyclass.encoders import Recurrent


def encoder(*, layers=1, dropout=0.0):
    torch.manual_seed(0)
    return Recurrent(nn.Embedding(50, 8), layers=layers, dropout=dropout).double()


def sequences():
    return torch.randint(50, (6, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_last_position_and_those_after_a_context_equal_those_of_the_whole(layers):
    model, ids = encoder(layers=layers), sequences()
    whole = model(ids)
    assert whole.shape == (6, 12, 8)
    last = torch.tensor([11, 0, 3, 7, 7, 1])
    torch.testing.assert_close(model({"ids": ids, "last": last}), whole[torch.arange(6), last])
    torch.testing.assert_close(model({"ids": ids, "skip": 5}), whole[:, 5:])
    # Position 3 of the first sequence, the last of the second, the first of the fourth.
    places = torch.tensor([3, 23, 36])
    torch.testing.assert_close(model({"ids": ids, "places": places}), whole[[0, 1, 3], [3, 11, 0]])


def test_what_comes_after_the_last_position_does_not_matter():
    model, ids = encoder(), sequences()
    last = torch.tensor([5, 0, 3, 7, 7, 1])
    other = torch.where(torch.arange(12) > last.unsqueeze(1), (ids + 1) % 50, ids)
    found = [model({"ids": each, "last": last}) for each in (ids, other)]
    assert torch.equal(*found)


def test_a_position_depends_only_on_earlier_ones():
    model, ids = encoder(), sequences()
    changed = ids.clone()
    changed[:, 6] = (ids[:, 6] + 1) % 50
    difference = (model(ids) - model(changed)).abs().amax((0, 2))
    assert (difference[:6] == 0).all()
    assert (difference[6:] > 0).all()


def test_a_step_at_a_time_gives_the_same():
    model, ids = encoder(layers=2), sequences()
    state, steps = None, []
    for place in range(12):
        out, state = model.lstm(model.embedding(ids[:, place : place + 1]), state)
        steps.append(out)
    torch.testing.assert_close(model(ids), torch.cat(steps, 1))


def test_dropout_is_for_training_alone():
    model, ids = encoder(layers=2, dropout=0.5), sequences()
    assert not torch.equal(model(ids), model(ids))
    # Dropout zeroes half of the output.
    assert 0.3 < (model(ids) == 0).double().mean() < 0.7
    model.eval()
    assert torch.equal(model(ids), model(ids))
    torch.testing.assert_close(model(ids), encoder(layers=2)(ids))


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`layers` must be at least 1, got 0"):
        Recurrent(nn.Embedding(5, 2), layers=0)
    with pytest.raises(ValueError, match=r"`dropout` must lie in \[0, 1\), got 1"):
        Recurrent(nn.Embedding(5, 2), dropout=1.0)
