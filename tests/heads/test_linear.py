"""ClassHead: a linear layer with a cross entropy over sampled classes, and its options."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyclass import Block, Candidates, ClassCounts, ClassHead
from manyclass.heads import exact
from manyclass.objectives import BlackOut, Likelihood, LogisticRanking, NoiseContrastive
from manyclass.samplers import Automatic, Bernoulli, Exhaustive, Importance, Learned, Systematic, WithExplicit
from tests.tables import OBJECTIVES, SAMPLERS

C, D, B = 23, 6, 10


def data(dtype=torch.float64, seed=0, shape=(B,)):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, D, dtype=dtype, generator=generator).requires_grad_()
    return hidden, torch.randint(0, C, shape, generator=generator)


def make_head(seed=0, **options):
    torch.manual_seed(seed)
    options.setdefault("sampler", Exhaustive(C))
    options.setdefault("dtype", torch.float64)
    head = ClassHead(D, C, **options)
    with torch.no_grad():
        head.weight.normal_()
        if head.bias is not None:
            head.bias.normal_()
    return head


def gradients(loss, hidden, head):
    wanted = [hidden, head.weight] + ([] if head.bias is None else [head.bias])
    return torch.autograd.grad(loss, wanted)


def assert_close(ours, theirs, atol=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [False, True], ids=["all", "some ignored"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("loss_name", ["sampled", "exact"])
def test_likelihood_over_every_class_is_the_cross_entropy(loss_name, bias, weighted, ignore, reduction):
    head = make_head(bias=bias)
    hidden, target = data()
    if ignore:
        target[[1, 4]] = -100
    class_weight = torch.rand(C, dtype=torch.float64) + 0.1 if weighted else None
    weight = None if class_weight is None else class_weight[target.clamp(min=0)]
    loss = (head if loss_name == "sampled" else head.exact_loss)(hidden, target, weight=weight, reduction=reduction)
    theirs = F.cross_entropy(F.linear(hidden, head.weight, head.bias), target, class_weight, reduction=reduction)
    assert_close(loss, theirs)
    up = torch.rand_like(loss)
    our_gradients, their_gradients = (gradients(x.mul(up).sum(), hidden, head) for x in (loss, theirs))
    for ours, other in zip(our_gradients, their_gradients, strict=True):
        assert_close(ours, other)


def test_the_exact_loss_is_the_same_in_chunks_of_any_size(monkeypatch):
    head = make_head()
    hidden, target = data()
    whole = head.exact_loss(hidden, target)
    expected = gradients(whole, hidden, head)
    for size in (1, 2, 5, 22):
        monkeypatch.setattr(exact, "MAX_SCORES", size * B)
        chunked = head.exact_loss(hidden, target)
        assert_close(chunked, whole)
        for ours, other in zip(gradients(chunked, hidden, head), expected, strict=True):
            assert_close(ours, other)


@pytest.mark.parametrize("chunk", [1 << 24, 3 * B], ids=["whole", "chunks"])
def test_exact_and_sampled_losses_exclude_the_same_classes(monkeypatch, chunk):
    monkeypatch.setattr(exact, "MAX_SCORES", chunk)
    head = make_head()
    hidden, target = data()
    exclude = torch.stack([(target + 1) % C, (target + 5) % C, torch.full_like(target, -1)], 1)
    logits = F.linear(hidden, head.weight, head.bias).scatter(1, exclude[:, :2], -torch.inf)
    expected = F.cross_entropy(logits, target)
    theirs = gradients(expected, hidden, head)
    for loss in (head(hidden, target, exclude=exclude), head.exact_loss(hidden, target, exclude=exclude)):
        assert_close(loss, expected)
        for ours, other in zip(gradients(loss, hidden, head), theirs, strict=True):
            assert_close(ours, other)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("group_size", [None, 1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_scores_of_a_draw_equal_those_of_the_full_matrix(name, group_size, sparse, similarity):
    sampler = SAMPLERS[name](torch.rand(C) + 0.1, 5, group_size)
    head = make_head(sampler=sampler, sparse=sparse, similarity=similarity, scale=3.0)
    hidden, target = data()
    exclude, generator = target.unsqueeze(1), torch.Generator().manual_seed(4)
    candidates = sampler(target, hidden=hidden, exclude=exclude, generator=generator)
    x, w = hidden, head.weight
    if similarity == "cosine":
        x, w = 3.0 * F.normalize(hidden, dim=1), F.normalize(head.weight, dim=1)
    logits = x @ w.T + head.bias
    target_score, scores = head.candidate_scores(hidden, target, candidates)
    assert_close(target_score, logits.gather(1, target.unsqueeze(1)).squeeze(1))
    # Empty slots among the included classes are scored as the target.
    ids = torch.cat([part.spread(part.ids, B) for part in candidates.parts(empty=target)], 1)
    hits = torch.cat([candidates.block_hits(block) for block in candidates.blocks], 1)
    # Slots of included classes, the last, are exempt.
    hits = F.pad(hits, (0, ids.shape[1] - hits.shape[1]))
    assert_close(scores, logits.gather(1, ids).masked_fill(hits, -torch.inf))
    loss = head(hidden, target, generator=torch.Generator().manual_seed(4))
    assert_close(loss, Likelihood()(target_score, scores, candidates).mean())
    reference = Likelihood()(
        logits.gather(1, target.unsqueeze(1)).squeeze(1),
        logits.gather(1, ids).masked_fill(hits, -torch.inf),
        candidates,
    ).mean()
    for ours, other in zip(gradients(loss, hidden, head), gradients(reference, hidden, head), strict=True):
        assert ours.is_sparse == (sparse and ours.shape[0] == C)
        assert_close(ours.to_dense(), other)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_the_head(name):
    objective = OBJECTIVES[name][0]
    torch.manual_seed(0)
    centres = torch.randn(C, D)
    target = torch.randint(0, C, (400,))
    hidden = centres[target] + 0.1 * torch.randn(400, D)
    head = ClassHead(D, C, sampler=Importance(torch.ones(C), 8), objective=copy.deepcopy(objective))
    before = head.exact_loss(hidden, target).item()
    optimizer = torch.optim.Adagrad(head.parameters(), lr=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        head(hidden, target).backward()
        optimizer.step()
    best = head.topk(hidden, 1).ids.squeeze(1)
    # Chance is 1/23; plain importance sampling and NCE with z = 1 learn slowly, as the paper says.
    assert (best == target).float().mean() > 0.5
    if objective.form is not None and not objective.normalised:
        assert head.exact_loss(hidden, target).item() < before


def test_sequences_give_the_losses_of_the_flattened_batch():
    head = make_head(sampler=Importance(torch.rand(C) + 0.1, 5))
    hidden, target = data(shape=(2, 5))
    target[1, 3] = -100
    exclude = torch.randint(-1, C, (2, 5, 2))
    weight = torch.rand(2, 5, dtype=torch.float64)
    losses = head(
        hidden, target, weight=weight, exclude=exclude, reduction="none", generator=torch.Generator().manual_seed(0)
    )
    flat = head(
        hidden.reshape(10, D),
        target.reshape(10),
        weight=weight.reshape(10),
        exclude=exclude.reshape(10, 2),
        reduction="none",
        generator=torch.Generator().manual_seed(0),
    )
    assert losses.shape == (2, 5)
    assert losses[1, 3] == 0
    assert_close(losses.reshape(10), flat)
    assert head.topk(hidden, 3).ids.shape == (2, 5, 3)
    assert head.log_prob(hidden, target.clamp(min=0).unsqueeze(-1)).shape == (2, 5, 1)
    assert head.log_z(hidden).shape == (2, 5)
    assert head.approximate_log_likelihood(hidden, target.clamp(min=0)).shape == (2, 5)


def test_ignored_examples_add_no_row_to_a_sparse_gradient():
    head = make_head(sampler=WithExplicit(None, torch.tensor([5]), num_classes=C), sparse=True)
    hidden, _ = data()
    target = torch.full((B,), -100)
    target[2] = 7
    head(hidden, target).backward()
    assert set(head.weight.grad.coalesce().indices()[0].tolist()) == {5, 7}


def test_the_loss_of_ignored_examples_is_zero():
    head = make_head()
    hidden, _ = data()
    loss = head(hidden, torch.full((B,), -100))
    assert loss.item() == 0
    loss.backward()
    assert (head.weight.grad == 0).all()


def test_ignore_index_can_be_a_class():
    head = make_head()
    hidden, target = data()
    target[:3] = 0
    expected = F.cross_entropy(F.linear(hidden, head.weight, head.bias), target, ignore_index=0)
    assert_close(head(hidden, target, ignore_index=0), expected)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("group_size", [None, 1, 3])
def test_update_observed_changes_only_the_targets_of_the_batch(group_size, sparse):
    hidden, target = data()
    target[:] = torch.tensor([3, 3, 9, 14, 14, 14, 20, 9, 3, 3])
    results = {}
    for update in ("scored", "observed"):
        sampler = Importance(torch.ones(C), 15, group_size=group_size)
        head = make_head(sampler=sampler, update=update, sparse=sparse)
        loss = head(hidden, target, generator=torch.Generator().manual_seed(0))
        results[update] = (loss, *(g.coalesce() if g.is_sparse else g for g in gradients(loss, hidden, head)))
    assert_close(results["observed"][0], results["scored"][0])
    assert_close(results["observed"][1], results["scored"][1])
    observed = torch.zeros(C, dtype=torch.bool)
    observed[target] = True
    for ours, every in zip(results["observed"][2:], results["scored"][2:], strict=True):
        if sparse:
            assert set(ours.indices()[0].tolist()) == set(target.tolist())
        assert_close(ours.to_dense()[observed], every.to_dense()[observed])
        assert (ours.to_dense()[~observed] == 0).all()
        assert (every.to_dense()[~observed] != 0).any()


def test_the_target_of_an_example_is_never_excluded():
    head = make_head()
    hidden, target = data()
    others = torch.stack([(target + 1) % C, (target + 2) % C], 1)
    labels = torch.cat([others, target.unsqueeze(1)], 1)
    for loss in (head, head.exact_loss):
        assert_close(loss(hidden, target, exclude=labels), loss(hidden, target, exclude=others))


def test_groups_can_have_any_order():
    """Each example is scored with the classes of its group, also if groups are not consecutive examples."""
    head = make_head()
    hidden, target = data()
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(0, C, (4, 3), generator=torch.Generator().manual_seed(2))
    block = Block(ids, torch.zeros(4, 3, dtype=torch.float64), order)
    candidates = Candidates((block,), torch.empty(B, 0, dtype=torch.int64), None, C)
    _, scores = head.candidate_scores(hidden, target, candidates)
    logits = F.linear(hidden, head.weight, head.bias)
    size = -(-B // 4)
    for place, example in enumerate(order.tolist()):
        assert_close(scores[example], logits[example, ids[place // size]])
        assert candidates.ids()[example].tolist() == ids[place // size].tolist()


def test_probabilities_and_top_k_are_exact(monkeypatch):
    monkeypatch.setattr(exact, "MAX_SCORES", 5 * B)
    head = make_head()
    hidden, target = data()
    log_p = F.log_softmax(F.linear(hidden, head.weight, head.bias), 1)
    assert_close(head.log_prob(hidden, torch.arange(C)), log_p)
    assert_close(head.log_prob(hidden, target.unsqueeze(1)), log_p.gather(1, target.unsqueeze(1)))
    best = head.topk(hidden, 7)
    values, ids = log_p.topk(7, 1)
    assert_close(best.log_prob, values)
    assert (best.ids == ids).all()
    rest = head.topk(hidden, 5, exclude=ids[:, :2])
    assert (rest.ids == ids[:, 2:]).all()
    assert_close(rest.log_prob, values[:, 2:])
    assert head.topk(hidden, C).ids.sort(1).values.tolist() == [list(range(C))] * B


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_approximate_likelihood_of_a_full_draw_is_exact_under_every_objective(name):
    head = make_head(sampler=Systematic(torch.rand(C) + 0.1, C), objective=OBJECTIVES[name][0])
    hidden, target = data()
    monitor = head.approximate_log_likelihood(hidden, target)
    assert not monitor.requires_grad
    # A draw of k = C classes is exact.
    assert_close(monitor.mean(), -head.exact_loss(hidden, target).detach())


def test_log_z_of_each_example_reaches_noise_contrastive():
    head = make_head(sampler=Importance(torch.ones(C), 6), objective=NoiseContrastive(0.5))
    hidden, target = data()
    log_z = torch.randn(B, dtype=torch.float64, requires_grad=True)
    seed = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    loss = head(hidden, target, log_z=log_z, generator=seed())
    loss.backward()
    assert (log_z.grad != 0).all()
    shifted = make_head(sampler=head.sampler, objective=NoiseContrastive(2.0))
    assert_close(
        head(hidden, target, log_z=torch.full((B,), 1.5, dtype=torch.float64), generator=seed()),
        shifted(hidden, target, generator=seed()),
    )


def test_sampler_objective_and_bias_have_defaults():
    counts = torch.arange(3000)
    head = ClassHead(D, 3000, counts=counts)
    assert isinstance(head.sampler, Automatic)
    assert isinstance(head.objective, Likelihood)
    assert_close(head.bias.detach(), ClassCounts(counts).frequency().log().float())
    assert isinstance(ClassHead(D, 10).sampler, Exhaustive)
    assert isinstance(ClassHead(D, 1024).sampler, Exhaustive)
    assert isinstance(ClassHead(D, 1025).sampler, Automatic)
    assert not ClassHead(D, 3000).bias.any()


def test_k_sets_the_number_of_classes_drawn():
    assert ClassHead(D, 3000, k=50).sampler.k == 50
    assert isinstance(ClassHead(D, 3000, k=50).sampler, Learned)
    assert ClassHead(D, 3000, counts=torch.arange(3000), k=50).sampler.k == 50
    assert isinstance(ClassHead(D, 40, k=50).sampler, Exhaustive)
    assert ClassHead.tied(nn.Embedding(3000, D), k=50).sampler.k == 50


@pytest.mark.parametrize("k", [None, "auto"])
def test_k_auto_is_the_default(k):
    head = ClassHead(D, 3000, counts=torch.arange(3000), k=k, rmse_log_z=0.03)
    assert isinstance(head.sampler, Automatic)
    assert (head.sampler.k, head.sampler.rmse_log_z) == (1024, 0.03)
    tied = ClassHead.tied(nn.Embedding(3000, D), k=k)
    assert isinstance(tied.sampler, Automatic)
    assert tied.sampler.rmse_log_z == 0.15


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 50, "sampler": Exhaustive(3000)}, ValueError, r"`k` must be None if a `sampler` is given, .* got 50"),
        (
            {"k": 50, "rmse_log_z": 0.2},
            ValueError,
            r"`rmse_log_z` must come without `k`, or with `k` 'auto', got 0.2 with k = 50",
        ),
        (
            {"sampler": Exhaustive(3000), "rmse_log_z": 0.2},
            ValueError,
            r"`rmse_log_z` must be None if a `sampler` is given, got 0.2",
        ),
        ({"k": "all"}, ValueError, r"`k` must be one of 'auto', got 'all'"),
        ({"k": 0}, ValueError, r"`k` must be at least 1, got 0"),
        ({"k": 2.5}, TypeError, r"`k` must be an int, got 2.5"),
        ({"k": "auto", "rmse_log_z": -1.0}, ValueError, r"`rmse_log_z` must be finite and above 0, got -1.0"),
    ],
)
def test_a_wrong_k_or_rmse_log_z_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        ClassHead(D, 3000, **options)


def test_a_sampler_keeps_its_weights_on_the_meta_device():
    head = make_head(sampler=Systematic(torch.ones(C), 5))
    head.sampler.to("meta")
    assert head(*data()).isfinite()


def test_a_sampler_on_another_device_is_refused():
    class Elsewhere(Exhaustive):
        device = torch.device("meta")

        def to(self, device):
            return self

    head = make_head(sampler=Elsewhere(C))
    with pytest.raises(ValueError, match="`sampler` must be on cpu, got meta"):
        head(*data())


def test_a_head_can_change_its_sampler():
    head = make_head()
    sampler = Systematic(torch.ones(C), 5, order="cluster")
    head.use(sampler)
    hidden, target = data()
    assert head(hidden, target).isfinite()
    assert head.sampler is sampler
    assert sampler.order.vectors[0] is head.weight
    with pytest.raises(ValueError, match=rf"`sampler` must draw from {C} classes, got 3"):
        head.use(Exhaustive(3))
    assert head.sampler is sampler


def test_a_tied_head_shares_the_embedding():
    embedding = nn.Embedding(C, D)
    head = ClassHead.tied(embedding, sampler=Exhaustive(C), bias=False)
    assert head.weight is embedding.weight
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    hidden, target = data(torch.float32)
    (head(hidden, target) + embedding(target).sum()).backward()
    expected = (
        F.one_hot(target, C).sum(0).unsqueeze(1).float()
        + torch.autograd.grad(F.cross_entropy(hidden @ embedding.weight.T, target), embedding.weight)[0]
    )
    torch.testing.assert_close(embedding.weight.grad, expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_tied_embedding_with_one_dense_and_one_sparse_gradient_is_refused(sparse):
    embedding = nn.Embedding(C, D, sparse=sparse)
    assert ClassHead.tied(embedding).sparse == sparse
    with pytest.raises(ValueError, match=f"`sparse` must be the embedding's, {sparse}, got {not sparse}"):
        ClassHead.tied(embedding, sparse=not sparse)


def test_a_tied_sparse_embedding_keeps_its_gradient_sparse():
    embedding = nn.Embedding(C, D, sparse=True)
    head = ClassHead.tied(embedding, sampler=Importance(torch.ones(C), 3))
    hidden, target = data(torch.float32)
    (head(hidden, target) + embedding(target).sum()).backward()
    assert embedding.weight.grad.is_sparse


def test_to_linear_shares_the_parameters():
    head = make_head()
    hidden, _ = data()
    linear = head.to_linear()
    assert linear.weight is head.weight
    assert linear.bias is head.bias
    assert_close(linear(hidden), head.scores(hidden, torch.arange(C)))
    assert make_head(bias=False).to_linear().bias is None
    with pytest.raises(ValueError, match="`similarity` must be 'dot'"):
        make_head(similarity="cosine").to_linear()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_copies_and_pickles_are_independent_heads(sparse):
    head = make_head(sampler=Bernoulli(torch.rand(C) + 0.1, 6), sparse=sparse)
    buffer = io.BytesIO()
    torch.save(head, buffer)
    buffer.seek(0)
    hidden, target = data()
    seed = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    for other in (copy.deepcopy(head), torch.load(buffer, weights_only=False)):
        assert_close(other(hidden, target, generator=seed()), head(hidden, target, generator=seed()))
        other(hidden, target).backward()
        assert head.weight.grad is None
        assert other.weight.grad is not None


def test_an_objective_that_weights_the_target_needs_its_kappa():
    hidden, target = data()
    sampler = WithExplicit(None, torch.arange(5), num_classes=C)
    for objective in (BlackOut(), NoiseContrastive()):
        with pytest.raises(ValueError, match="`sampler` must know how often a target is drawn"):
            make_head(sampler=sampler, objective=objective)(hidden, target)
    make_head(sampler=sampler, objective=LogisticRanking())(hidden, target)
