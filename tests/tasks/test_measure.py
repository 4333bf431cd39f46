"""The evaluation of a model against slow loops over all classes."""

import math
from types import SimpleNamespace

import pytest
import torch

from manyclass import tasks
from manyclass.data import Names
from manyclass.errors import UserError
from manyclass.tasks.metrics import METRICS as KNOWN
from manyclass.tasks.metrics import metric_of_ranks, rank_metrics
from manyclass.tasks.model import Model
from manyclass.tasks.task import EncoderSpec, ModelSpec
from manyclass.training import Batch, evaluate
from tests.tasks.problems import KINDS, METRICS, to_evaluate

C, D = 40, 6
# Training counts from 0 to 1,000, so that all bands occur.
COUNTS = torch.tensor([0.0, 1.0, 9.0, 10.0, 99.0, 100.0, 999.0, 1000.0] * 5, dtype=torch.float64)


def model(kind):
    """A model with the metrics of a kind of data, whose inputs are `hidden`."""
    torch.manual_seed(0)
    own = tasks.TASKS[kind]
    task = SimpleNamespace(kind=kind, metrics=own.metrics, build=lambda spec: EncoderSpec(torch.nn.Identity(), D))
    settings = tasks.Settings(at=own.defaults.at)
    return Model(ModelSpec(task, Names(f"c{i}" for i in range(C)), COUNTS, {}, settings)).double()


def batches(*, n=3, excluded=0, weighted=False, several=False):
    generator = torch.Generator().manual_seed(1)
    shape = (16, 3) if several else (16,)
    for _ in range(n):
        target = torch.randint(C, shape, generator=generator)
        target[torch.rand(shape, generator=generator) < 0.1] = -100
        extras = {}
        if excluded:
            extras["exclude"] = torch.randint(-1, C, (*shape, excluded), generator=generator)
            extras["exclude"][extras["exclude"] == target.unsqueeze(-1)] = -1
        if weighted:
            extras["weight"] = torch.rand(shape, generator=generator)
        yield 2 * torch.randn(*shape, D, generator=generator, dtype=torch.float64), target, extras


def slow(made, items):
    """Return class, weight, loss and rank of each example that counts."""
    weight, bias = made.head.weight.tolist(), made.head.bias.tolist()
    found = []
    for hidden, target, extras in items:
        rows = zip(hidden.reshape(-1, D).tolist(), target.reshape(-1).tolist(), strict=True)
        for i, (row, own) in enumerate(rows):
            if own == -100:
                continue
            out = set(extras["exclude"].reshape(target.numel(), -1)[i].tolist()) if "exclude" in extras else set()
            scores = {
                c: bias[c] + sum(x * w for x, w in zip(row, weight[c], strict=True)) for c in range(C) if c not in out
            }
            loss = math.log(sum(math.exp(score) for score in scores.values())) - scores[own]
            rank = 1 + sum(score > scores[own] for score in scores.values())
            share = extras["weight"].reshape(-1)[i].item() if "weight" in extras else 1.0
            found.append((own, share, loss, rank))
    return found


SLOW = {
    "accuracy": lambda rank: rank == 1,
    "accuracy@5": lambda rank: rank <= 5,
    "accuracy@10": lambda rank: rank <= 10,
    "hits@1": lambda rank: rank == 1,
    "hits": lambda rank: 1,
    "hits@3": lambda rank: rank <= 3,
    "hits@10": lambda rank: rank <= 10,
    "HR@10": lambda rank: rank <= 10,
    "HR@20": lambda rank: rank <= 20,
    "MRR": lambda rank: 1 / rank,
    "MRR@7": lambda rank: 1 / rank if rank <= 7 else 0.0,
    "MRR@10": lambda rank: 1 / rank if rank <= 10 else 0.0,
    "NDCG": lambda rank: 1 / math.log2(1 + rank),
    "NDCG@7": lambda rank: 1 / math.log2(1 + rank) if rank <= 7 else 0.0,
    "NDCG@10": lambda rank: 1 / math.log2(1 + rank) if rank <= 10 else 0.0,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"excluded": 4}, {"weighted": True}, {"several": True}, {"excluded": 2, "weighted": True, "several": True}],
)
def test_numbers_are_those_of_a_loop(kind, options):
    made = model(kind)
    measured = tasks.measure(made, batches(**options))
    found = slow(made, batches(**options))
    whole = sum(share for _, share, _, _ in found)
    assert measured.examples == pytest.approx(whole)
    assert measured.loss == pytest.approx(sum(share * loss for _, share, loss, _ in found) / whole)
    assert measured.perplexity == pytest.approx(math.exp(measured.loss))
    assert list(measured.metrics) == METRICS[kind]
    for name, value in measured.metrics.items():
        assert value == pytest.approx(sum(share * SLOW[name](rank) for _, share, _, rank in found) / whole), name
    names = ["0", "1 to 9", "10 to 99", "100 to 999", "1,000 to 9,999"]
    assert [band.name for band in measured.bands] == names
    for band in measured.bands:
        part = [each for each in found if band.low <= COUNTS[each[0]] <= band.high]
        share = sum(each[1] for each in part)
        assert band.examples == pytest.approx(share)
        assert band.loss == pytest.approx(sum(each[1] * each[2] for each in part) / share)
        for name, value in band.metrics.items():
            assert value == pytest.approx(sum(each[1] * SLOW[name](each[3]) for each in part) / share)


@pytest.mark.parametrize("kind", KINDS)
def test_bands_sum_up_to_the_whole(trained, kind):
    done, _, data = trained(kind)
    batches = tasks.TASKS[kind].evaluation_batches(done.model.spec, tasks.Source(to_evaluate(kind, data)))[0]
    measured = tasks.measure(done.model, batches)
    assert sum(band.examples for band in measured.bands) == pytest.approx(measured.examples)
    assert sum(band.examples * band.loss for band in measured.bands) == pytest.approx(measured.examples * measured.loss)
    for name, value in measured.metrics.items():
        parts = sum(band.examples * band.metrics[name] for band in measured.bands)
        assert parts == pytest.approx(measured.examples * value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_sees_what_a_measurement_sees(trained, kind):
    done, _, data = trained(kind)
    batches = list(tasks.TASKS[kind].evaluation_batches(done.model.spec, tasks.Source(to_evaluate(kind, data)))[0])
    metrics = rank_metrics(done.model.head, METRICS[kind])
    report = evaluate(done.model.head, batches, encoder=done.model.encoder, metrics=metrics)
    measured = tasks.measure(done.model, batches)
    assert measured.loss == pytest.approx(report.loss)
    assert measured.metrics == pytest.approx(dict(report.metrics))


def test_every_metric_has_a_loop():
    assert set(KNOWN) == {name.partition("@")[0] for name in SLOW}


@pytest.mark.parametrize("name", SLOW)
def test_a_metric_of_each_rank(name):
    ranks = torch.arange(1, 30, dtype=torch.float64)
    expected = [float(SLOW[name](rank)) for rank in range(1, 30)]
    assert metric_of_ranks(name)(ranks).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for kind in KINDS for name in METRICS[kind]])
def test_the_worst_rank_is_never_good(name):
    assert metric_of_ranks(name)(torch.tensor([math.nan], dtype=torch.float64)).nan_to_num(0.0).item() == 0
    assert metric_of_ranks(name)(torch.tensor([1e9], dtype=torch.float64)).item() < 1e-8


def test_a_tie_for_the_first_place_is_no_hit():
    # Tied classes share their mean rank, so a constant model is never right.
    assert metric_of_ranks("accuracy")(torch.tensor([1.0, 1.5])).tolist() == [1, 0]


@pytest.mark.parametrize(("kind", "found"), [("features", "accuracy@"), ("triples", "hits@"), ("sequences", "MRR@")])
def test_metrics_are_measured_at_any_k(kind, found):
    made = model(kind)
    measured = tasks.measure(made, batches(), at=(7, 20))
    names = [name for name in METRICS[kind] if "@" not in name]
    at_k = [f"{name}{k}" for k in (7, 20) for name in tasks.TASKS[kind].metrics if name.endswith("@")]
    assert list(measured.metrics) == names + at_k
    ranks = [rank for *_, rank in slow(made, batches())]
    for k in (7, 20):
        expected = sum((1 / rank if kind == "sequences" else 1) for rank in ranks if rank <= k) / len(ranks)
        assert measured.metrics[f"{found}{k}"] == pytest.approx(expected)
    assert measured.to_json()[f"{found}20"] == measured.metrics[f"{found}20"]


def test_a_k_beyond_the_classes_is_refused_if_it_was_chosen():
    with pytest.raises(UserError, match="`at` must be at most the number of classes, 40, got 41"):
        tasks.measure(model("triples"), batches(), at=(10, 41))
    assert "accuracy@40" in tasks.measure(model("text"), batches(), at=(40,)).metrics
    with pytest.raises(ValueError, match="`at` must be one or more different numbers"):
        tasks.measure(model("triples"), batches(), at=(3, 3))


def test_all_metrics_follow_from_one_ranking(monkeypatch):
    made = model("triples")
    calls = []
    monkeypatch.setattr(
        "manyclass.tasks.metrics.ranks", lambda *a, **b: calls.append(1) or torch.ones(len(a[2])).double()
    )
    metrics = rank_metrics(made.head, ("MRR", "hits@10"))
    for item in batches(n=3):
        batch = Batch.of(item, torch.device("cpu"))
        for metric in metrics.values():
            metric(batch.inputs, batch)
    assert len(calls) == 3


def test_a_model_of_nans_is_not_measured():
    made = model("triples")
    with torch.no_grad():
        made.head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN"):
        tasks.measure(made, batches())


def test_the_mode_of_a_model_stays_and_dropout_does_not_count():
    made = model("features")
    made.encoder = torch.nn.Dropout(0.5)
    made.train()
    first = tasks.measure(made, batches())
    assert made.training
    assert first == tasks.measure(made, batches())


def test_an_evaluation_without_examples_is_refused():
    with pytest.raises(UserError, match="`data` must hold examples of classes that the model knows, got none"):
        tasks.measure(model("features"), [(torch.zeros(2, D).double(), torch.tensor([-100, -100]))])


def test_the_json_holds_the_measurement():
    measured = tasks.measure(model("triples"), batches())
    output = measured.to_json()
    assert output["MRR"] == measured.metrics["MRR"]
    assert output["perplexity"] == measured.perplexity
    assert [band["count"] for band in output["by_frequency"]] == [band.name for band in measured.bands]
