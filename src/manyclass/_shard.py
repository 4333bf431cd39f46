"""The classes that one process holds, and the exchange with the processes that hold the others.

Every process of the group works on the examples of all of them. A tensor is *shared* if all processes hold the same
values, such as the hidden vectors after `together`, and *partial* if the sum over processes is meant. These operators
lead from one kind to the other, each with the backward pass that belongs to it:

    together  own examples → shared      sums partial gradients, and returns those of the own examples
    own       shared → own examples      collects the gradients of all examples
    total     partial → shared sum       passes the shared gradient on
    stacked   partial → shared [W, …]    passes on the gradient of the own entry
    enter     shared → used by each      sums the partial gradients

Data-parallel training averages gradients over processes. So each process has the loss of its examples, and the rows
of the class table, which no other process holds, get the mean over processes too: `averaged`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class Shard:
    """The classes first … first + size of C, as DTensor's `Shard(0)` divides them: ceil(C / ranks) for each process.

    Args:
        num_classes: C.
        rank: the place of this process in the group.
        ranks: the number of processes in the group.
        mesh: the DeviceMesh of one dimension whose processes these are.
        group: the process group of the exchange in a step.
        host: a process group for numbers on the CPU.
        background: another one, for rebuilds on a background thread.
        sent: the bytes that this process has handed to collectives so far, by operation.
    """

    num_classes: int
    rank: int
    ranks: int
    mesh: Any = None
    group: Any = None
    host: Any = None
    background: Any = None
    sent: Counter[str] = field(default_factory=Counter)

    @property
    def first(self) -> int:
        """The first class of this process."""
        return min(self.rank * -(-self.num_classes // self.ranks), self.num_classes)

    @property
    def size(self) -> int:
        """The number of classes of this process, which may be 0."""
        return min(-(-self.num_classes // self.ranks), self.num_classes - self.first)

    @property
    def classes(self) -> slice:
        """The classes of this process among all of them."""
        return slice(self.first, self.first + self.size)

    @property
    def device(self) -> torch.device:
        """The device of the exchange in a step."""
        kind = "cpu" if self.mesh is None else self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def in_background(self) -> "Shard":
        """Return the same classes, with a separate group for a background thread."""
        return replace(self, host=self.background)

    def holds(self, ids: Tensor) -> Tensor:
        """Return bool of the shape of `ids`: True for the classes of this process."""
        return (ids >= self.first) & (ids < self.first + self.size)

    def wrapped(self, rows: Tensor) -> Tensor:
        """Return the rows [size, ...] of this process as a DTensor of all classes [C, ...] that shares their memory."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Placement

        shape = torch.Size([self.num_classes, *rows.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(rows, self.mesh, [Placement(0)], run_check=False, shape=shape, stride=stride)

    def unwrapped(self, rows: Tensor) -> Tensor:
        """Return the rows of this process, of a DTensor or a tensor of all classes [C, ...]."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Placement

        if isinstance(rows, DTensor):
            if rows.placements == (Placement(0),) and rows.device_mesh == self.mesh:
                return rows.to_local()
            rows = rows.full_tensor()
        return rows[self.classes] if rows.dim() and len(rows) == self.num_classes else rows

    def numbers(self, *values: float) -> Tensor:
        """Return numbers of every process, float64 [ranks, n] on the CPU."""
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        return self.vectors(mine)

    def vectors(self, mine: Tensor) -> Tensor:
        """Return the vectors [n] on the CPU of every process, [ranks, n]."""
        if self.ranks == 1:
            return mine.unsqueeze(0)
        received = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(received, mine, group=self.host)
        return torch.stack(received)

    def sum(self, value: float) -> float:
        """Return the sum of a number over processes, the same on all of them."""
        return math.fsum(self.numbers(value)[:, 0].tolist())

    def uniform(self, *shape: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Return uniform numbers, float64, that the first process has drawn.

        The others draw as many, so that the same number of calls leaves every generator at the same place.
        """
        drawn = torch.rand(*shape, dtype=torch.float64, device=device, generator=generator)
        if self.ranks > 1:
            self._count("uniform", drawn)
            dist.broadcast(drawn, group_src=0, group=self.group)
        return drawn

    def together(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows [Σ sizes, ...] of all processes, of which this one gives `mine` [sizes[rank], ...]."""
        return mine if self.ranks == 1 else _Together.apply(mine, self, tuple(sizes))  # type: ignore[no-untyped-call]

    def own(self, shared: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows of this process out of those of all processes [Σ sizes, ...]."""
        return shared if self.ranks == 1 else _Own.apply(shared, self, tuple(sizes))  # type: ignore[no-untyped-call]

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum over processes."""
        return partial if self.ranks == 1 else _Total.apply(partial, self)  # type: ignore[no-untyped-call]

    def stacked(self, partial: Tensor) -> Tensor:
        """Return the tensors of all processes, [ranks, ...]."""
        return partial.unsqueeze(0) if self.ranks == 1 else _Stacked.apply(partial, self)  # type: ignore[no-untyped-call]

    def averaged(self, rows: Tensor) -> Tensor:
        """Return rows of the table, whose gradient becomes the mean over processes."""
        return rows if self.ranks == 1 else _Averaged.apply(rows, self.ranks)  # type: ignore[no-untyped-call]

    def enter(self, shared: Tensor) -> Tensor:
        """Return a shared tensor for what each process computes of its classes."""
        return shared if self.ranks == 1 else _Enter.apply(shared, self)  # type: ignore[no-untyped-call]

    def seed(self) -> int:
        """Return a random number of this process, which follows from the global RNG state of the first one."""
        return int(self.numbers(float(torch.randint(1 << 40, (1,), device="cpu")))[0, 0]) + self.rank

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over processes, without a gradient; half precision is summed in float32."""
        if self.ranks == 1:
            return x
        wide = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).contiguous()
        self._count("reduce", wide)
        return _waited(_collective("all_reduce")(wide, "sum", self.group)).to(x.dtype)

    def gathered(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return what `together` does, without a gradient."""
        if self.ranks == 1:
            return mine
        largest = max(sizes)
        padded = mine.contiguous()
        if len(mine) < largest:
            padded = torch.cat([padded, padded.new_zeros(largest - len(mine), *mine.shape[1:])])
        self._count("gather", padded)
        found = _waited(_collective("all_gather")(padded, 0, self.group))
        if all(size == largest for size in sizes):
            return found
        return torch.cat([part[:size] for part, size in zip(found.split(largest), sizes, strict=True)])

    def scattered(self, partial: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the sums over processes of the rows of this one, out of [Σ sizes, ...]; half precision in float32."""
        wide = partial.float() if partial.dtype in (torch.float16, torch.bfloat16) else partial
        largest = max(sizes)
        if any(size != largest for size in sizes):
            parts = wide.split(list(sizes))
            padded = wide.new_zeros(len(sizes), largest, *wide.shape[1:])
            for row, part in zip(padded, parts, strict=True):
                row[: len(part)] = part
            wide = padded.flatten(0, 1)
        self._count("scatter", wide)
        found = _waited(_collective("reduce_scatter")(wide.contiguous(), "sum", 0, self.group))
        return found[: sizes[self.rank]].to(partial.dtype)

    def mark(self, rows: Tensor) -> None:
        """Tell optimisers that a parameter holds the rows of this process."""
        rows.shard = self  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: object) -> Self:
        # Process groups cannot be copied.
        return self

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "a head whose classes are divided among processes cannot be pickled: use its state_dict, or "
            "manyclass.parallel.save_checkpoint"
        )

    def _count(self, operation: str, x: Tensor) -> None:
        self.sent[operation] += x.numel() * x.element_size()


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, shard: Shard, sizes: tuple[int, ...]) -> Tensor:
        ctx.shard, ctx.sizes = shard, sizes
        return shard.gathered(mine, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shard.scattered(gradient, ctx.sizes), None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, shard: Shard, sizes: tuple[int, ...]) -> Tensor:
        ctx.shard, ctx.sizes = shard, sizes
        own: Tensor = shared.split(list(sizes))[shard.rank]
        return own.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shard.gathered(gradient, ctx.sizes), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, shard: Shard) -> Tensor:
        return shard.summed(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, shard: Shard) -> Tensor:
        ctx.rank = shard.rank
        return shard.gathered(partial.unsqueeze(0), [1] * shard.ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.rank], None


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shared.view_as(shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.summed(gradient), None


def _collective(name: str) -> Any:
    """Return a functional collective, which releases of torch name in several ways."""
    # Imported here: it takes a while, and a single process needs none of it.
    from torch.distributed import _functional_collectives as collectives

    return next(
        found
        for ending in ("", "_single", "_tensor")
        if (found := getattr(collectives, name + ending, None)) is not None
    )


def _waited(x: Tensor) -> Tensor:
    return _collective("wait_tensor")(x)  # type: ignore[no-any-return]
