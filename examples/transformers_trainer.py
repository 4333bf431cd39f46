"""A GPT-2-shaped model on the source of Python's standard library, through Trainer, with a sampled softmax.

    python examples/transformers_trainer.py

Nothing is downloaded: the text is the source of the standard library, the byte-pair tokenizer is made from
it, and the model is a small one with new weights. Two lines differ from a training without manyclass: `apply`, and the
optimiser for rows. A step scores about a thousand tokens of the vocabulary; the held-out loss shown is exact.
"""

import argparse
import sysconfig
import tempfile
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from manyclass import ClassCounts
from manyclass.integrations.transformers import SamplerCheckpoint, apply
from manyclass.optim import RowAdagrad, for_model

LENGTH = 64
HELD_OUT_ONE_IN = 20  # files


def texts(number: int | None) -> list[str]:
    """Return the source files of the standard library, without its folders."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in files[:number]]


def byte_pairs(text: list[str], vocabulary: int) -> Tokenizer:
    """Return a byte-pair tokenizer made from the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def blocks(tokenizer: Tokenizer, text: list[str]) -> Tensor:
    """Return the tokens of the text as rows [N, 64], an end after each file."""
    ids = torch.tensor([i for part in tokenizer.encode_batch(text) for i in (*part.ids, 0)])
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)


def main() -> None:
    """Train, evaluate, save and complete a few prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=None, help="source files to read (default: all)")
    parser.add_argument("--vocabulary", type=int, default=30_000, help="tokens of the vocabulary")
    parser.add_argument("--steps", type=int, default=1000, help="steps to train")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)

    source = texts(arguments.files)
    tokenizer = byte_pairs(source, arguments.vocabulary)
    held_out = blocks(tokenizer, source[::HELD_OUT_ONE_IN])
    train = blocks(tokenizer, [text for i, text in enumerate(source) if i % HELD_OUT_ONE_IN])
    num_classes = tokenizer.get_vocab_size()
    counts = ClassCounts.from_targets(train, num_classes)
    unigram = -counts.frequency().log()[held_out].mean().item()
    print(f"{train.numel():,} tokens to train on, {num_classes:,} classes")
    print(f"held-out loss of frequencies alone {unigram:.4f}")

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=num_classes, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    head = apply(model, counts=counts, sparse=True)
    optimizer = for_model(model, rows=partial(RowAdagrad, lr=0.1), rest=partial(torch.optim.AdamW, lr=1e-3))

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=16,
                logging_steps=max(1, arguments.steps // 10),
                save_steps=max(1, arguments.steps // 2),
                report_to="none",
                disable_tqdm=True,
                seed=arguments.seed,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in train],
            eval_dataset=[{"input_ids": row, "labels": row} for row in held_out],
            optimizers=(optimizer, None),
            callbacks=[SamplerCheckpoint()],
        )
        trainer.train()
        print(f"held-out loss {trainer.evaluate()['eval_loss']:.4f}")
        for decision in getattr(head.sampler, "decisions", []):
            print(decision)

        # What is saved is a plain model.
        trainer.save_model(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder)
    for prompt in ("import os\n\ndef ", "    for i in range(", "        raise ValueError("):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        found = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
        print(f"  {prompt!r}: {tokenizer.decode(found[0, ids.shape[1] :].tolist())!r}")


if __name__ == "__main__":
    main()
