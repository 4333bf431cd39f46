"""A sampled softmax for the language models of Hugging Face Transformers.

    head = apply(model, counts=counts)
    Trainer(model, args, train_dataset=train, callbacks=[SamplerCheckpoint()]).train()

`counts` are the counts of the vocabulary in the training set. In training, the output layer passes hidden states to a
`ClassHead` that shares its parameters, and the loss scores only a draw of the vocabulary. In evaluation, and in
`generate`, the model is as before. What is saved is the model alone: `from_pretrained` returns a plain one.
"""

import math
from pathlib import Path
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from manyclass import storage
from manyclass.counts import ClassCounts
from manyclass.heads import ClassHead
from manyclass.integrations._output_layer import output_layer, shifts_labels, tables_of
from manyclass.integrations._sampled_forward import ATTRIBUTE, install, sampled_of, uninstall
from manyclass.objectives import Objective
from manyclass.samplers import Sampler

SAMPLER_FILE, CONTENT_TYPE = "sampler.safetensors", "sampler"
NORM_TOLERANCE = 1e-9  # of a sum in another order


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
    nothing is sampled. Without a bias, a model with new weights learns late that rare classes are rare: their rows move
    only when they are drawn. So the first thousands of steps are behind those of exact training.

    Args:
        model: the model, changed in place.
        counts: the count of each class in the training set; as many as the model has logits, which are often more than
            the tokenizer has tokens.
        sampler: chooses the classes that a step scores. Default: `Automatic`, which decides in training.
        k: draw this number of classes with `Learned` instead.
        rmse_log_z: the error of log Z̃ that the default sampler keeps below.
        objective: the training objective, without parameters. Default: `Likelihood`.
        update: the rows that learn: "scored" or "observed", as in `ClassHead`.
        sparse: whether the gradients of the output layer are row-sparse, for row optimisers such as those of
            `optim.for_model(model)`. If its weight is tied to the input embedding, that gets sparse gradients too.
        impl: the implementation of the loss, as in `ClassHead`.

    Returns:
        The head; `head.sampler` and `head.probe` show how training goes.

    Raises:
        TypeError: `model` is no model of Transformers.
        ValueError: the model is an encoder-decoder, has no output layer, changes its scores (soft-capping, scaling), or
            has another loss than the cross entropy; it was given to `apply` before; or an option is invalid.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=5000, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
        >>> model = GPT2LMHeadModel(config)
        >>> ids = torch.randint(5000, (2, 16))
        >>> head = apply(model, counts=ClassCounts.from_targets(ids, 5000), k=64)
        >>> output = model.train()(ids, labels=ids)
        >>> output.loss.backward()
        >>> output.logits is None, model(ids).logits.shape
        (True, torch.Size([2, 16, 5000]))
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"`model` must be a PreTrainedModel of Transformers, got a {type(model).__name__}")
    if ATTRIBUTE in model.__dict__:
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
    install(model, head, layer, embedding, shifts=shifts)
    return head


def remove(model: PreTrainedModel) -> None:
    """Undo `apply`: the model is a plain one again, with its present weights.

    Raises:
        ValueError: the model was not given to `apply`, or another library has replaced its forward pass since then, as
            accelerate does for mixed precision: see `Accelerator.unwrap_model(model, keep_fp32_wrapper=False)`.
    """
    embedding = uninstall(model).embedding
    if embedding is not None:
        embedding.sparse = False


class SamplerCheckpoint(TrainerCallback):  # type: ignore[misc]
    """A callback that saves the state of the sampler beside each checkpoint of Trainer, and loads it on resuming.

    Without it, a resumed training starts with a new sampler: it is correct, but does not know what the one before has
    learned. With it, a training on the CPU continues bit for bit.

    On several processes it also adds the rank to the seed when a training begins, so that each draws other classes:
    Trainer seeds all of them alike.

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
            content = {
                "step": state.global_step,
                "norm": _norm(head),
                "sampler": _state(head),
                "probe": head.own_probe.state(),
            }
            storage.save(_file(args.output_dir, state), content, content_type=CONTENT_TYPE)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Load the state of the sampler if the training is resumed, or else seed this process.

        Raises:
            UserError: the checkpoint has no such state.
            ValueError: the state is that of another step or of another training, or Trainer uses DataParallel, whose
                copies of a model share one head.
            RuntimeError: the state is that of another sampler.
        """
        if args.n_gpu > 1:
            raise ValueError(f"`n_gpu` must be 1, got {args.n_gpu}: start a process for each GPU with torchrun")
        head = _head_in(model)
        if state.global_step == 0:
            if args.world_size > 1:
                _seed(args.seed, args.process_index)
            return
        path = _file(args.output_dir, state) if self.folder is None else Path(self.folder) / SAMPLER_FILE
        content = storage.load(path, content_type=CONTENT_TYPE)
        if content["step"] != state.global_step:
            raise ValueError(f"`folder` must be a checkpoint of step {state.global_step}, got one of {content['step']}")
        # With these, weights are loaded later.
        are_loaded = not args.fsdp and not args.deepspeed
        if are_loaded and not math.isclose(content["norm"], norm := _norm(head), rel_tol=NORM_TOLERANCE):
            raise ValueError(
                f"`folder` must be the checkpoint that the training resumes from, got {path}, whose class vectors have "
                f"a squared norm of {content['norm']:.10g}, while those of the model have {norm:.10g}"
            )
        if isinstance(head.sampler, nn.Module):
            head.sampler.load_state_dict(content["sampler"])
        head.own_probe.load_state(content["probe"])


def _tied_embedding(model: PreTrainedModel, layer: nn.Module) -> nn.Embedding | None:
    embedding = model.get_input_embeddings()
    return embedding if isinstance(embedding, nn.Embedding) and embedding.weight is layer.weight else None


def _head_in(model: nn.Module) -> ClassHead:
    """Return the head of a model, or of one that it wraps."""
    found = next((part for part in model.modules() if ATTRIBUTE in part.__dict__), model)
    return sampled_of(found).head


def _norm(head: ClassHead) -> float:
    """Return the squared norm of the class vectors."""
    return float(head.weight.detach().double().square().sum())


def _seed(seed: int, rank: int) -> None:
    """Seed this process differently from the others."""
    seed = int(SeedSequence([seed, rank]).generate_state(1, "uint64")[0])
    rng_state = torch.Generator().manual_seed(seed).get_state()
    # The first 8 bytes are the initial seed, from which accelerate takes an order of the data for all processes.
    rng_state[:8] = torch.get_rng_state()[:8]
    torch.set_rng_state(rng_state)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def _state(head: ClassHead) -> dict[str, Tensor]:
    return head.sampler.state_dict() if isinstance(head.sampler, nn.Module) else {}


def _file(output_dir: str, state: Any) -> Path:
    return Path(output_dir) / f"checkpoint-{state.global_step}" / SAMPLER_FILE
