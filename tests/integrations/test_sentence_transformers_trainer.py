"""The loss for sentence-transformers in the library's trainer, and the numbers of its classes."""

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

from manyclass import ClassCounts
from manyclass.integrations.sentence_transformers import InBatchLoss, number_positives
from tests.integrations.sentence_model import (
    ANCHORS,
    COUNTS,
    NEGATIVES,
    POSITIVES,
    gradients,
    static_model,
    tiny_model,
)


@pytest.fixture
def model():
    return tiny_model()


def pairs(copies=1, *, negatives=False):
    columns = {"anchor": ANCHORS * copies, "positive": POSITIVES * copies}
    return Dataset.from_dict({**columns, "negative": NEGATIVES * copies} if negatives else columns)


def trained(model, loss, train, folder, *, optimizer=None, evaluation=None, **options):
    arguments = SentenceTransformerTrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **{"save_strategy": "no", **options}
    )
    schedule = None if optimizer is None else torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=train, eval_dataset=evaluation, loss=loss, optimizers=(optimizer, schedule)
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("mini_batch_size", "negatives", "bf16"),
    [(None, False, False), (None, True, True), (2, True, False), (2, False, True)],
)
def test_the_trainer_learns_the_pairs(model, tmp_path, mini_batch_size, negatives, bf16):
    train, held_out, counts = number_positives(pairs(4, negatives=negatives), pairs(negatives=negatives))
    loss = InBatchLoss(model, counts, mini_batch_size=mini_batch_size)
    # 20 pairs make two batches of 7 and a last one of 6.
    trainer = trained(
        model,
        loss,
        train,
        tmp_path,
        evaluation=held_out,
        per_device_train_batch_size=7,
        per_device_eval_batch_size=3,
        learning_rate=1e-2,
        num_train_epochs=8,
        eval_strategy="epoch",
        bf16=bf16,
    )
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 8
    assert losses[-1] < 0.6 * losses[0]
    scores = model.similarity(model.encode(ANCHORS), model.encode(POSITIVES))
    assert (scores.argmax(1) == torch.arange(5)).sum() >= 4


@pytest.mark.parametrize("mini_batch_size", [None, 2])
def test_accumulation_gives_the_mean_gradient_of_the_batches(model, tmp_path, mini_batch_size):
    train, counts = number_positives(pairs(negatives=True))
    loss = InBatchLoss(model, counts, mini_batch_size=mini_batch_size)
    batches = []
    hook = loss.register_forward_pre_hook(
        lambda _, given: batches.append(([dict(column) for column in given[0]], given[1]))
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained(
        model,
        loss,
        train,
        tmp_path,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=1,
        max_grad_norm=0.0,
    )
    hook.remove()
    assert [len(labels) for _, labels in batches] == [3, 2]
    moved = {name: (before[name] - value) / 0.1 for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    gradients(model, sum(loss(columns, labels) for columns, labels in batches) / 2)
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(moved[name], expected, rtol=1e-3, atol=1e-4)


def test_the_model_card_names_the_loss_and_its_options(model, tmp_path):
    train, counts = number_positives(pairs(2, negatives=True))
    loss = InBatchLoss(model, counts, mini_batch_size=4)
    trained(
        model,
        loss,
        train,
        tmp_path / "run",
        max_steps=2,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=1,
    )
    model.save(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "InBatchLoss" in card
    assert '"mini_batch_size": 4' in card
    assert '"num_classes": 10' in card
    assert "Sampling-Bias-Corrected" in card
    # The trainer saves the model alone.
    again = SentenceTransformer(str(tmp_path / "run" / "checkpoint-2"), device="cpu")
    torch.testing.assert_close(again.encode(ANCHORS), model.encode(ANCHORS))


def test_a_static_model_is_trained_without_mini_batches(tmp_path):
    model = static_model()
    train, counts = number_positives(pairs(8))
    trained(
        model,
        InBatchLoss(model, counts),
        train,
        tmp_path,
        max_steps=60,
        per_device_train_batch_size=8,
        learning_rate=0.1,
    )
    scores = model.similarity(model.encode(ANCHORS), model.encode(POSITIVES))
    assert (scores.argmax(1) == torch.arange(5)).all()
    with pytest.raises(ValueError, match=r"`mini_batch_size` must be None for a model with StaticEmbedding.* got 4"):
        InBatchLoss(model, counts, mini_batch_size=4)


def test_a_dataset_without_labels_is_refused_by_the_trainer(model, tmp_path):
    with pytest.raises(ValueError, match="`labels` must hold class ids, got None"):
        trained(model, InBatchLoss(model, COUNTS), pairs(), tmp_path, max_steps=1)


def test_equal_texts_are_one_class():
    train = Dataset.from_dict({"query": ["a", "b", "c", "d"], "answer": ["x", "y", "x", "x"]})
    numbered, counts = number_positives(train)
    assert numbered["label"][:] == [0, 1, 0, 0]
    assert numbered.column_names == ["query", "answer", "label"]
    assert isinstance(counts, ClassCounts)
    torch.testing.assert_close(counts.frequency(), torch.tensor([0.75, 0.25], dtype=torch.float64))


def test_hard_negatives_are_classes_that_do_not_count():
    train = Dataset.from_dict({"anchor": ["a", "b"], "positive": ["x", "y"], "near": ["y", "z"], "far": ["w", "w"]})
    numbered, counts = number_positives(train)
    x, y, z, w = 0, 1, 2, 3
    assert numbered["label"][:] == [[x, y, w], [y, z, w]]
    torch.testing.assert_close(counts.frequency(), torch.tensor([0.5, 0.5, 0, 0]).double(), rtol=0, atol=2e-6)


def test_further_datasets_share_the_numbers():
    train = Dataset.from_dict({"anchor": ["a", "b"], "positive": ["x", "y"]})
    first = Dataset.from_dict({"anchor": ["c", "d", "e"], "positive": ["z", "x", "z"]})
    second = Dataset.from_dict({"anchor": ["f"], "positive": ["z"], "negative": ["y"]})
    *numbered, counts = number_positives(train, first, second)
    assert [dataset["label"][:] for dataset in numbered] == [[0, 1], [2, 0, 2], [[2, 1]]]
    assert counts.raw.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("datasets", "error", "message"),
    [
        ([[("a", "x")]], TypeError, "`train` must be a datasets.Dataset, got list"),
        ([{"anchor": ["a"]}], ValueError, r"`train` must have columns of anchors and of positives, got \['anchor'\]"),
        (
            [{"anchor": ["a"], "positive": ["x"], "label": [0]}],
            ValueError,
            "`train` must have no column of labels, got",
        ),
        (
            [{"anchor": ["a"], "positive": [None]}],
            TypeError,
            "`train` must hold texts in column 'positive', got NoneType",
        ),
        ([{"anchor": ["a"], "positive": [3]}], TypeError, "`train` must hold texts in .*, got int in row 0"),
        ([{"anchor": [], "positive": []}], ValueError, "`train` must have rows, got none"),
        ([{"anchor": ["a"], "positive": ["x"]}, {"positive": ["x"]}], ValueError, "`others` must have columns"),
    ],
)
def test_bad_datasets_are_refused(datasets, error, message):
    made = [Dataset.from_dict(columns) if isinstance(columns, dict) else columns for columns in datasets]
    with pytest.raises(error, match=message):
        number_positives(*made)
