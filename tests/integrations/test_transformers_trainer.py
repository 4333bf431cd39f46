"""Trainer of Transformers, and accelerate, train a model that was given to `apply`."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from manyclass.errors import UserError
from manyclass.integrations.transformers import SAMPLER_FILE, SamplerCheckpoint, _seed, apply, remove
from manyclass.optim import Chained, for_model
from manyclass.samplers import Exhaustive
from tests.integrations.test_transformers import CLASSES, COUNTS, assert_close, bert, gpt2, llama

LENGTH = 8
STEPS = 6


def examples(classes=CLASSES, number=48):
    """Return examples of which some labels are ignored, more in some than in others."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, classes, (number, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < torch.linspace(0, 0.7, number)[:, None], -100)
    return [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]


def trainer_of(model, folder, data=None, *, optimizer=None, callbacks=(), **options):
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    data = examples() if data is None else data
    return Trainer(
        model,
        TrainingArguments(str(folder), **{**defaults, **options}),
        train_dataset=data,
        eval_dataset=data[:8],
        optimizers=(optimizer, None),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_an_exact_training_is_that_of_the_plain_model(make, accumulation, tmp_path):
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    apply(model, sampler=Exhaustive(CLASSES))
    for trained in (plain, model):
        # Without Adam, which enlarges differences in rounding of gradients near 0.
        trainer_of(trained, tmp_path, optim="sgd", gradient_accumulation_steps=accumulation).train()
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("make", [gpt2, bert])
def test_accumulated_batches_make_the_step_of_one_large_batch(make, tmp_path):
    torch.manual_seed(0)
    model = make()
    found = []
    for size, accumulation in ((6, 1), (2, 3)):
        trained = copy.deepcopy(model)
        apply(trained, sampler=Exhaustive(CLASSES))
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        trainer_of(trained, tmp_path, optim="sgd", **options).train()
        found.append(trained.state_dict())
    assert_close(found[1], found[0])


def test_evaluation_is_exact(tmp_path):
    torch.manual_seed(0)
    plain = gpt2()
    model = copy.deepcopy(plain)
    apply(model, counts=COUNTS, k=16)
    losses = [trainer_of(m, tmp_path).evaluate()["eval_loss"] for m in (model, plain)]
    assert losses[0] == losses[1]
    assert trainer_of(model, tmp_path).predict(examples()[:8]).predictions.shape == (8, LENGTH, CLASSES)


def dense(model):
    return None


def rows_apart(model):
    return for_model(model)


# Options of `apply`, number of classes, and the optimiser. With more than 1,024 classes the default measures times.
RESUMED = {
    "learned, AdamW": ({"k": 16}, CLASSES, dense),
    "learned, rows apart": ({"k": 16, "sparse": True}, CLASSES, rows_apart),
    "default, AdamW": ({}, 3000, dense),
    "default, rows apart": ({"sparse": True}, 3000, rows_apart),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_training_equals_an_uninterrupted_one(case, tmp_path):
    options, classes, optimizer = RESUMED[case]
    data = examples(classes)

    def prepared():
        torch.manual_seed(0)
        # Dropout, so that the random numbers of the model matter too.
        model = gpt2(classes, resid_pdrop=0.1)
        head = apply(model, counts=torch.ones(classes), **options)
        callbacks = [SamplerCheckpoint()]
        saving = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
        return (
            model,
            head,
            trainer_of(
                model, tmp_path, data, optimizer=optimizer(model), callbacks=callbacks, max_grad_norm=0.5, **saving
            ),
        )

    model, head, trainer = prepared()
    trainer.train()
    again, other_head, trainer = prepared()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == STEPS
    assert_close(again.state_dict(), model.state_dict(), 0)
    assert_close(other_head.sampler.state_dict(), head.sampler.state_dict(), 0)
    assert other_head.own_probe.state() == head.own_probe.state()


def test_a_checkpoint_holds_a_plain_model_and_the_sampler_beside_it(tmp_path):
    model = gpt2()
    keys = set(model.state_dict()) - {"lm_head.weight"}
    head = apply(model, counts=COUNTS, k=16)
    trainer_of(model, tmp_path, save_strategy="steps", save_steps=3, callbacks=[SamplerCheckpoint()]).train()
    folder = tmp_path / "checkpoint-6"
    assert set(load_file(folder / "model.safetensors")) == keys
    assert set(load_file(folder / SAMPLER_FILE)) > {"content.json"}
    plain = GPT2LMHeadModel.from_pretrained(folder)
    assert_close(plain.state_dict(), model.state_dict(), 0)
    assert head.sampler.progress[0] == STEPS


def test_a_missing_or_a_wrong_state_of_the_sampler_is_an_error(tmp_path):
    model = gpt2()
    apply(model, counts=COUNTS, k=16)
    trainer_of(model, tmp_path, save_strategy="steps", save_steps=2, callbacks=[SamplerCheckpoint()]).train()

    def resume(step, callback):
        trainer_of(model, tmp_path, callbacks=[callback]).train(
            resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}")
        )

    resume(4, SamplerCheckpoint(tmp_path / "checkpoint-4"))
    with pytest.raises(ValueError, match="`folder` must be a checkpoint of step 4, got one of 2"):
        resume(4, SamplerCheckpoint(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-4" / SAMPLER_FILE).unlink()
    with pytest.raises(UserError, match="there is no such file"):
        resume(4, SamplerCheckpoint())
    remove(model)
    apply(model, sampler=Exhaustive(CLASSES))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        resume(2, SamplerCheckpoint())


def test_the_state_of_another_training_is_an_error(tmp_path):
    torch.manual_seed(0)
    for name in ("a", "b"):
        model = gpt2()
        apply(model, counts=COUNTS, k=16)
        trainer_of(model, tmp_path / name, save_strategy="steps", save_steps=2, callbacks=[SamplerCheckpoint()]).train()
    other = trainer_of(model, tmp_path / "b", callbacks=[SamplerCheckpoint()])
    with pytest.raises(ValueError, match=r"`folder` must be the checkpoint that the training resumes from, got .*b"):
        other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))


def test_processes_draw_differently_but_keep_the_initial_seed_that_orders_the_data():
    drawn = []
    for rank in range(2):
        torch.manual_seed(5)
        _seed(42, rank)
        assert torch.initial_seed() == 5
        drawn.append(torch.rand(4))
    assert not torch.equal(*drawn)


def test_the_callback_needs_a_sampled_model_and_a_process_for_each_gpu(tmp_path):
    with pytest.raises(ValueError, match="must have been given to `apply`"):
        trainer_of(gpt2(), tmp_path, callbacks=[SamplerCheckpoint()]).train()
    model = gpt2()
    apply(model, counts=COUNTS, k=16)
    with pytest.raises(ValueError, match="`n_gpu` must be 1, got 2: start a process for each GPU with torchrun"):
        SamplerCheckpoint().on_train_begin(SimpleNamespace(n_gpu=2), None, None, model=model)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bfloat16_and_gradient_checkpointing(sparse, checkpointing, tmp_path):
    torch.manual_seed(0)
    model = llama()
    apply(model, counts=torch.ones(CLASSES), k=64, sparse=sparse)
    optimizer = for_model(model) if sparse else None
    trainer = trainer_of(
        model, tmp_path, optimizer=optimizer, bf16=True, gradient_checkpointing=checkpointing, max_steps=40
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    # Trainer leaves accelerate's autocast on the model.
    with pytest.raises(ValueError, match="must have the forward pass that `apply` gave it"):
        remove(model)
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    remove(model)
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert model.train()(ids, labels=ids).logits.shape == (1, 4, CLASSES)


def test_a_schedule_moves_the_rates_of_rows_and_rest(tmp_path):
    model = gpt2()
    apply(model, counts=COUNTS, k=16, sparse=True)
    optimizer = for_model(model)
    before = [group["lr"] for group in optimizer.param_groups]
    trainer = trainer_of(model, tmp_path, optimizer=optimizer, lr_scheduler_type="linear")
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, Chained)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.0] * len(before)


def test_a_loop_with_accelerate():
    torch.manual_seed(0)
    model = gpt2()
    head = apply(model, counts=COUNTS, k=16)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = torch.utils.data.DataLoader(examples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    before = copy.deepcopy(model.state_dict())
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model.train()(**inputs).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert head.sampler.progress[0] == len(loader)
    assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])
