"""The head measures the error of log Z̃ in its training steps, and says so when it is large."""

import copy
import math
import warnings

import pytest
import torch

from manyclass import ClassHead, ScorerHead, diagnose
from manyclass.errors import InaccurateWarning
from manyclass.forms import LogSumExp
from manyclass.heads import _fused, _probe, flatten_examples
from manyclass.heads._probe import mean_square_error
from manyclass.objectives import Likelihood, LogisticRanking, PlainImportance
from manyclass.samplers import (
    Automatic,
    Clustered,
    Costs,
    ErrorProbe,
    Exhaustive,
    Importance,
    Learned,
    Systematic,
    Tailored,
)

C, D, B = 400, 6, 96
SAMPLERS = {
    "importance": lambda: Importance(torch.ones(C), 30),
    "own draws": lambda: Importance(torch.ones(C), 30, group_size=1),
    "systematic": lambda: Systematic(torch.ones(C), 30),
    "learned": lambda: Learned(torch.ones(C), 30, group_size=20),
    "clustered": lambda: Clustered(torch.ones(C), 30, group_size=8),
    "tailored": lambda: Tailored(torch.ones(C), 30, group_size=40),
}


def make(sampler, scale=1.0, **options):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=sampler, **options)
    with torch.no_grad():
        head.weight.copy_(scale * torch.randn(C, D))
    return head, torch.randn(B, D), torch.randint(C, (B,))


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_pooled_figure_is_the_error_of_the_training_steps(name):
    head, hidden, target = make(SAMPLERS[name]())
    head.own_probe = ErrorProbe(every=1)
    squares = []
    for _ in range(60):
        head(hidden, target).backward()
        squares.append(head.probe.error**2)
    truth = diagnose(head, hidden, target, draws=200).rmse_log_z
    # The squares of eight probes overlap; their mean is that of all probes but the first few.
    assert math.sqrt(sum(squares[7:]) / len(squares[7:])) == pytest.approx(truth, rel=0.25)


@pytest.mark.parametrize("batch", [40, 64, B, 128, 512])
def test_a_probe_takes_the_draw_of_the_step_and_other_examples_each_time(batch):
    head, _, _ = make(Systematic(torch.ones(C), 30))
    hidden, target = torch.randn(batch, D), torch.randint(C, (batch,))
    examples = flatten_examples(hidden, target, C)
    loss = head(hidden, target, reduction="none").detach()
    errors = loss - head.exact_loss(hidden, target, reduction="none").detach()
    few = min(batch, 64)
    found = [mean_square_error(head, examples, loss, turn) for turn in range(8)]
    chosen = [(torch.arange(few) * batch // few + turn) % batch for turn in range(8)]
    assert found == pytest.approx([errors[rows].square().mean().item() for rows in chosen], rel=1e-4)
    assert len(torch.cat(chosen).unique()) == batch


def test_classes_an_example_excludes_are_in_neither_normaliser():
    head, hidden, target = make(Exhaustive(C))
    exclude = torch.randint(C, (B, 50))
    loss = head(hidden, target, exclude=exclude, reduction="none").detach()
    assert mean_square_error(head, flatten_examples(hidden, target, C, exclude=exclude), loss, 0) < 1e-8
    assert mean_square_error(head, flatten_examples(hidden, target, C), loss, 0) > 1e-4


def test_a_changed_target_score_is_in_both_normalisers():
    objective = Likelihood()
    objective.form = LogSumExp(target=True, kappa=True, target_transform=lambda score: score - 0.3)
    head, hidden, target = make(Exhaustive(C), objective=objective)
    loss = head(hidden, target, reduction="none").detach()
    assert mean_square_error(head, flatten_examples(hidden, target, C), loss, 0) < 1e-8


def test_ignored_examples_are_not_measured():
    head, hidden, target = make(Systematic(torch.ones(C), 30))
    head.own_probe = ErrorProbe(every=1)
    hidden[::2], target[::2] = 1e4, -100
    head(hidden, target).backward()
    assert head.probe.error < 5
    head(hidden, torch.full_like(target, -100)).backward()
    assert (head.probe.number, head.probe.pooled) == (2, 1)


def test_a_step_with_all_classes_tries_other_designs_on_all_its_examples():
    seen = []
    sampler = Exhaustive(C)
    sampler.learns, sampler.observe = True, seen.append
    head, hidden, target = make(sampler)
    target[5] = -100
    head(hidden, target).backward()
    other = Systematic(torch.ones(C), 30)
    found = seen[0].trial(other, 3)
    exact = head.exact_loss(hidden, target, reduction="none")
    head.use(other)
    head.eval()
    loss = head(hidden, target, reduction="none", generator=torch.Generator().manual_seed(3))
    squares = (loss - exact).detach().square()
    assert found == pytest.approx(squares.sum().item() / (B - 1), rel=1e-4)


@pytest.mark.parametrize("objective", [LogisticRanking()])
def test_an_objective_without_an_estimate_of_z_is_not_probed(objective):
    head, hidden, target = make(Systematic(torch.ones(C), 30), objective=objective)
    for _ in range(20):
        head(hidden, target).backward()
    assert head.probe.number == 0


def test_plain_importance_sampling_is_probed_too():
    head, hidden, target = make(Importance(torch.ones(C), 200), objective=PlainImportance())
    head.own_probe = ErrorProbe(every=1)
    for _ in range(40):
        head(hidden, target).backward()
    assert head.probe.error == pytest.approx(diagnose(head, hidden, target, draws=100).rmse_log_z, rel=0.3)


def test_evaluations_and_diagnoses_are_not_steps():
    head, hidden, target = make(Systematic(torch.ones(C), 30))
    head.own_probe = ErrorProbe(every=1)
    with torch.no_grad():
        head(hidden, target)
    diagnose(head, hidden, target, draws=3)
    head.eval()
    head(hidden, target).backward()
    assert head.probe.steps == 0


def test_probes_use_no_random_numbers():
    runs = []
    for every in (1, 10**6):
        head, hidden, target = make(Learned(torch.ones(C), 30))
        head.own_probe = ErrorProbe(every=every)
        torch.manual_seed(3)
        runs.append([head(hidden, target).item() for _ in range(10)])
    assert runs[0] == runs[1]


class Dropping(torch.nn.Module):
    """Scores with dropout, which draws from the global generator."""

    def __init__(self):
        super().__init__()
        self.vectors, self.dropout = torch.nn.Embedding(C, D), torch.nn.Dropout(0.5)

    def forward(self, hidden, ids):
        return self.dropout(hidden) @ self.vectors(ids).mT


@pytest.mark.parametrize("every", [1, 3])
def test_probes_leave_the_random_numbers_of_a_scorer_alone(every):
    runs = []
    for interval in (every, 10**6):
        torch.manual_seed(0)
        head, hidden, target = ScorerHead(Dropping(), Systematic(torch.ones(C), 30)), torch.randn(B, D), torch.arange(B)
        head.own_probe = ErrorProbe(every=interval)
        runs.append([head(hidden, target).item() for _ in range(10)])
    assert runs[0] == runs[1]


def test_measuring_the_designs_leaves_the_random_numbers_of_a_scorer_alone():
    runs = []
    for costs in (None, Costs(1.0, 0.5, 0.7, 0.0)):
        torch.manual_seed(0)
        sampler = Automatic(torch.ones(C), least=30, costs=costs)
        head, hidden, target = ScorerHead(Dropping(), sampler), torch.randn(B, D), torch.arange(B)
        head(hidden, target).backward()
        runs.append(torch.get_rng_state())
    assert torch.equal(*runs)


class Counting(torch.nn.Module):
    """A scorer with dropout and a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.items = torch.nn.Embedding(C, D)
        self.dropout, self.norm = torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(D)

    def forward(self, hidden, ids):
        rows = self.dropout(self.norm(self.items(ids).flatten(0, 1))).reshape(*ids.shape, D)
        return hidden @ rows.transpose(1, 2)


def test_the_dropout_of_a_scorer_is_no_error_and_probes_change_none_of_its_buffers():
    means = []
    for every in (1, 10**6):
        torch.manual_seed(0)
        head = ScorerHead(Counting(), Systematic(torch.ones(C), C - 4))
        head.own_probe = ErrorProbe(every=every)
        hidden, target = torch.randn(B, D), torch.randint(C, (B,))
        for _ in range(4):
            head(hidden, target).backward()
        means.append(head.scorer.norm.running_mean)
        assert head.training
        assert head.scorer.dropout.training
        assert every > 1 or head.probe.error < 0.1
    assert torch.equal(*means)


def test_measuring_the_designs_changes_no_buffer_of_a_scorer():
    means, costs = [], None
    for _ in range(2):
        torch.manual_seed(0)
        head = ScorerHead(Counting(), Automatic(torch.ones(C), least=30, costs=costs))
        head(torch.randn(B, D), torch.arange(B)).backward()
        means.append(head.scorer.norm.running_mean)
        # The second head decides by the costs that the first one has measured, and measures nothing.
        costs = head.sampler.costs
    assert torch.equal(*means)


def test_a_scorer_is_probed_when_the_classes_that_its_steps_encode_pay_for_it():
    # A probe encodes 400 classes. A step encodes 380 + 512, and its gradients take twice the time of its scores, so
    # that a probe costs 1 % of 15 steps.
    head = ScorerHead(Counting(), Systematic(torch.ones(C), 380))
    hidden, target = torch.randn(512, D), torch.randint(C, (512,))
    found = []
    for step in range(1, 32):
        head(hidden, target)
        if head.probe.number > len(found):
            found.append(step)
    assert found == [4, 8, 16, 31]


def test_the_first_probe_of_a_scorer_awaits_steps_that_pay_for_it():
    head = ScorerHead(Counting(), Systematic(torch.ones(C), 10))
    hidden, target = torch.randn(B, D), torch.randint(C, (B,))
    for _ in range(89):
        assert head.probe.number == 0
        head(hidden, target)
    assert head.probe.number == 1


def test_hooks_of_class_vectors_see_the_gradient_of_the_step_alone():
    head, hidden, target = make(Automatic(torch.ones(C), least=30))
    seen = []
    head.weight.register_hook(lambda gradient: seen.append(gradient))
    head(hidden, target).backward()
    assert head.sampler.costs.exact > 0
    assert len(seen) == 1


def test_a_scorer_is_not_told_to_let_its_head_decide():
    torch.manual_seed(0)
    items = 20 * torch.randn(C, D)
    head = ScorerHead(lambda hidden, ids: hidden @ items[ids].transpose(1, 2), Systematic(torch.ones(C), 3))
    head.own_probe = ErrorProbe(every=1)
    hidden = torch.randn(B, D, requires_grad=True)
    for _ in range(3):
        head(hidden, torch.arange(B)).backward()
    with pytest.warns(InaccurateWarning, match=r"too probable\. Draw more classes with a larger `k`$"):
        head(hidden, torch.arange(B)).backward()


def test_a_large_error_warns_once_with_the_figure_and_what_to_do():
    head, hidden, target = make(Systematic(torch.ones(C), 8), scale=6.0)
    head.own_probe = ErrorProbe(every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            head(hidden, target).backward()
    (warning,) = [warning for warning in caught if warning.category is InaccurateWarning]
    # At the user's line, not at one of this package or of torch.
    assert warning.filename == __file__
    message = str(warning.message)
    assert "the error of log Z̃ is " in message
    assert "step 4" in message
    assert "`Tailored`" in message
    assert "`k`" in message


def test_the_warning_of_a_training_that_diverges_has_no_infinite_factor():
    head, hidden, target = make(Systematic(torch.ones(C), 8), scale=1e5)
    head.own_probe = ErrorProbe(every=1)
    for _ in range(3):
        head(hidden, target).backward()
    with pytest.warns(InaccurateWarning, match=r"the error of log Z̃ is .* off by a factor of 1e\+304"):
        head(hidden, target)


def test_a_scorer_is_probed_too():
    rows = torch.nn.Parameter(torch.randn(C, D))
    head = ScorerHead(lambda hidden, ids: hidden @ rows[ids].transpose(1, 2), Systematic(torch.ones(C), 30))
    head.own_probe = ErrorProbe(every=1)
    head(torch.randn(B, D), torch.randint(C, (B,))).backward()
    assert head.probe.error > 0


def test_a_copy_of_a_head_has_a_separate_probe():
    head, hidden, target = make(Systematic(torch.ones(C), 30))
    head(hidden, target).backward()
    twin = copy.deepcopy(head)
    twin(hidden, target).backward()
    assert (head.probe.steps, twin.probe.steps) == (1, 2)


def test_a_compiled_head_is_probed_too():
    head, hidden, target = make(Systematic(torch.ones(C), 30))
    head.own_probe = ErrorProbe(every=2)
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        compiled(hidden, target).backward()
    assert head.probe.number == 2
    assert head.probe.error == pytest.approx(diagnose(head, hidden, target, draws=100).rmse_log_z, rel=0.5)


@pytest.mark.parametrize("update", ["scored", "observed"])
def test_the_exact_loss_is_measured_by_the_way_that_a_step_takes(update, monkeypatch):
    fused, drawn = [], []
    monkeypatch.setattr(_fused, "fastest_way", lambda *_, **__: fused.append(1) or ("eager", 1.0))
    monkeypatch.setattr(_probe, "MAX_TIMED_SCORES", 10 * C)
    monkeypatch.setattr(_probe, "step_seconds", lambda head, some, draw: drawn.append(len(draw().ids())) or 1.0)
    head, hidden, target = make(Exhaustive(C), update=update)
    found = head.fastest_exact(flatten_examples(hidden, target, C))
    # A part of the batch stands for all of it, since autograd keeps all scores.
    assert (found, fused, drawn) == ((("eager", 1.0), [1], []) if update == "scored" else ((None, B / 10), [], [10]))
