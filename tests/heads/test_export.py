"""torch.export of exact results keeps the batch size free."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from manyclass import ClassHead, HierarchicalHead, ScorerHead
from manyclass.heads import exact
from manyclass.samplers import Importance

# torch's compiler imports deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

C, D = 40, 4


class Dot(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(C, D)

    def forward(self, hidden, ids):
        return hidden @ self.table(ids).transpose(1, 2)


HEADS = {
    "class vectors": lambda: ClassHead(D, C, counts=torch.arange(1, C + 1), k=20),
    "scorer": lambda: ScorerHead(Dot(), Importance(torch.ones(C), 10)),
    "hierarchical": lambda: HierarchicalHead(D, C),
}


class Exported(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, ids):
        head = self.head
        results = (*head.topk(hidden, 5), head.log_prob(hidden, ids))
        if isinstance(head, HierarchicalHead):
            return results
        return (*results, head.scores(hidden, ids), *head.topk(hidden, 5, exclude=ids))


def batch(size):
    return torch.randn(size, D), torch.randint(0, C, (size, 3))


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in HEADS), ("class vectors", True)])
def test_an_exported_head_gives_equal_results_for_other_batch_sizes(name, strict, monkeypatch):
    # Several chunks of examples, and of classes.
    monkeypatch.setattr(exact, "MAX_EXAMPLES", 16)
    monkeypatch.setattr(exact, "MAX_SCORES", 16 * 25)
    monkeypatch.setattr(exact, "MIN_EXAMPLES", 4)
    torch.manual_seed(0)
    module = Exported(HEADS[name]())
    free = {0: Dim("batch")}
    program = export(module, batch(4), dynamic_shapes={"hidden": free, "ids": free}, strict=strict).module()
    for size in (1, 7, 40):
        inputs = batch(size)
        torch.testing.assert_close(program(*inputs), module(*inputs))
