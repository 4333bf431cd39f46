"""A sampled softmax for the language models of Hugging Face Transformers.

    head = apply(model, counts=counts)
    Trainer(model, args, train_dataset=train, callbacks=[SamplerCheckpoint()]).train()

`counts` are the counts of the vocabulary in the training set. In training, the output layer passes hidden states to a
`ClassHead` that shares its parameters, and the loss scores only a draw of the vocabulary. In evaluation, and in
`generate`, the model is as before. What is saved is the model alone: `from_pretrained` returns a plain one.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from manyclass import storage
from manyclass.counts import ClassCounts
from manyclass.defaults import IGNORE_INDEX
from manyclass.heads import ClassHead
from manyclass.integrations._output_layer import output_layer, run_without_scores, shifts_labels, tables_of
from manyclass.objectives import Objective
from manyclass.samplers import Sampler

SAMPLER_FILE, CONTENT_TYPE = "sampler.safetensors", "sampler"
# A plain attribute of the model, not a submodule, so that the head is not in its state dict.
_SAMPLED = "_manyclass"


def apply(
    model: PreTrainedModel,
    *,
    counts: ClassCounts | Tensor | None = None,
    sampler: Sampler | None = None,
    k: int | str | None = None,
    rmse_log_z: float | None = None,
    objective: Objective | None = None,
    update: str = "scored",
    sparse: bool = False,
    impl: str = "auto",
) -> ClassHead:
    """Let a causal or masked language model train with a loss that scores only a draw of its vocabulary.

    In training mode, with labels and gradients, `model(input_ids, labels=labels)` returns this loss, and no logits. All
    other calls, among them those of `generate` in any mode, return what they did before. The head shares weight and
    bias with the output layer, and has no bias if that has none. It is not a part of the model: `state_dict` and
    `save_pretrained` are unchanged.

    The loss is the mean over labels that are not ignored, or, as under Trainer, their sum divided by
    `num_items_in_batch`. `shift_labels` are taken in place of labels that the model would shift.

    A copy of the model is sampled too. Call `apply` again after `from_pretrained`, and `remove` before
    `resize_token_embeddings`. Label smoothing and `compute_loss_func` of Trainer take logits, so with these
    nothing is sampled.

    Args:
        model: the model, changed in place.
        counts: the count of each class in the training set; as many as the model has logits, which are often more than
            the tokenizer has tokens.
        sampler: as in `ClassHead`, like all options that follow.
        k: see there.
        rmse_log_z: see there.
        objective: see there. One without parameters, since the model would not save them.
        update: see there.
        sparse: whether the gradients of the output layer are row-sparse, for row optimisers such as
            `optim.for_model(model)`. If its weight is tied to the input embedding, the gradients of that become sparse
            too.
        impl: see `ClassHead`.

    Returns:
        The head; `head.sampler` and `head.probe` show how training goes.

    Raises:
        TypeError: `model` is no model of Transformers.
        ValueError: the model is an encoder-decoder, has no output layer, changes its scores (soft-capping, scaling), or
            has another loss than the cross entropy; it was given to `apply` before; or an option is invalid.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=5000, n_embd=8, n_layer=1, n_head=1))
        >>> ids = torch.randint(5000, (2, 16))
        >>> head = apply(model, counts=ClassCounts.from_targets(ids, 5000), k=64)
        >>> output = model.train()(ids, labels=ids)
        >>> output.loss.backward()
        >>> output.logits is None, model(ids).logits.shape
        (True, torch.Size([2, 16, 5000]))
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"`model` must be a PreTrainedModel of Transformers, got a {type(model).__name__}")
    if _SAMPLED in model.__dict__:
        raise ValueError("`model` must not be given to `apply` twice, got one that was: call `remove` first")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"`model` must be a causal or masked language model, got an encoder-decoder, {type(model).__name__}"
        )
    layer = output_layer(model)
    embedding = _tied_embedding(model, layer)
    if embedding is not None and embedding.sparse and not sparse:
        raise ValueError("`sparse` must be True for a weight tied to an embedding with sparse gradients, got False")
    weight, bias = tables_of(layer)
    num_classes, dim = weight.shape
    head = ClassHead(
        dim,
        num_classes,
        counts=counts,
        sampler=sampler,
        k=k,
        rmse_log_z=rmse_log_z,
        objective=objective,
        bias=bias is not None,
        update=update,
        sparse=sparse,
        impl=impl,
        weight=weight,
    )
    head.bias = bias
    if any(parameter is not weight and parameter is not bias for parameter in head.parameters()):
        raise ValueError(
            f"`objective` must have no parameters, which the model would neither train nor save, got {head.objective!r}"
        )
    head.use(head.sampler)
    shifts = shifts_labels(model, layer)
    if embedding is not None:
        embedding.sparse = sparse
    plain = model.forward
    model._manyclass = _Sampled(head, layer, plain, shifts, embedding, "forward" in model.__dict__)
    model.forward = MethodType(_sampling(plain), model)
    # `optim.for_model`, `parallel.prepare` and the checks under DistributedDataParallel find rows by these names.
    model.class_vectors, model.sparse_parameters = head.class_vectors, head.sparse_parameters
    return head


def remove(model: PreTrainedModel) -> None:
    """Undo `apply`: the model is a plain one again, with its present weights.

    Raises:
        ValueError: the model was not given to `apply`, or another library has replaced its forward pass since then, as
            accelerate does for mixed precision: see `Accelerator.unwrap_model(model, keep_fp32_wrapper=False)`.
    """
    sampled = _sampled_of(model)
    if not hasattr(model.forward, "_is_sampling"):
        raise ValueError("`model` must have the forward pass that `apply` gave it, got another one")
    if sampled.had_own_forward:
        model.forward = sampled.plain
    else:
        del model.forward
    if sampled.embedding is not None:
        sampled.embedding.sparse = False
    del model._manyclass, model.class_vectors, model.sparse_parameters


class SamplerCheckpoint(TrainerCallback):  # type: ignore[misc]
    """A callback that saves the state of the sampler beside each checkpoint of Trainer, and loads it on resuming.

    Without it, a resumed training starts with a new sampler: it is correct, but does not know what the one before has
    learned. With it, a training on the CPU continues bit for bit.

    Args:
        folder: the checkpoint to resume from. Default: the one in `output_dir` after as many steps.

    Example:
        >>> callbacks = [SamplerCheckpoint()]
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder

    def on_save(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Save the state of the sampler."""
        if args.should_save:
            head = _head_in(model)
            content = {"step": state.global_step, "sampler": _state(head), "probe": head.own_probe.state()}
            storage.save(_file(args.output_dir, state), content, content_type=CONTENT_TYPE)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Load the state of the sampler if the training is resumed.

        Raises:
            UserError: the checkpoint has no such state.
            ValueError: the state is that of another step, or of another sampler; or Trainer uses DataParallel, whose
                copies of a model cannot be sampled.
        """
        if args.n_gpu > 1:
            raise ValueError(f"`n_gpu` must be 1, got {args.n_gpu}: start a process for each GPU with torchrun")
        head = _head_in(model)
        if state.global_step == 0:
            return
        path = _file(args.output_dir, state) if self.folder is None else Path(self.folder) / SAMPLER_FILE
        content = storage.load(path, content_type=CONTENT_TYPE)
        if content["step"] != state.global_step:
            raise ValueError(f"`folder` must be a checkpoint of step {state.global_step}, got one of {content['step']}")
        if isinstance(head.sampler, nn.Module):
            head.sampler.load_state_dict(content["sampler"])
        head.own_probe.load_state(content["probe"])


@dataclass(frozen=True)
class _Sampled:
    """What `apply` keeps of a model.

    Args:
        head: shares the parameters of the output layer.
        layer: the output layer.
        plain: the forward pass before.
        shifts: whether the model predicts the label of the next position.
        embedding: the input embedding if it shares its weight with the output layer, else None.
        had_own_forward: whether the forward pass before was one of this model alone, not of its class.
    """

    head: ClassHead
    layer: nn.Module
    plain: Callable[..., Any]
    shifts: bool
    embedding: nn.Embedding | None
    had_own_forward: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Sampled":
        return _Sampled(*(copy.deepcopy(getattr(self, field.name), memo) for field in fields(self)))

    def __reduce__(self) -> Any:
        # A pickle would hold the model's forward pass by its name, which is that of the class.
        raise TypeError("a model given to `apply` cannot be pickled: use `save_pretrained`, or call `remove` before")

    def current_head(self, model: PreTrainedModel) -> ClassHead:
        """Return the head with the present parameters of the output layer, which torch replaces at times.

        Raises:
            RuntimeError: the output layer is another one, or has another number of classes.
        """
        weight, bias = tables_of(self.layer)
        if model.get_output_embeddings() is not self.layer or len(weight) != self.head.num_classes:
            raise RuntimeError(
                "the output layer of a model must stay as it was in `apply`, got another one: call `remove` before "
                "you resize or replace it, and then `apply` again"
            )
        if self.head.weight is not weight or self.head.bias is not bias:
            self.head.weight, self.head.bias = weight, bias
        return self.head


def _sampling(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that computes the head's loss in training."""
    signature = inspect.signature(plain)
    names = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        sampled = _sampled_of(self)
        if not self.training or not torch.is_grad_enabled():
            return sampled.plain(*args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if arguments.get("labels") is None:
            return sampled.plain(*args, **kwargs)
        return _training_output(self, sampled, arguments)

    # Trainer reads from it whether a model takes `num_items_in_batch`. Not by `__wrapped__`, which accelerate follows.
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    forward._is_sampling = True  # type: ignore[attr-defined]
    return forward


def _training_output(model: PreTrainedModel, sampled: _Sampled, arguments: dict[str, Any]) -> Any:
    """Return the model's output with the head's loss, without logits."""
    head = sampled.current_head(model)
    labels, shifted = arguments.pop("labels"), arguments.pop("shift_labels", None)
    number, ignored = arguments.pop("num_items_in_batch", None), arguments.pop("ignore_index", IGNORE_INDEX)
    as_tuple = not arguments.pop("return_dict", getattr(model.config, "return_dict", True))
    hidden, output = run_without_scores(sampled.plain, sampled.layer, arguments)
    if output.get("aux_loss") is not None:
        raise ValueError(
            "`model` must have no auxiliary loss, which would be left out: set `output_router_logits` False"
        )
    if sampled.shifts:
        labels = F.pad(labels, (0, 1), value=ignored)[..., 1:] if shifted is None else shifted
    reduction = "mean" if number is None else "sum"
    loss = head(hidden, labels.to(hidden.device), ignore_index=ignored, reduction=reduction)
    if number is not None:
        loss = loss / (number.to(loss.device) if isinstance(number, Tensor) else number)
    rest = {name: value for name, value in output.items() if name not in ("loss", "logits")}
    output = type(output)(loss=loss, **rest)
    return output.to_tuple() if as_tuple else output


def _tied_embedding(model: PreTrainedModel, layer: nn.Module) -> nn.Embedding | None:
    embedding = model.get_input_embeddings()
    return embedding if isinstance(embedding, nn.Embedding) and embedding.weight is layer.weight else None


def _sampled_of(model: nn.Module) -> _Sampled:
    sampled: _Sampled | None = model.__dict__.get(_SAMPLED)
    if sampled is None:
        raise ValueError(f"`model` must have been given to `apply`, got a {type(model).__name__} that was not")
    return sampled


def _head_in(model: nn.Module) -> ClassHead:
    """Return the head of a model, or of one that it wraps."""
    found = next((part for part in model.modules() if _SAMPLED in part.__dict__), model)
    return _sampled_of(found).head


def _state(head: ClassHead) -> dict[str, Tensor]:
    return head.sampler.state_dict() if isinstance(head.sampler, nn.Module) else {}


def _file(output_dir: str, state: Any) -> Path:
    return Path(output_dir) / f"checkpoint-{state.global_step}" / SAMPLER_FILE
