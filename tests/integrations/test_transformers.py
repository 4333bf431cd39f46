"""Language models of Transformers train with a head's loss, and are otherwise as before."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from manyclass import ClassCounts
from manyclass.integrations.transformers import apply, remove
from manyclass.objectives import NoiseContrastive
from manyclass.optim import RowAdagrad, for_model
from manyclass.samplers import Exhaustive, Importance, Learned, Systematic

CLASSES = 200
COUNTS = 1000 / (torch.arange(CLASSES) + 1.0)
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {
    "vocab_size": CLASSES,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    **SPECIAL,
}


def gpt2(vocab_size=CLASSES, **options):
    """Return a causal model whose output layer has no bias and is tied to the input embedding."""
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, **SPECIAL, "pad_token_id": None}
    pdrop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **{**sizes, **pdrop, **options}))


def bert():
    """Return a masked model whose output layer has a bias and is tied to the input embedding."""
    options = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
    return BertForMaskedLM(BertConfig(**options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def llama(**options):
    """Return a causal model whose output layer has no bias and is not tied."""
    return LlamaForCausalLM(LlamaConfig(**SMALL, **options))


MODELS = {"gpt2": gpt2, "bert": bert, "llama": llama}


@pytest.fixture(params=MODELS)
def make(request):
    torch.manual_seed(0)
    return MODELS[request.param]


def batch(length=12, size=3):
    ids = torch.randint(3, CLASSES, (size, length))
    labels = ids.clone()
    labels[0, : length // 2] = -100
    labels[1, -1] = -100
    return ids, labels


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_close(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_exact_loss_and_its_gradients_are_those_of_the_plain_model(make):
    plain = make().train()
    model = copy.deepcopy(plain)
    apply(model, sampler=Exhaustive(CLASSES))
    ids, labels = batch()
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    loss = model(ids, attention_mask=mask, labels=labels).loss
    expected = plain(ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.backward()
    assert_close(gradients(model), gradients(plain))


BERT = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
# Each differs from those above in its last layers, its positions or the shift of its labels.
OTHERS = {
    "RobertaForMaskedLM": BERT,
    "AlbertForMaskedLM": {**BERT, "embedding_size": 8},
    "ModernBertForMaskedLM": BERT,
    "BertLMHeadModel": {**BERT, "is_decoder": True},
    "GPTNeoXForCausalLM": BERT,
    "MambaForCausalLM": {"vocab_size": CLASSES, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_causal_or_masked_model_has_its_exact_loss(name):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    plain = kind(kind.config_class(**OTHERS[name])).train()
    for part in plain.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    model = copy.deepcopy(plain)
    apply(model, sampler=Exhaustive(CLASSES))
    ids, labels = batch()
    loss, expected = model(ids, labels=labels).loss, plain(ids, labels=labels).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.backward()
    assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("number", [7, torch.tensor(7), torch.tensor(7.0)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_sum_of_losses_is_divided_by_the_number_of_items_that_is_given(name, number):
    plain = MODELS[name]().train()
    model = copy.deepcopy(plain)
    apply(model, sampler=Exhaustive(CLASSES))
    ids, labels = batch()
    loss = model(ids, labels=labels, num_items_in_batch=number).loss
    torch.testing.assert_close(loss, plain(ids, labels=labels, num_items_in_batch=number).loss, atol=1e-5, rtol=1e-5)


def test_a_masked_model_divides_by_the_number_of_items_too():
    model = bert().train()
    ids, labels = batch()
    logits = model(ids).logits
    apply(model, sampler=Exhaustive(CLASSES))
    loss = model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 50
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_shifted_labels_are_taken_as_they_are():
    plain = llama().train()
    model = copy.deepcopy(plain)
    apply(model, sampler=Exhaustive(CLASSES))
    ids, labels = batch()
    shifted = torch.randint(CLASSES, labels.shape)
    shifted[0, 3] = -100
    given = {"labels": labels, "shift_labels": shifted}
    torch.testing.assert_close(model(ids, **given).loss, plain(ids, **given).loss, atol=1e-5, rtol=1e-5)


def test_another_index_may_mark_ignored_labels():
    model = llama().train()
    apply(model, sampler=Exhaustive(CLASSES))
    ids, labels = batch()
    expected = model(ids, labels=labels).loss
    other = model(ids, labels=labels.where(labels != -100, -1), ignore_index=-1).loss
    assert other == expected


def test_a_step_whose_labels_are_all_ignored_has_no_loss_and_no_gradient():
    model = gpt2().train()
    apply(model, counts=COUNTS, k=16)
    ids, labels = batch()
    loss = model(ids, labels=torch.full_like(labels, -100)).loss
    loss.backward()
    assert loss == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients(model).values())


def test_a_training_step_returns_a_loss_and_no_logits(make):
    model = make().train()
    apply(model, counts=COUNTS, k=16)
    ids, labels = batch()
    output = model(ids, labels=labels, output_hidden_states=True)
    assert output.logits is None
    assert "logits" not in output
    assert next(iter(output)) == "loss"
    assert len(output.hidden_states) == 3
    assert model(ids, labels=labels, return_dict=None).loss.shape == ()
    loss, *rest = model(ids, labels=labels, return_dict=False)
    assert loss.shape == ()
    assert not any(isinstance(part, torch.Tensor) and part.shape[-1] == CLASSES for part in rest)


def test_labels_may_be_given_by_position():
    model = bert().train()
    apply(model, sampler=Exhaustive(CLASSES))
    ids, labels = batch()
    assert model(ids, None, None, None, None, None, None, labels).loss == model(ids, labels=labels).loss


class Largest(TorchDispatchMode):
    """The largest number of elements of a result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result


@pytest.mark.parametrize("is_sampled", [True, False])
def test_no_score_of_each_token_and_class_is_made(is_sampled):
    classes, ids = 3000, torch.randint(3000, (4, 64))
    model = gpt2(classes).train()
    if is_sampled:
        apply(model, sampler=Systematic(torch.ones(classes), 32))
    with Largest() as largest:
        model(ids, labels=ids).loss.backward()
    assert (largest.elements < ids.numel() * classes // 4) == is_sampled


def test_other_calls_are_those_of_the_plain_model(make):
    plain = make()
    model = copy.deepcopy(plain)
    apply(model, counts=COUNTS, k=16)
    ids, labels = batch()
    for training in (True, False):
        model.train(training)
        plain.train(training)
        assert torch.equal(model(ids).logits, plain(ids).logits)
        with torch.no_grad():
            found, expected = model(ids, labels=labels), plain(ids, labels=labels)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.loss, expected.loss)
    # In evaluation the loss has a gradient too.
    assert torch.equal(model(ids, labels=labels).loss, plain(ids, labels=labels).loss)


def trained(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        ids, labels = batch()
        optimizer.zero_grad()
        model.train()(ids, labels=labels).loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_generates_what_a_plain_model_with_the_saved_weights_does(name, training, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]()
    apply(model, counts=COUNTS, k=16)
    trained(model).save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).train(training)
    ids = torch.randint(3, CLASSES, (2, 5))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "pad_token_id": 0}
    for sampling in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True}):
        torch.manual_seed(1)
        found = model.train(training).generate(ids, **options, **sampling)
        torch.manual_seed(1)
        assert torch.equal(found, plain.generate(ids, **options, **sampling))


def test_saved_weights_have_no_trace_of_the_head(make, tmp_path):
    model, keys = make(), make().state_dict().keys()
    head = apply(model, counts=COUNTS, k=16)
    assert model.state_dict().keys() == keys
    assert head not in list(model.modules())
    assert {id(p) for p in model.parameters()} >= {id(p) for p in head.parameters()}
    trained(model).save_pretrained(tmp_path)
    plain, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert_close(plain.state_dict(), model.state_dict(), 0)
    assert "_manyclass" not in (tmp_path / "config.json").read_text()
    # And the round trip goes on.
    apply(plain, counts=COUNTS, k=16)
    trained(plain)


def test_weights_that_are_tied_stay_so(make):
    model = make()
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    apply(model, counts=COUNTS, k=16)
    trained(model)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_the_head_has_the_bias_of_the_output_layer_and_no_other():
    model = bert()
    before = model.get_output_embeddings().bias.clone()
    head = apply(model, counts=COUNTS, k=16)
    assert head.bias is model.get_output_embeddings().bias
    assert torch.equal(head.bias, before)
    trained(model)
    assert not torch.equal(head.bias, before)
    assert apply(gpt2(), counts=COUNTS, k=16).bias is None


def test_the_loss_follows_parameters_that_torch_replaces():
    model = bert().train()
    head = apply(model, sampler=Exhaustive(CLASSES))
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()}, assign=True)
    model.tie_weights()
    ids, labels = batch()
    loss = model(ids, labels=labels).loss
    torch.testing.assert_close(loss, model.eval()(ids, labels=labels).loss, atol=1e-5, rtol=1e-5)
    assert head.weight is model.get_output_embeddings().weight


# Transformers 5.23 has a new name for it.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(use_reentrant):
    torch.manual_seed(0)
    model, found, calls = llama(), [], []
    for checkpoints in (False, True):
        copied = copy.deepcopy(model).train()
        if checkpoints:
            copied.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        copied.model.layers[0].mlp.register_forward_pre_hook(lambda *_, c=checkpoints: calls.append(c))
        apply(copied, sampler=Systematic(COUNTS, 16))
        calls.clear()
        torch.manual_seed(1)
        ids, labels = batch()
        copied(ids, labels=labels).loss.backward()
        assert len(calls) == 1 + checkpoints
        found.append(gradients(copied))
    assert_close(found[1], found[0], 0)


@pytest.mark.parametrize("way", ["autocast", "weights"])
def test_bfloat16_comes_near_to_the_plain_model(make, way):
    plain = make().train()
    if way == "weights":
        plain.to(torch.bfloat16)
    model = copy.deepcopy(plain)
    apply(model, sampler=Exhaustive(CLASSES))
    ids, labels = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        loss, expected = model(ids, labels=labels).loss, plain(ids, labels=labels).loss
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), atol=0.02, rtol=0.02)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_a_frozen_output_layer_gives_gradients_to_the_rest():
    model = llama().train()
    model.get_output_embeddings().requires_grad_(False)
    apply(model, counts=COUNTS, k=16)
    ids, labels = batch()
    model(ids, labels=labels).loss.backward()
    assert model.get_output_embeddings().weight.grad is None
    assert model.get_input_embeddings().weight.grad.abs().max() > 0


@pytest.mark.parametrize("make_sampler", [lambda: Systematic(COUNTS, 16), lambda: Exhaustive(CLASSES)])
def test_sparse_gradients_equal_dense_ones(make, make_sampler):
    model, found = make(), []
    for sparse in (False, True):
        copied = copy.deepcopy(model).train()
        apply(copied, sampler=make_sampler(), sparse=sparse)
        torch.manual_seed(1)
        ids, labels = batch()
        copied(ids, labels=labels).loss.backward()
        assert copied.get_output_embeddings().weight.grad.is_sparse == sparse
        found.append({name: gradient.to_dense() for name, gradient in gradients(copied).items()})
    assert_close(found[1], found[0], 1e-6)


def test_one_optimiser_is_made_of_the_rows_and_the_rest():
    for make, sparse in ((gpt2, False), (gpt2, True), (llama, True), (bert, True)):
        model = make()
        apply(model, counts=COUNTS, k=16, sparse=sparse)
        rows, _ = for_model(model).optimizers
        assert isinstance(rows, RowAdagrad)
        layer = model.get_output_embeddings()
        expected = {id(parameter) for parameter in layer.parameters()}
        assert {id(p) for group in rows.param_groups for p in group["params"]} == expected


@pytest.mark.parametrize("sparse", [False, True])
def test_the_rows_are_found_after_parameters_were_replaced(make, sparse):
    model = make()
    apply(model, counts=COUNTS, k=16, sparse=sparse)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    rows, _ = for_model(model).optimizers
    found = {id(p) for group in rows.param_groups for p in group["params"]}
    assert id(model.get_output_embeddings().weight) in found


def test_one_graph_holds_a_whole_step():
    torch.manual_seed(0)
    model = gpt2().train()
    head = apply(model, sampler=Learned(COUNTS, 16))
    ids, labels = batch()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = []
    for run in (eager, compiled):
        torch.manual_seed(1)
        losses.append(run(ids, labels=labels).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    assert_close(gradients(model), gradients(eager))
    compiled(ids, labels=labels)
    assert head.sampler.progress[0] == 2
    assert compiled(ids).logits.shape == (*ids.shape, CLASSES)
    torch.compiler.reset()


def test_a_copy_trains_apart():
    model = gpt2()
    head = apply(model, counts=COUNTS, k=16)
    copied = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    trained(copied)
    assert_close(model.state_dict(), before, 0)
    assert head.sampler.progress[0] == 0
    trained(model)
    assert head.sampler.progress[0] == 3


def test_a_probe_changes_nothing():
    model = gpt2(resid_pdrop=0.1).train()
    model.transformer.h[0].eval()
    modes = [part.training for part in model.modules()]
    state = torch.get_rng_state()
    attributes = [set(part.__dict__) for part in model.modules() if part is not model]
    apply(model, sampler=Importance(COUNTS, 16))
    assert modes == [part.training for part in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert attributes == [set(part.__dict__) for part in model.modules() if part is not model]


def test_remove_leaves_a_plain_model(make):
    torch.manual_seed(0)
    plain = make()
    attributes = set(plain.__dict__)
    model = copy.deepcopy(plain).train()
    apply(model, counts=COUNTS, k=16, sparse=True)
    remove(model)
    assert set(model.__dict__) == attributes
    ids, labels = batch()
    output = model(ids, labels=labels)
    assert torch.equal(output.loss, plain.train()(ids, labels=labels).loss)
    output.loss.backward()
    assert not any(gradient.is_sparse for gradient in gradients(model).values())
    apply(model, counts=COUNTS, k=16)
    assert model(ids, labels=labels).logits is None


def test_a_forward_pass_of_one_model_alone_is_kept_and_restored():
    model, calls = llama().train(), []
    own = model.forward
    model.forward = lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)
    given = model.forward
    apply(model, sampler=Exhaustive(CLASSES))
    calls.clear()
    ids, labels = batch()
    model(ids, labels=labels).loss.backward()
    assert calls == [1]
    remove(model)
    assert model.forward is given


def scaled(config, **options):
    return config(**SMALL, **options)


REFUSED = {
    "soft-capping": lambda: Gemma2ForCausalLM(scaled(Gemma2Config)),
    "a scale in the configuration": lambda: CohereForCausalLM(scaled(CohereConfig)),
    "scaling": lambda: GraniteForCausalLM(scaled(GraniteConfig, logits_scaling=2.0)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_changes_its_scores_is_refused(case):
    model = REFUSED[case]()
    with pytest.raises(ValueError, match=r"must return the scores .* a score of 100 becomes"):
        apply(model, counts=COUNTS)
    assert "forward" not in model.__dict__


class Penalised(GPT2LMHeadModel):
    def forward(self, input_ids, labels=None, **options):
        output = super().forward(input_ids, labels=labels, **options)
        if labels is not None:
            output.loss = output.loss + 0.1 * output.logits.square().mean()
        return output


class PenalisedInTraining(GPT2LMHeadModel):
    def forward(self, input_ids, labels=None, **options):
        output = super().forward(input_ids, labels=labels, **options)
        if labels is not None and self.training:
            output.loss = output.loss + 1
        return output


class Biased(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) + 1


class Twice(GPT2LMHeadModel):
    def forward(self, input_ids, **options):
        super().forward(input_ids)
        return super().forward(input_ids, **options)


class LowRank(nn.Linear):
    """An output layer with an adapter that starts at zero."""

    def __init__(self, dim, classes):
        super().__init__(dim, classes, bias=False)
        self.into, self.out = nn.Parameter(torch.randn(2, dim)), nn.Parameter(torch.zeros(classes, 2))

    def forward(self, hidden):
        return super().forward(hidden) + hidden @ self.into.T @ self.out.T


class Dropped(nn.Linear):
    """An output layer that drops some of its input in training."""

    def forward(self, hidden):
        return super().forward(F.dropout(hidden, 0.5, self.training))


def with_layer(layer):
    model = llama()
    model.lm_head = layer
    return model


def encoder_decoder():
    return T5ForConditionalGeneration(T5Config(vocab_size=CLASSES, d_model=16, num_layers=1, d_ff=16, num_heads=2))


def with_routers():
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2, output_router_logits=True))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Linear(4, CLASSES), TypeError, "`model` must be a PreTrainedModel of Transformers, got a Linear"),
        (lambda: None, TypeError, "`model` must be a PreTrainedModel of Transformers, got a NoneType"),
        (encoder_decoder, ValueError, "got an encoder-decoder, T5ForConditionalGeneration"),
        (lambda: GPT2Model(gpt2().config), ValueError, "must have an output layer, got a GPT2Model without one"),
        (lambda: llama().to("meta"), ValueError, "must have values, got a tensor on the meta device"),
        (lambda: Penalised(gpt2().config), ValueError, "must have the cross entropy of its logits as its loss"),
        (
            lambda: PenalisedInTraining(gpt2().config),
            ValueError,
            "must have the cross entropy of its logits as its loss",
        ),
        (with_routers, ValueError, "must have the cross entropy of its logits as its loss"),
        (lambda: Twice(gpt2().config), ValueError, "calls its output layer once .* got 2 calls"),
        (lambda: with_layer(Biased(16, CLASSES)), ValueError, "must have a linear output layer, got Biased"),
        (lambda: with_layer(LowRank(16, CLASSES)), ValueError, "with a LowRank that has others"),
        (lambda: with_layer(Dropped(16, CLASSES, bias=False)).eval(), ValueError, "linear output layer, got Dropped"),
        (lambda: with_layer(nn.Identity()), ValueError, r"with a weight \[C, D\] of floats, got .* with a Identity"),
    ],
)
def test_a_model_that_cannot_be_sampled_is_refused(make, error, message):
    model = make()
    with pytest.raises(error, match=message):
        apply(model, counts=COUNTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counts": COUNTS[:-1]}, "`counts` must have length 200, got 199"),
        ({"sampler": Exhaustive(CLASSES + 1)}, "`sampler` must draw from 200 classes, got 201"),
        ({"counts": COUNTS, "k": 0}, "`k` must be at least 1, got 0"),
        ({"counts": COUNTS, "update": "all"}, "`update` must be one of"),
        ({"objective": NoiseContrastive(learn=True)}, "`objective` must have no parameters"),
    ],
)
def test_invalid_options_are_refused(options, message):
    model = gpt2()
    with pytest.raises(ValueError, match=message):
        apply(model, **options)
    assert "_manyclass" not in model.__dict__


def test_a_sparse_embedding_that_is_tied_needs_sparse_gradients():
    model = gpt2()
    model.get_input_embeddings().sparse = True
    with pytest.raises(ValueError, match="`sparse` must be True for a weight tied to an embedding with sparse"):
        apply(model, counts=COUNTS)


def test_apply_and_remove_come_in_turn():
    model = gpt2()
    with pytest.raises(ValueError, match="`model` must have been given to `apply`, got a GPT2LMHeadModel"):
        remove(model)
    apply(model, counts=COUNTS, k=16)
    with pytest.raises(ValueError, match="must not be given to `apply` twice"):
        apply(model, counts=COUNTS, k=16)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_vocabulary_that_was_resized_is_noticed(name):
    model = MODELS[name]().train()
    apply(model, counts=COUNTS, k=16)
    model.resize_token_embeddings(CLASSES + 8)
    ids, labels = batch()
    with pytest.raises(RuntimeError, match="the output layer of a model must stay as it was"):
        model(ids, labels=labels)
    remove(model)
    apply(model, counts=torch.ones(CLASSES + 8), k=16)
    model(ids, labels=labels).loss.backward()


def test_an_auxiliary_loss_is_not_left_out_silently():
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2)).train()
    apply(model, counts=COUNTS, k=16)
    ids, labels = batch()
    model(ids, labels=labels).loss.backward()
    with pytest.raises(ValueError, match="must have no auxiliary loss"):
        model(ids, labels=labels, output_router_logits=True)


def test_a_pickle_is_refused():
    model = gpt2()
    apply(model, counts=COUNTS, k=16)
    with pytest.raises(TypeError, match="cannot be pickled: use `save_pretrained`"):
        torch.save(model, io.BytesIO())
    remove(model)
    torch.save(model, io.BytesIO())


def test_an_error_in_a_forward_pass_leaves_the_output_layer_whole():
    model = gpt2().train()
    apply(model, counts=COUNTS, k=16)
    ids, labels = batch()
    with pytest.raises(ValueError, match="`target` must lie in"):
        model(ids, labels=labels + CLASSES)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.zeros(1, 100, dtype=torch.int64), labels=torch.zeros(1, 100, dtype=torch.int64))
    assert model(ids).logits.shape == (*ids.shape, CLASSES)


def test_counts_of_a_stream_are_taken():
    model = gpt2()
    counts = ClassCounts.streaming(CLASSES)
    counts.update(torch.arange(CLASSES))
    head = apply(model, counts=counts, k=16)
    assert head.counts == (counts,)
