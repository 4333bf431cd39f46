"""A compiled head trains and learns as an eager one, and predictions can be exported."""

import io

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from manyclass import ClassHead, HierarchicalHead
from manyclass.heads import _learning
from manyclass.samplers import Automatic, Costs, Learned, Tailored
from tests.uses.table import (
    CELLS,
    FEW,
    HIDDEN,
    STEPS,
    TARGET,
    UNSAMPLED,
    WEIGHTS,
    B,
    C,
    D,
    cells,
    differing,
    draws,
    head_of,
    identical,
    parameters_of,
    same_progress,
    state_of,
    train,
)

# torch's compiler imports deprecated parts of torch, and torch warns about every sparse gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Sparse invariant checks:UserWarning",
    "ignore:No complete tensor found in the group:UserWarning",
    "ignore:The given buffer is not writable:UserWarning",
)

ALL_SAMPLERS = [cell for cell in CELLS if cell[0] == "class"]
OTHER_HEADS = [cell for cell in FEW if cell[0] != "class"]


@pytest.fixture(autouse=True)
def _reset_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def seeded(run=None):
    """Return the loss of a step that draws from the global generator: a graph cannot take a generator."""

    def loss(head, hidden, step):
        torch.manual_seed(step)
        return (head if run is None else run)(hidden, TARGET.roll(step))

    return loss


def compare(cell, backend, steps=STEPS):
    head, twin = head_of(cell), head_of(cell)
    before = state_of(head)
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    losses = train(head, range(steps), lr=0.1, loss=seeded(torch.compile(head, backend=counted, fullgraph=True)))
    # A rebuild may change a shape, for example the number of certain classes; then that size becomes a variable.
    assert len(graphs) <= 4
    expected = train(twin, range(steps), lr=0.1, loss=seeded())
    assert all(loss.isfinite().all() for loss in losses)
    # A graph may add in another order than the kernels, so that results differ in their last bits. It takes up a
    # rebuild one step later: its tables are those from before the call.
    changed = differing(before, state_of(twin))
    if not changed:
        for ours, theirs in zip((*losses, *parameters_of(head)), (*expected, *parameters_of(twin)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    if cell[0] not in UNSAMPLED:
        # Entries that eager training changes are changed by compiled training too.
        assert differing(before, state_of(head)) == changed
        for name, tensor in state_of(head).items():
            assert tensor.shape == state_of(twin)[name].shape
            if "progress" in name:
                assert same_progress(tensor, state_of(twin)[name]), (tensor, state_of(twin)[name])
        if not changed:
            assert identical(draws(head), draws(twin))


@cells(ALL_SAMPLERS)
def test_a_head_compiles_into_one_graph_and_learns_with_every_sampler(cell):
    compare(cell, "eager")


@cells(OTHER_HEADS)
def test_every_head_compiles_into_one_graph_and_learns(cell):
    compare(cell, "aot_eager")


@cells([("class", "learned, rebuilt")])
def test_a_head_compiled_to_machine_code_learns(cell):
    with torch._inductor.config.patch(fallback_random=True):
        compare(cell, "inductor")


def test_rebuilds_that_change_the_certain_classes_compile_a_few_graphs_in_all():
    torch.manual_seed(0)
    counts = 1e6 / torch.arange(1, 2001) ** 1.5
    head, graphs, certain = ClassHead(D, 2000, sampler=Learned(counts, 64, every=4, forget=0.2)), [], set()

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    run = torch.compile(head, backend=counted, fullgraph=True)
    for step in range(100):
        torch.manual_seed(step)
        loss = run(torch.randn(B, D), torch.randint(2000, (B,)))
        loss.backward()
        assert loss > 0
        certain.add(len(head.sampler.comb.certain))
    assert len(graphs) <= 4 < len(certain)


def test_other_numbers_of_classes_compile_a_few_graphs_in_all():
    torch.manual_seed(0)
    counts = 1e6 / torch.arange(1, 2001) ** 1.5
    head, graphs = ClassHead(D, 2000, sampler=Tailored(counts, 64, probes=3)), []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    run = torch.compile(head, backend=counted, fullgraph=True)
    for k in range(64, 76):
        head.sampler.set_k(k)
        assert run(torch.randn(B, D), torch.randint(2000, (B,))) > 0
    assert len(graphs) <= 4


def test_a_compiled_head_takes_up_each_design_that_is_decided():
    torch.manual_seed(0)
    sampler = Automatic(WEIGHTS.clone(), 1e3, least=8, costs=Costs(10.0, 1.0, 2.0, 0.01))
    head, drawn = ClassHead(D, C, sampler=sampler), []
    run = torch.compile(head, backend="eager", fullgraph=True)

    def record(probes, candidates):
        drawn.append("exact" if candidates.is_exhaustive else candidates.blocks[0].ids.shape[1])

    show = _learning.probe_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_learning, "probe_step", lambda *step: record(step[1], step[3]) or show(*step))
        for design, k in (("exact", C), ("shared", 16), ("tailored", 24), ("shared", 16), ("exact", C)):
            sampler._take(design, k, "this is a test")
            losses = train(head, range(3), lr=0.1, loss=seeded(run))
            assert all(loss.isfinite().all() for loss in losses)
            assert (sampler.design, sampler.k) == (design, k)
    # A graph draws with the tables from before its call, so that the first step has the design before.
    designs = [8, "exact", "exact", "exact", 16, 16, 16, 24, 24, 24, 16, 16, 16, "exact", "exact"]
    assert drawn == designs


def test_a_compiled_head_by_default_counts_steps_learns_and_takes_up_a_rebuild():
    torch.manual_seed(0)
    head = head_of(("class", "learned, rebuilt"))
    draws(head)
    run = torch.compile(head, backend="eager", fullgraph=True)
    estimate, drawn = head.sampler.estimate.clone(), draws(head)
    train(head, range(1), loss=seeded(run))
    assert not torch.equal(head.sampler.estimate, estimate)
    train(head, range(1, STEPS), loss=seeded(run))
    # κ is that of the weights learned by the step of the rebuild.
    assert not identical(draws(head), drawn)


@cells([("class", "learned, rebuilt"), ("class", "clustered, rebuilt"), ("scorer", "learned, rebuilt")])
def test_a_compiled_head_in_evaluation_changes_nothing(cell):
    head = head_of(cell).eval()
    draws(head)
    state = state_of(head)
    run = torch.compile(head, backend="eager", fullgraph=True)
    with torch.no_grad():
        for step in range(STEPS):
            loss = seeded(run)(head, HIDDEN, step)
            assert torch.allclose(loss, seeded()(head, HIDDEN, step), rtol=1e-4)
    assert not differing(state_of(head), state)


class TopClasses(nn.Module):
    """The best classes of a head."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden):
        best = self.head.topk(hidden, 5)
        return best.log_prob, best.ids


def exported(head):
    shapes = {"hidden": {0: torch.export.Dim("batch", min=1, max=4096)}}
    return torch.export.export(TopClasses(head).eval(), (HIDDEN,), dynamic_shapes=shapes)


@cells([("class", "learned, rebuilt"), *OTHER_HEADS])
def test_exported_predictions_take_any_batch(cell):
    head = head_of(cell).eval()
    file = io.BytesIO()
    torch.export.save(exported(head), file)
    file.seek(0)
    program = torch.export.load(file).module()
    for batch in (B, 3, 1, 1500):
        hidden = torch.randn(batch, D)
        log_prob, ids = program(hidden)
        best = head.topk(hidden, 5)
        assert torch.equal(ids, best.ids)
        torch.testing.assert_close(log_prob, best.log_prob)


@pytest.mark.parametrize("make", [lambda: ClassHead(D, C, counts=WEIGHTS), lambda: HierarchicalHead(D, C)])
def test_predictions_compile_for_any_batch(make):
    torch.manual_seed(0)
    head = make().eval()
    run = torch.compile(lambda hidden: head.topk(hidden, 5), backend="eager", fullgraph=True, dynamic=True)
    for batch in (B, 3, 11):
        hidden = torch.randn(batch, D)
        assert torch.equal(run(hidden).ids, head.topk(hidden, 5).ids)


@pytest.mark.parametrize("sampler", [None, Learned(WEIGHTS, 6)], ids=["default", "learned"])
def test_a_compiled_head_is_probed_and_measured_under_autocast(sampler):
    torch.manual_seed(0)
    if sampler is None:
        sampler = Automatic(WEIGHTS, least=4)
    head, encoder = ClassHead(D, C, sampler=sampler), nn.Linear(D, D)
    compiled = torch.compile(lambda x: head(encoder(x), TARGET), backend="aot_eager", fullgraph=True)
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(HIDDEN)
        loss.backward()
    assert head.probe.number > 0
