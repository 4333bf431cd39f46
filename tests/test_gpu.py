"""A GPU gives the same results as the CPU, and no step synchronises with the device."""

import contextlib
import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from manyclass import ClassCounts, ClassHead, HierarchicalHead, diagnose
from manyclass.candidates import Block, Candidates
from manyclass.heads import flatten_examples
from manyclass.kernels import LinearDraw, all_classes, eager_loss, exact_cross_entropy, implementation, triton
from manyclass.samplers import Exhaustive
from manyclass.samplers._comb import Comb
from manyclass.samplers._scan import largest_log_p
from tests.kernels import test_triton_comb as comb_kernel
from tests.kernels.operands import distance, operands, parameters
from tests.kernels.test_triton_draws import DRAWS, FORMS, draw_of
from tests.kernels.test_triton_draws import parameters as draw_parameters
from tests.optim.test_triton import OPTIMISERS as ROW_OPTIMISERS
from tests.tables import OBJECTIVES, SAMPLERS

if torch.cuda.is_available():
    from manyclass.kernels.triton import closed_form

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # torch's compiler warns about precision and uses deprecated functions; torch 2.11 warns about sparse gradients.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:torch",
        "ignore:TensorFloat32:UserWarning",
        "ignore:Sparse invariant checks:UserWarning",
    ),
]

C, D, B = 3000, 32, 48


def on_gpu(candidates):
    blocks = [
        Block(block.ids.cuda(), block.log_kappa.cuda(), None if block.order is None else block.order.cuda())
        for block in candidates.blocks
    ]
    included = None if candidates.included is None else candidates.included.cuda()
    log_kappa = candidates.target_log_kappa().cuda()
    return Candidates(tuple(blocks), candidates.excluded.cuda(), lambda: log_kappa, candidates.num_classes, included)


@contextlib.contextmanager
def no_sync():
    """Turn every synchronisation with the device into an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def setting(name="systematic", group_size=None, **options):
    torch.manual_seed(0)
    weights = 1 / torch.arange(1, C + 1)
    head = ClassHead(D, C, sampler=SAMPLERS[name](weights, 60, group_size), **options)
    return head, torch.randn(B, D), torch.randint(0, C, (B,))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("group_size", [None, 1, 8])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_step_does_not_synchronise(name, group_size, sparse):
    head, hidden, target = setting(name, group_size, sparse=sparse)
    head, hidden, target = head.cuda(), hidden.cuda().requires_grad_(), target.cuda()
    exclude = torch.randint(-1, C, (B, 3), device="cuda")
    include = torch.randint(-1, C, (B, 20), device="cuda")
    weight = torch.rand(B, device="cuda")
    head(hidden, target, include=include, exclude=exclude, weight=weight).backward()
    with no_sync():
        head(hidden, target, include=include, exclude=exclude, weight=weight).backward()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_synchronises(name):
    head, hidden, target = setting(objective=OBJECTIVES[name][0])
    head, hidden, target = head.cuda(), hidden.cuda(), target.cuda()
    head(hidden, target).backward()
    with no_sync():
        head(hidden, target).backward()
    head.cpu()


@pytest.mark.parametrize("group_size", [None, 1, 8])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_candidates_have_the_same_scores_and_loss(name, group_size):
    head, hidden, target = setting(name, group_size)
    moved = head.cuda()
    candidates = moved.sampler(target.cuda(), exclude=target.cuda().unsqueeze(1))
    target_score, scores = moved.candidate_scores(hidden.cuda(), target.cuda(), candidates)
    logits = hidden @ head.weight.detach().cpu().T + head.bias.detach().cpu()
    ids = candidates.ids().cpu()
    expected = logits.gather(1, ids).masked_fill(candidates.hits(candidates.ids()).cpu(), -torch.inf)
    torch.testing.assert_close(scores.cpu(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(
        target_score.cpu(), logits.gather(1, target.unsqueeze(1)).squeeze(1), rtol=1e-4, atol=1e-4
    )


# The draws of Automatic are those of its designs, and are shared by a few examples whose errors are not independent.
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("set alone", "in batch", "automatic")])
def test_the_estimate_is_unbiased_on_a_gpu(name):
    weights = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    sampler = SAMPLERS[name](weights, 10, 1).cuda()
    g = torch.rand(50, dtype=torch.float64, device="cuda")
    target = torch.arange(50, device="cuda").repeat(20)
    errors = []
    for _ in range(40):
        candidates = sampler(target, exclude=target.unsqueeze(1))
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        errors.append((kappa * g[candidates.ids()]).sum(1) - (g.sum() - g[target]))
    error = torch.cat(errors)
    assert abs(error.mean()) <= 4.5 * error.std() / len(error) ** 0.5 + 1e-9


@pytest.mark.parametrize("group_size", [None, 1, 8])
@pytest.mark.parametrize("name", SAMPLERS)
def test_with_all_classes_included_the_loss_is_exact_on_a_gpu(name, group_size):
    head, hidden, target = setting(name, group_size)
    head, hidden, target = head.cuda(), hidden.cuda(), target.cuda()
    loss = head(hidden, target, include=torch.arange(C, device="cuda").expand(B, -1))
    torch.testing.assert_close(loss, head.exact_loss(hidden, target), rtol=2e-3, atol=2e-3)


def test_exact_results_agree():
    head, hidden, target = setting()
    expected = head.exact_loss(hidden, target), head.topk(hidden, 5).ids
    head = head.cuda()
    torch.testing.assert_close(head.exact_loss(hidden.cuda(), target.cuda()).cpu(), expected[0], rtol=1e-3, atol=1e-3)
    assert (head.topk(hidden.cuda(), 5).ids.cpu() == expected[1]).float().mean() > 0.95
    assert 0 < diagnose(head, hidden.cuda(), target.cuda(), draws=4).rmse_log_z < 1


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_gives_a_float32_loss_and_finite_gradients(half):
    head, hidden, target = setting()
    head, hidden, target = head.cuda(), hidden.cuda(), target.cuda()
    with torch.autocast("cuda", dtype=half):
        loss = head(hidden, target)
    assert loss.dtype == torch.float32
    loss.backward()
    assert torch.isfinite(head.weight.grad).all()


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["importance", "systematic", "minibatch explicit"])
def test_a_compiled_step_trains(name, sparse, impl):
    torch._dynamo.reset()
    head, hidden, target = setting(name, sparse=sparse)
    head.impl = impl
    head, hidden, target = head.cuda(), hidden.cuda(), target.cuda()
    run = torch.compile(head, fullgraph=True)
    losses = []
    for _ in range(3):
        head.zero_grad(set_to_none=True)
        loss = run(hidden, target)
        loss.backward()
        losses.append(loss.item())
    assert head.weight.grad.is_sparse == sparse
    assert abs(losses[-1] - head.exact_loss(hidden, target).item()) < 1


def test_the_hierarchical_head_agrees():
    torch.manual_seed(0)
    head = HierarchicalHead(D, C, counts=torch.arange(C))
    hidden, target = torch.randn(B, D), torch.randint(0, C, (B,))
    expected = head(hidden, target)
    head, hidden, target = head.cuda(), hidden.cuda(), target.cuda()
    torch.testing.assert_close(head(hidden, target).cpu(), expected, rtol=1e-4, atol=1e-4)
    with no_sync():
        head(hidden, target).backward()


def test_streamed_counts_rebuild_the_table_on_a_gpu():
    counts = ClassCounts.streaming(C)
    head = ClassHead(D, C, sampler=SAMPLERS["importance"](counts, 60, None)).cuda()
    counts.update(torch.full((10 * C,), 7, device="cuda"))
    head.sampler.refresh()
    assert (head.sampler(torch.tensor([1], device="cuda")).ids() == 7).float().mean() > 0.7


@pytest.mark.parametrize("excluded", [0, 3])
@pytest.mark.parametrize("way", ["closed_form", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exact_loss_by_triton_has_the_losses_and_gradients_of_the_reference(monkeypatch, dtype, way, excluded):
    monkeypatch.setattr(all_classes, "RUN_SCORES", {"cpu": 1, "cuda": 1})
    given = {
        name: x.detach().to(dtype).cuda().requires_grad_() if x is not None and x.is_floating_point() else x
        for name, x in operands(excluded=excluded).items()
    }
    given = {name: x if x is None else x.cuda() for name, x in given.items()}
    assert triton.is_available(given["hidden"], given["weight"])
    found = []
    for kind in (way, "eager"):
        loss = exact_cross_entropy(**given, way=kind)
        found.append([loss, *torch.autograd.grad(loss.sum(), parameters(given))])
    assert distance(*found) < (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize(
    ("examples", "classes", "rank", "group_size"), [(5, 7, 3, 2), (700, 3000, 48, 300), (9, 99, 256, 9)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scan_by_triton_finds_what_the_eager_one_finds(monkeypatch, dtype, examples, classes, rank, group_size):
    query, rows = (torch.randn(n, rank, device="cuda").to(dtype) for n in (examples, classes))
    bias = torch.randn(classes, device="cuda")
    found, _ = largest_log_p(query, rows, bias, 0, group_size)
    scores = query.double() @ rows.double().T + bias
    expected = torch.stack([group.amax(0) for group in scores.log_softmax(1).split(group_size)])
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=1e-3)
    monkeypatch.setattr(triton, "is_available", lambda *tensors: False)
    eager, _ = largest_log_p(query, rows, bias, 0, group_size)
    torch.testing.assert_close(found, eager, rtol=0.0, atol=1e-3 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize("passes", [1, 2])
def test_the_gradient_of_all_classes_and_a_tied_embedding_is_coalesced_without_a_sync(passes):
    torch.manual_seed(0)
    tables = [nn.Embedding(C, D, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    ids, target = torch.randint(0, 9, (passes, B), device="cuda"), torch.randint(0, C, (passes, B), device="cuda")
    for table in tables:
        head = ClassHead.tied(table.cuda(), sampler=Exhaustive(C)).cuda()
        for i in range(passes):
            head(table(ids[i]), target[i]).backward()
    sparse, dense = (table.weight.grad for table in tables)
    assert sparse.is_coalesced()
    torch.testing.assert_close(sparse.values(), dense, rtol=1e-4, atol=1e-6)


def test_a_gradient_without_all_rows_is_not_filled_with_zeros():
    """torch.autograd.grad stores no gradient, and leaves the next one alone."""
    table = nn.Embedding(C, D, sparse=True).cuda()
    head = ClassHead.tied(table, sampler=Exhaustive(C)).cuda()
    target = torch.randint(0, C, (B,), device="cuda")
    loss = head(torch.randn(B, D, device="cuda"), target)
    torch.autograd.grad(loss, table.weight, retain_graph=True)
    table(torch.randint(0, 3, (2 * C,), device="cuda")).sum().backward()
    assert len(table.weight.grad.coalesce().values()) == 3
    assert loss.isfinite()


SEEDS, BATCH = 12, 37  # draws of a case, and their examples: in half precision the error is the luck of roundings
KINK = 0.1  # more than half precision rounds a score


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", DRAWS)
@pytest.mark.parametrize("name", FORMS)
def test_a_draw_by_triton_is_no_less_accurate_than_the_eager_one(name, case, dtype):
    draws = [draw_of(case, BATCH, dtype=torch.float32, seed=seed) for seed in range(SEEDS)]
    pairs = [errors_of_a_draw(FORMS[name], draw, dtype) for draw in draws]
    ours, eager = torch.tensor(pairs, dtype=torch.float64).square().mean(0).sqrt()
    # Both round what they store to half precision: 4.5 standard errors of the ratio. The bias gradients of a class are
    # added up in that precision, by the same scatter.
    luck = 1 + 4.5 / (SEEDS * BATCH) ** 0.5
    slack = [1.0] * 4 if dtype == torch.float32 else [luck, luck, luck, 1.3]
    assert (ours <= torch.tensor(slack, dtype=torch.float64) * eager + 1e-5).all(), (ours, eager)


def errors_of_a_draw(form, given, dtype):
    """Return the errors of loss and gradients by kernels and by torch's operators, against float64."""
    candidates = on_gpu(given.candidates)

    def draw(dtype):
        tables = (x.detach().to("cuda", dtype).requires_grad_() for x in draw_parameters(given))
        return LinearDraw(*tables, given.target.cuda(), candidates)

    def results(loss, draw):
        return [loss.detach(), *torch.autograd.grad((loss * counted).sum(), draw_parameters(draw))]

    narrow, wide = draw(dtype), draw(torch.float64)
    # The same numbers in float64, not those before they were rounded.
    wide = LinearDraw(*(x.detach().double().requires_grad_() for x in draw_parameters(narrow)), wide.target, candidates)
    counted = is_far_from_a_kink(form, wide)
    truth = results(eager_loss(form, wide), wide)
    ours = results(closed_form.closed_form_loss(form, narrow)[0], narrow)
    eager = results(eager_loss(form, narrow), narrow)
    return [
        [float((x.double() - exact).norm() / (1 + exact.norm())) for x, exact in zip(found, truth, strict=True)]
        for found in (ours, eager)
    ]


def is_far_from_a_kink(form, draw):
    """Return a mask [B]: False where the rounding of a score may change the gradient by that of a whole slot."""
    if getattr(form, "activation", None) != "relu":
        return torch.ones_like(draw.target, dtype=torch.bool)
    margin = form.margin_of(C)
    below, here, above = (eager_loss(replace(form, margin=margin + shift), draw) for shift in (-KINK, 0.0, KINK))
    # A sum of max(0, x) is linear in the margin but for its kinks.
    return (above - 2 * here + below).abs() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROW_OPTIMISERS)
def test_row_updates_by_triton_are_the_eager_ones(name, dtype):
    found = []
    for impl in ("eager", "triton"):
        parameter = nn.Parameter(torch.linspace(-2, 2, C * D).reshape(C, D).to("cuda", dtype))
        optimizer = ROW_OPTIMISERS[name]([parameter], impl=impl)
        for step in range(3):
            generator = torch.Generator("cuda").manual_seed(step)
            ids = torch.randint(0, C // 3, (5000,), device="cuda", generator=generator)
            ids[:700] = 7
            rows = torch.randn(5000, D, device="cuda", generator=generator).to(dtype)
            parameter.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), rows, (C, D), check_invariants=False)
            optimizer.step()
        found.append(parameter.detach().float())
    torch.testing.assert_close(*found, rtol=0.02 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_rows_rounded_at_random_by_triton_move_on_average():
    moved = {}
    for rounding in (False, True):
        parameter = nn.Parameter(torch.ones(C, D, dtype=torch.bfloat16, device="cuda"))
        optimizer = ROW_OPTIMISERS["RowSGD"]([parameter], impl="triton", stochastic_rounding=rounding)
        optimizer.param_groups[0]["lr"] = 2**-8 / 100
        for _ in range(20):
            ids = torch.arange(C - 1, device="cuda").unsqueeze(0)
            rows = torch.ones(C - 1, D, dtype=torch.bfloat16, device="cuda")
            parameter.grad = torch.sparse_coo_tensor(ids, rows, (C, D), check_invariants=False)
            optimizer.step()
        moved[rounding] = (1 - parameter.double()[:-1]).mean().item()
        assert (parameter[-1] == 1).all()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(20 * 2**-8 / 100, rel=0.05)


@pytest.mark.parametrize("case", ["plain", "zero mass", "certain", "uneven"])
def test_a_comb_by_triton_falls_on_the_classes_of_the_eager_one(case):
    weights = comb_kernel.weights_of(case, 100_000).cuda()
    for order in (None, torch.randperm(100_000, device="cuda")):
        comb = Comb.of(weights, 5000, order=order)
        for groups, stratified in itertools.product((1, 3), (False, True)):
            blocks = []
            for impl in ("eager", "triton"):
                generator = torch.Generator("cuda").manual_seed(3)
                with implementation(impl):
                    blocks.append(comb.draw(groups, stratified=stratified, generator=generator))
            comb_kernel.check_equal(*blocks)


@pytest.mark.parametrize("batch", [1, 37, 10_000])
def test_ignored_targets_by_triton_are_those_of_torchs_operators(batch):
    target = torch.randint(C, (batch,), device="cuda")
    target[batch // 2 :: 3] = -100
    found = []
    for impl in ("eager", "triton"):
        with implementation(impl):
            found.append(flatten_examples(torch.zeros(batch, D, device="cuda"), target, C))
    eager, ours = found
    assert torch.equal(ours.target, eager.target)
    assert torch.equal(ours.valid, eager.valid)
    assert ours.share is not None
    assert eager.share is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_ignored_example_has_no_part_in_a_step_by_triton_even_if_it_is_nan(reduction, dtype):
    head, hidden, target = setting(sparse=True, impl="triton", bias=False)
    head, hidden, target = head.to("cuda", dtype), hidden.to("cuda", dtype), target.cuda()
    target[::4] = -100
    hidden[::4] = torch.nan
    hidden.requires_grad_()
    loss = head(hidden, target, reduction=reduction)
    loss.backward()
    assert loss.isfinite()
    assert head.weight.grad._values().isfinite().all()
    assert (hidden.grad[::4] == 0).all()
