"""Training steps that a GPU replays as one CUDA graph."""

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from manyclass import _ranks
from manyclass._recording import Recording
from manyclass.errors import notify
from manyclass.heads.replay import HeadReplay
from manyclass.optim import replay as of_optimizer
from manyclass.training._stepping import Clip, Update

USUAL_STEPS = 2  # with a shape, before one in the form that is recorded
MAX_SHAPES = 256  # that are counted; steps with others run as usual
MAX_GRAPHS = 16
MAX_NUMBERS = 16  # in a batch beside its tensors; more are lengths or the like, which differ in each batch
PATIENCE = 100  # steps without a replay after which that is said
MAX_REASON_CHARACTERS = 300

Tensors = tuple[Tensor, ...]
_PLAIN = {int, float, str, bool, type(None)}


class ReplayedStep:
    """A training step that a GPU replays: forward and backward passes, clipping and updates as one CUDA graph.

    A small step takes most of its time to launch kernels. `step(batch)` computes `loss_fn(batch)` and its gradients and
    steps the optimisers and schedulers, as a loop by hand does. The first steps with a shape run as usual; then one is
    recorded, and later ones are replayed. Learning rates, rebuilt tables of samplers, loaded states, modules that
    change their mode and another number of drawn classes are followed. Probes, decisions and rebuilds run between
    replays, and so may evaluations and checkpoints. Gradients are None after a step.

    Steps run as usual on the CPU, with shapes that are rare, in several processes, with a sampler or an optimiser that
    works in Python, and if they wait for the device; on a GPU a notice gives the reason once.

    Args:
        loss_fn: returns the loss of a batch, or a tuple of the loss and further tensors. It must not read numbers from
            the device; whatever it computes in Python from anything but the batch is computed once.
        optimizers: one, or several of different parameters. Those of torch with an option `capturable` get it; of
            others a changed learning rate is followed by another recording.
        clip: clip the gradient norm at this value; or a function that is called with the parameters.
        schedulers: learning-rate schedulers, stepped once per step.
        scaler: scales the loss, for float16.
        modules: modules whose mode and tensors are followed. None: those that `loss_fn` refers to.

    Raises:
        TypeError: a scheduler needs a metric.
        ValueError: there is no optimiser, two optimisers share a parameter, or `clip` is out of range.

    Example:
        >>> from manyclass import ClassHead
        >>> from manyclass.optim import RowAdagrad
        >>> head = ClassHead(8, 500, sparse=True)
        >>> step = ReplayedStep(lambda batch: head(*batch), RowAdagrad(head.parameters(), 0.1))
        >>> loss = step((torch.randn(16, 8), torch.arange(16)))
        >>> loss.requires_grad, head.weight.grad
        (False, None)
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Any],
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        clip: float | Clip | None = None,
        schedulers: LRScheduler | Sequence[LRScheduler] = (),
        scaler: torch.amp.GradScaler | None = None,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        self._loss_fn, self._scaler = loss_fn, scaler
        self._update = Update(optimizers, schedulers, clip)
        self._optimizers = of_optimizer.parts(self._update.optimizers)
        self._rates = of_optimizer.DeviceRates(self._optimizers)
        found = _modules_of(loss_fn) if modules is None else modules
        self._modules = list(dict.fromkeys(part for module in found for part in module.modules()))
        self._recording = Recording()
        self._shapes: dict[object, _Shape] = {}
        self._graphs = _Graphs()
        self._refusal: str | None = None
        self._unreplayed = 0
        self.replays = 0
        """The number of steps that were replayed."""

    def __call__(self, *batches: Any) -> Any:
        """Make a training step, and return the loss without gradients, or the tuple that `loss_fn` returns.

        Args:
            *batches: nests of tensors, dicts, lists and tuples, on the device. Of several the mean loss is minimised:
                their gradients are accumulated, and the optimisers step once.

        Raises:
            ValueError: there is no batch.
        """
        if not batches:
            raise ValueError("`batches` must hold a batch, got none")
        leaves, tree = pytree.tree_flatten(batches)
        shape = self._shape(leaves, tree)
        if shape is None or not all(head.is_settled() for head in shape.heads):
            found = self._work(batches)
        elif shape.steps < USUAL_STEPS:
            shape.steps += 1
            with self._recording.on(watched=True):
                found = self._work(batches)
            shape.heads = [HeadReplay(replace(each)) for each in self._recording.heads.values() if each.draws]
            self._refuse(self._obstacle(shape))
        else:
            found = self._replayed(shape, leaves, tree)
        self._update.schedule()
        return found[0] if len(found) == 1 else found

    def _shape(self, leaves: list[Any], tree: object) -> "_Shape | None":
        """Return what is known of steps with such batches; None if they run as usual."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._refusal is not None or not self._graphs.are_possible(tensors):
            return None
        if len(leaves) > len(tensors) + MAX_NUMBERS:
            self._refuse("batches hold numbers in Python, such as lengths")
            return None
        if _ranks.are_several():
            self._refuse("there are several processes")
            return None
        key = (tree, *map(_form, leaves), *_context())
        shape = self._shapes.get(key)
        if shape is None and len(self._shapes) < MAX_SHAPES:
            shape = self._shapes[key] = _Shape()
        if shape is None or shape.replay is None:
            self._unreplayed += 1
            if self._unreplayed == PATIENCE:
                notify(f"{PATIENCE} training steps were not replayed: shapes of batches, or options, differ too often")
        return shape

    def _obstacle(self, shape: "_Shape") -> str | None:
        """Return the reason why no step can be replayed, as far as a step has shown; None: there is none."""
        reasons = [of_optimizer.refusal(optimizer) for optimizer in self._optimizers]
        reasons += [head.refusal() for head in shape.heads]
        return next((reason for reason in reasons if reason is not None), None)

    def _refuse(self, reason: str | None) -> None:
        """Run all later steps as usual, if there is a reason."""
        if reason is not None and self._refusal is None:
            self._refusal = reason
            notify(f"training steps run as usual, not replayed by the GPU: {reason}")

    def _work(self, batches: Sequence[Any]) -> Tensors:
        """Make a step without its schedulers, and return what `loss_fn` returns, without gradients."""
        self._update.zero_grad()
        total: list[Tensor] = []
        for batch in batches:
            found = self._loss_fn(batch)
            loss, *more = found if isinstance(found, tuple) else (found,)
            loss = loss if len(batches) == 1 else loss / len(batches)
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            here = [loss.detach(), *(x.detach() / len(batches) for x in more)]
            total = [a + b for a, b in zip(total, here, strict=True)] if total else here
        self._update.apply(self._scaler)
        self._update.zero_grad()
        return tuple(total)

    def _replayed(self, shape: "_Shape", leaves: list[Any], tree: pytree.TreeSpec) -> Tensors:
        for optimizer in self._optimizers:
            of_optimizer.make_capturable(optimizer)
        pinned = [thing for head in shape.heads for thing in head.begin()]
        self._rates.copy()
        baked = self._marks(pinned)
        if baked != shape.baked:
            # The objects are kept, so that no other one gets their identity.
            shape.baked, shape.pinned, shape.replay = baked, pinned, None
            found = self._rehearsed(shape, leaves, tree)
        else:
            shape.load(leaves)
            if shape.replay is None:
                self._record(shape, tree)
            found = shape.replay() if shape.replay is not None else self._recorded(shape, tree)
            self.replays += shape.replay is not None
            self._unreplayed = 0
        for head in shape.heads:
            head.end()
        return found

    def _rehearsed(self, shape: "_Shape", leaves: list[Any], tree: pytree.TreeSpec) -> Tensors:
        """Make a step in the form that is recorded, so that all kernels are compiled and loaded."""
        shape.load(leaves)
        with _watched_syncs(leaves) as syncs:
            found = self._recorded(shape, tree)
        if syncs:
            self._refuse(f"a step waits for the device: {syncs[0]}")
        return found

    def _recorded(self, shape: "_Shape", tree: pytree.TreeSpec) -> Tensors:
        with self._recording.on(watched=False), self._rates.in_groups():
            return self._work(pytree.tree_unflatten(shape.inputs, tree))

    def _record(self, shape: "_Shape", tree: pytree.TreeSpec) -> None:
        generators = list(self._recording.generators.values())
        try:
            shape.replay = self._graphs.record(lambda: self._recorded(shape, tree), generators)
        except Exception as error:
            self._graphs.abandon(generators)
            first = error.__context__ or error
            self._refuse(f"{type(first).__name__}: {' '.join(str(first).split())[:MAX_REASON_CHARACTERS]}")

    def _marks(self, pinned: list[object]) -> list[object]:
        """Return marks of everything that a recorded step holds as constants."""
        things = [*pinned, *self._rates.baked()]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                things += group["params"]
            for state in optimizer.state.values():
                things += state.values()
        for module in self._modules:
            things.append(module.training)
            things += module._parameters.values()
            things += module._buffers.values()
        return [_mark(thing) for thing in things]


class _Shape:
    """The steps with batches of one shape.

    Attributes:
        steps: the steps so far that ran as usual and were watched.
        heads: the heads whose losses these computed.
        inputs: the batches that a recorded step reads: tensors that are written before each replay.
        baked, pinned: marks of what the recorded step holds, and the objects that samplers pinned.
        replay: replays the recorded step, and returns what it computes; None: it is not recorded.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.heads: list[HeadReplay] = []
        self.inputs: list[Any] = []
        self.baked: list[object] = []
        self.pinned: list[object] = []
        self.replay: Callable[[], Tensors] | None = None

    def load(self, leaves: list[Any]) -> None:
        """Copy batches into the inputs."""
        if not self.inputs:
            self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return
        pairs = [(own, leaf) for own, leaf in zip(self.inputs, leaves, strict=True) if isinstance(own, Tensor)]
        own, given = zip(*pairs, strict=True)
        torch._foreach_copy_(list(own), list(given))


class _Graphs:
    """The CUDA graphs of a step, with memory that they share."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._number = 0

    def are_possible(self, tensors: list[Tensor]) -> bool:
        """Return True if steps with these inputs can be recorded."""
        if not tensors or self._number >= MAX_GRAPHS:
            return False
        device = tensors[0].device
        return device.type == "cuda" and all(x.device == device and not x.requires_grad for x in tensors)

    def record(self, work: Callable[[], Tensors], generators: list[torch.Generator]) -> Callable[[], Tensors]:
        """Record what `work` does on the device, without doing it, and return a function that does it."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            if generator is not torch.cuda.default_generators[generator.device.index or 0]:
                graph.register_generator_state(generator)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # A recording that fails leaves its own stream as the current one, until the outer block restores it. Other
        # threads may build tables meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = work()
        self._number += 1

        def replay() -> Tensors:
            graph.replay()
            # The next replay overwrites them.
            return tuple(output.clone() for output in outputs)

        return replay

    def abandon(self, generators: list[torch.Generator]) -> None:
        """End what torch leaves open after a recording that failed: its memory pool and the state of the generators."""
        pool, self._pool = self._pool, None
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        # A generator leaves the state of a recording at the end of the next one, which needs another pool.
        with contextlib.suppress(Exception):
            self.record(lambda: (torch.zeros((), device="cuda"),), generators)


@contextlib.contextmanager
def _watched_syncs(leaves: list[Any]) -> Iterator[list[str]]:
    """Yield a list of the places at which this thread has waited for the GPU."""
    found: list[str] = []
    if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
        yield found
        return
    thread, before = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch calls its own mode a prototype.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        shown = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if "synchronizing CUDA operation" not in str(message):
                shown(message, category, filename, lineno, file, line)
            elif threading.get_ident() == thread:
                found.append(f"{filename}:{lineno}")

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _form(leaf: Any) -> object:
    """Return what must be the same of two leaves, so that one recorded step serves both."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if type(leaf) in _PLAIN else id(leaf)


def _context() -> tuple[object, ...]:
    """Return the settings of torch that a recorded step holds as constants."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return autocast, torch.get_float32_matmul_precision(), torch.is_grad_enabled()


def _mark(thing: object) -> object:
    """Return a number or a text that differs if a thing is another one: a tensor by its address."""
    if isinstance(thing, Tensor):
        return thing.data_ptr() if thing.layout == torch.strided else id(thing)
    return thing if type(thing) in _PLAIN else id(thing)


def _modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that a function refers to: by its closure, the globals it names, its object, its arguments."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        given = [*function.args, *function.keywords.values()]
        return [*_modules_of(function.func), *(thing for thing in given if isinstance(thing, nn.Module))]
    owner = getattr(function, "__self__", None)
    own = [owner] if isinstance(owner, nn.Module) else []
    own += [value for value in getattr(owner, "__dict__", {}).values() if isinstance(value, nn.Module)]
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(plain):
        return own
    names = inspect.getclosurevars(plain)
    return own + [x for x in {**names.globals, **names.nonlocals}.values() if isinstance(x, nn.Module)]
