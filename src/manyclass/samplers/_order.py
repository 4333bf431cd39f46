"""In which order classes lie on a sampler's line."""

import math

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._derived import follow_loaded_state
from manyclass.samplers._clusters import learn_centroids, nearest
from manyclass.samplers._sampler import check_vectors

ORDERS = ("frequency", "random", "cluster")
_CLUSTERS = 256  # a comb of a thousand teeth takes several classes from each: more would change nothing
_AT_ONCE = 64


class ClassOrder(nn.Module):
    """An order of C classes: as given, heaviest first, at random, or such that neighbours have like class vectors.

    Class vectors are clustered when they are first looked at. Then every draw for training finds the clusters of the
    next 64 classes anew, so that no step does much more than others; when all have been looked at, the order follows.

    Args:
        how: "given", "frequency", "random" or "cluster".
    """

    _label: Tensor
    _centroid_bits: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self._vectors: tuple[Tensor, ...] = ()
        # Of random orders, or of draws since vectors were first looked at.
        self._count = 0
        self.register_buffer("_label", torch.empty(0, dtype=torch.int16))
        # As integers the bits of floats are safe from `.half()` and `.to(dtype)`, which convert every floating buffer.
        self.register_buffer("_centroid_bits", torch.empty(0, 0, dtype=torch.int32))
        follow_loaded_state(self)

    def derive(self) -> None:
        """Nothing follows from what was loaded but what was loaded."""

    def check_size(self, num_classes: int) -> None:
        """Raise where it is of other classes.

        Raises:
            ValueError: it is.
        """
        if self._label.shape not in ((0,), (num_classes,)) or self._centroid_bits.dim() != 2:
            raise ValueError(f"the clusters of a sampler must be of {num_classes} classes, got others")

    def arrange(self, weight: Tensor, present: Tensor) -> Tensor:
        """The ids in order, for weights [C] as they are now; `present` is the order before, of all ids there were."""
        if self.how == "frequency":
            return weight.argsort(descending=True, stable=True)
        if self.how == "random":
            self._count += 1
            generator = torch.Generator().manual_seed(self._count)
            return torch.randperm(len(weight), generator=generator).to(weight.device)
        if len(self._label) == len(weight):
            return self.by_cluster()
        kept = present[present < len(weight)]
        return torch.cat([kept, torch.arange(len(kept), len(weight), device=kept.device)])

    def by_cluster(self) -> Tensor:
        """The ids cluster by cluster; neighbouring clusters are alike."""
        return self._label.argsort(stable=True)

    def follow(self, vectors: Tensor, num_classes: int) -> None:
        """Look at these class vectors, where the order asks for them."""
        if self.how != "cluster":
            return
        check_vectors(vectors, num_classes)
        # In a tuple, lest the head's parameter become the sampler's too.
        self._vectors = (vectors,)
        self._count = 0

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """What is followed, if anything is."""
        return self._vectors

    @torch.no_grad()
    def look(self) -> bool:
        """Look at some class vectors, and say whether the order is another one now; one call for each draw."""
        # What changes tables has no place in a compiled graph, which holds them as they are.
        if not self._vectors or torch.compiler.is_compiling() or not (self.training or self._count == 0):
            return False
        vectors = self._vectors[0].detach()
        turn = self._count % self.turns
        if turn == 0:
            self.learn()
        centroids = self._centroid_bits.view(torch.float32)
        if self._count == 0:
            self._label = nearest(vectors, centroids).short()
        else:
            rows = slice(turn * _AT_ONCE, (turn + 1) * _AT_ONCE)
            self._label[rows] = nearest(vectors[rows], centroids).short()
        self._count += 1
        return self._count == 1 or turn == self.turns - 1

    @property
    def turns(self) -> int:
        """Draws in which all classes are looked at."""
        return -(-len(self._vectors[0]) // _AT_ONCE)

    def learn(self) -> None:
        """Learn where clusters are, from where they were."""
        vectors = self._vectors[0].detach()
        number = min(_CLUSTERS, math.isqrt(len(vectors)))
        known = self._centroid_bits.view(torch.float32)
        start = known if known.shape == (number, vectors.shape[1]) and self._count else None
        self._centroid_bits = learn_centroids(vectors, number, start).view(torch.int32)

    def get_extra_state(self) -> Tensor:
        """The next random order, or which class vectors are looked at next, follows from it."""
        return torch.tensor(self._count)

    def set_extra_state(self, state: Tensor) -> None:
        count = int(state)
        if not 0 <= count < 1 << 53:
            raise ValueError(f"the order of a sampler must tell how often it looked, got {count}")
        self._count = count

    def extra_repr(self) -> str:
        return self.how


def first_order(order: str | Tensor, num_classes: int) -> Tensor:
    """int64 [C]: a permutation of the ids as it was given, or by id until there is more to know."""
    if isinstance(order, str):
        _check.choice("order", order, ORDERS)
        return torch.arange(num_classes)
    ids = _check.ids("order", order, num_classes)
    _check.shape("order", ids, (num_classes,))
    in_order, position = ids.sort(stable=True)
    repeated = in_order[1:] == in_order[:-1]
    if repeated.any():
        first = int(repeated.nonzero()[0])
        raise ValueError(
            f"`order` must not repeat a class, got {in_order[first]} at position {position[first + 1]} again"
        )
    return ids
