"""Text: segments to train on, and windows to evaluate on."""

import math

import pytest
import torch
import torch.nn.functional as F

from manyclass import tasks
from manyclass.errors import UserError
from manyclass.tasks import text
from manyclass.tasks.text import ContextWindows, Segments

TASK = tasks.TASKS["text"]
CONTEXT_TOKENS = 64


@pytest.mark.parametrize("n", [2, 3, 64, 65, 66, 129, 1000])
def test_every_token_but_the_first_is_predicted_exactly_once_and_in_its_place(n):
    ids = torch.arange(1000, 1000 + n)
    seen = []
    for inputs, target in ContextWindows(ids, start=7):
        assert inputs["ids"].shape == (len(target), 2 * CONTEXT_TOKENS)
        assert inputs["skip"] == CONTEXT_TOKENS
        for row, own in zip(inputs["ids"].tolist(), target.tolist(), strict=True):
            for place, token in enumerate(own):
                if token == -100:
                    continue
                # The context is at least 64 tokens of the text, padded before its start.
                before = row[: CONTEXT_TOKENS + place + 1]
                assert len(before) > CONTEXT_TOKENS
                first = token - len(before)
                assert before == [7 if i < 1000 else i for i in range(first, token)]
                seen.append(token)
    assert sorted(seen) == list(range(1001, 1000 + n))


def test_windows_come_in_batches_that_are_counted():
    windows = ContextWindows(torch.arange(100_000), start=0)
    assert len(windows) == len(list(windows)) == math.ceil(100_000 / CONTEXT_TOKENS / 256)


def test_a_limit_takes_windows_evenly_spaced():
    ids = torch.arange(100_000)
    target = torch.cat([target[target >= 0] for _, target in ContextWindows(ids, start=0, limit=1000)])
    assert 0.8 * 1000 < len(target) <= 1000
    assert len(target.unique()) == len(target)
    assert target.min() < 2000
    assert target.max() > 90_000
    few = list(ContextWindows(ids, start=0, limit=10))
    assert [len(target) for _, target in few] == [1]
    assert len(list(ContextWindows(ids[:50], start=0, limit=50))) == len(list(ContextWindows(ids[:50], start=0)))


def loop(model, ids, start):
    """Return losses and ranks, token by token, with the context of the window of each token."""
    model.eval()
    losses, ranks = [], []
    with torch.no_grad():
        for i in range(1, len(ids)):
            first = (i - 1) // CONTEXT_TOKENS * CONTEXT_TOKENS - CONTEXT_TOKENS
            before = [start] * max(0, -first) + ids[max(0, first) : i].tolist()
            hidden = model.encoder(torch.tensor([before]))[0, -1]
            scores = model.head.weight @ hidden + model.head.bias
            losses.append(F.cross_entropy(scores, ids[i]).item())
            ranks.append(1 + (scores > scores[ids[i]]).sum().item())
    return losses, ranks


def test_a_text_is_measured_as_a_loop_over_its_tokens_does(trained):
    done, _, data = trained("text")
    ids, unknown = text._number(done.model.spec, data / "valid.txt")
    assert unknown == 0
    losses, ranks = loop(done.model, ids, text._start(done.model.names))
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(data / "valid.txt"))
    measured = tasks.measure(done.model, batches)
    assert about == (f"valid.txt: {len(ids):,} tokens",)
    assert measured.examples == len(ids) - 1
    assert measured.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert measured.metrics["accuracy"] == pytest.approx(sum(rank == 1 for rank in ranks) / len(ranks))
    assert measured.metrics["accuracy@10"] == pytest.approx(sum(rank <= 10 for rank in ranks) / len(ranks))
    assert measured.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_a_window_of_context_changes_the_perplexity_little(trained):
    """With the context of a window instead of the whole text, the loss changes by less than 0.5 %."""
    done, _, data = trained("text")
    ids, _ = text._number(done.model.spec, data / "valid.txt")
    done.model.eval()
    with torch.no_grad():
        whole = done.model.encoder(torch.cat([torch.tensor([text._start(done.model.names)]), ids]).unsqueeze(0))
        exact = done.model.head.exact_loss(whole[0, 1:-1], ids[1:]).item()
    batches, _ = TASK.evaluation_batches(done.model.spec, tasks.Source(data / "valid.txt"))
    assert tasks.measure(done.model, batches).loss == pytest.approx(exact, rel=5e-3)


def test_the_perplexity_of_frequencies_is_reported(trained):
    done, _, data = trained("text")
    ids, _ = text._number(done.model.spec, data / "valid.txt")
    frequency = done.model.spec.counts / done.model.spec.counts.sum()
    unigram = math.exp(-frequency.log()[ids[1:]].mean().item())
    assert done.summary[1] == f"held-out perplexity of frequencies alone {unigram:,.1f}"
    assert done.measured.perplexity < unigram


def test_a_segment_is_followed_by_what_follows_it_in_the_text():
    segments = Segments(torch.arange(1000), 8, 10, seed=3)
    for epoch in range(3):
        segments.set_epoch(epoch)
        parts = list(segments)
        assert len(parts) == len(segments)
        inputs, target = (torch.cat(part) for part in zip(*parts, strict=True))
        assert torch.equal(target, inputs + 1)
        assert inputs.shape[1] == 10
        # A token is the target of at most one position, and nearly all tokens are targets.
        assert len(target.unique()) == target.numel() >= 970


def test_each_epoch_starts_at_another_offset_that_follows_from_its_number():
    segments = Segments(torch.arange(1000), 8, 10, seed=3)
    offsets = []
    for epoch in range(10):
        segments.set_epoch(epoch)
        first = [next(iter(segments))[0] for _ in range(2)]
        assert torch.equal(*first)
        offsets.append(int(first[0][0, 0]) % 10)
    assert len(set(offsets)) > 3


@pytest.mark.parametrize("n", [2, 3, 5, 71])
def test_a_short_text_is_a_piece_or_two(n):
    inputs, target = next(iter(Segments(torch.arange(n), 8, 70, seed=0)))
    assert torch.equal(target, inputs + 1)
    assert target.max() < n


def test_unknown_tokens_are_left_out_and_reported(trained, tmp_path):
    done, _, _ = trained("text")
    path = tmp_path / "new.txt"
    path.write_text("w00 unicorn w01\nhorse\n")
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(path))
    assert about == ("new.txt: 4 tokens, and 2 that the model does not know are left out",)
    assert tasks.measure(done.model, batches).examples == 3


def test_unknown_tokens_count_as_unk_if_there_is_such_a_class(tmp_path):
    train, held_out = tmp_path / "train.txt", tmp_path / "new.txt"
    train.write_text("a b a b c\n" * 20)
    held_out.write_text("a unicorn b\n" * 4)
    settings = tasks.Settings(epochs=1, dim=4, length=5).over(TASK.defaults)
    task = TASK.read(tasks.Source(train, held_out=held_out), settings, tmp_path / "ids")
    assert "<unk>" in list(task.spec.names)
    model = tasks.train(task, tmp_path / "model", tasks.RunOptions()).model
    batches, about = TASK.evaluation_batches(model.spec, tasks.Source(held_out))
    assert about == ("new.txt: 16 tokens, and 4 that the model does not know count as <unk>",)
    assert tasks.measure(model, batches).examples == 15


def test_a_text_of_one_token_is_refused(trained, tmp_path):
    done, _, _ = trained("text")
    path = tmp_path / "new.txt"
    for content, number in (("\n", 1), ("", 0)):
        path.write_text(content)
        with pytest.raises(UserError, match=f"at least 2 tokens that the model knows, got {number} in"):
            TASK.evaluation_batches(done.model.spec, tasks.Source(path))


def test_the_next_token_of_a_line_is_predicted(trained, tmp_path):
    done, _, _ = trained("text")
    path = tmp_path / "queries.txt"
    path.write_text("w00 w01\n\nw05 unicorn w11 w23\n" + "w00 " * 1000 + "\n")
    (queries,) = TASK.predict_batches(done.model.spec, tasks.Source(path), size=10, seen=True)
    start, names = text._start(done.model.names), done.model.names
    known = [names.ids(name) for name in ("w00", "w01", "w05", "w11", "w23")]
    assert queries.shown[:3] == ["w00 w01", "", "w05 unicorn w11 w23"]
    rows = [row[: last + 1] for row, last in zip(queries.inputs["ids"].tolist(), queries.inputs["last"], strict=True)]
    assert rows[:3] == [[start, *known[:2]], [start], [start, *known[2:]]]
    # Only the end of a long line is used.
    assert rows[3] == [known[0]] * 256
    sizes = [
        len(questions.shown)
        for questions in TASK.predict_batches(done.model.spec, tasks.Source(path), size=3, seen=True)
    ]
    assert sizes == [3, 1]
