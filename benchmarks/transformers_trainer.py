"""A GPT-2-shaped model of 50,257 classes on WikiText-2 through Trainer of Transformers, with `apply` and without.

    python -m benchmarks.transformers_trainer                    # into benchmarks/results/transformers_trainer.csv
    python -m benchmarks.transformers_trainer --contenders plain default "k = 1024" --steps 900
    python -m benchmarks.transformers_trainer --device cuda --batch 8 --steps 6000 --held-out 1024

All trainings start from the same weights and see the same batches in the same order. Each runs in a separate process,
and they take turns of a few steps, so that changes of the machine's speed affect all alike. The time of a step is from
Trainer's `on_step_begin` to `on_step_end`: forward, backward, clipping, AdamW and the schedule. The held-out loss is
Trainer's, of the plain model. `peak_gib` is the largest memory until the last step: on the CPU that of the process,
which held `start_gib` before the first step, and on a GPU that of torch's tensors. `generates_equally` says that the
saved weights, in a plain model, generate the same tokens. Rows of other sizes and devices stay in the CSV file.
"""

import argparse
import csv
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.counts import DATA
from benchmarks.machine import peak_gib, provenance, quantiles, write_csv

RESULTS = Path(__file__).resolve().parent / "results" / "transformers_trainer.csv"
CLASSES = 50_257
END = "<|endoftext|>"
SETTINGS = ("layers", "dim", "batch", "length", "steps", "bf16", "seed")
# Options of `apply`, or None for a plain model, and whether the rows of classes have a separate optimiser.
CONTENDERS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "plain": (None, False),
    "default": ({}, False),
    "k = 1024": ({"k": 1024}, False),
    "plain, RowAdagrad": (None, True),
    "default, RowAdagrad": ({"sparse": True}, True),
    "k = 1024, RowAdagrad": ({"k": 1024, "sparse": True}, True),
}
PROMPTS = 4
PROMPT_TOKENS = 16
Row = dict[str, Any]


def encoded(folder: Path) -> tuple[list[Tensor], int]:
    """Return the tokens of the training text and of the validation text, and the size of a vocabulary made for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    def lines(part: str) -> list[str]:
        with lzma.open(folder / f"{part}.txt.xz", "rt", encoding="utf-8") as file:
            return file.read().splitlines()

    train = lines("train")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        train,
        trainers.BpeTrainer(vocab_size=CLASSES, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )
    end = tokenizer.token_to_id(END)
    parts = [
        torch.tensor([i for line in tokenizer.encode_batch(part) for i in (*line.ids, end)])
        for part in (train, lines("valid"))
    ]
    return parts, tokenizer.get_vocab_size()


def blocks(tokens: Tensor, length: int) -> Tensor:
    """Return the tokens as rows of this length, without the rest."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def train(name: str, arguments: argparse.Namespace, folder: Path) -> None:
    """Run the training of a contender, in turns that the parent asks for, and print its result as JSON."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Imported here: the parent starts several processes and needs neither.
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    from manyclass import ClassCounts
    from manyclass.integrations.transformers import apply
    from manyclass.optim import Chained, RowAdagrad

    on_gpu = arguments.device != "cpu"
    tokens = torch.load(folder / "tokens.pt")
    examples, held_out = (blocks(part, arguments.length) for part in tokens)
    held_out = held_out[: arguments.held_out]
    set_seed(arguments.seed)
    config = GPT2Config(
        vocab_size=CLASSES,
        n_positions=arguments.length,
        n_embd=arguments.dim,
        n_layer=arguments.layers,
        n_head=max(1, arguments.dim // 64),
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).to(arguments.device)
    options, rows_apart = CONTENDERS[name]
    head = None
    if options is not None:
        head = apply(model, counts=ClassCounts.from_targets(examples, CLASSES), **options)
    optimizer = None
    if rows_apart:
        table = model.get_output_embeddings().weight
        others = [parameter for parameter in model.parameters() if parameter is not table]
        optimizer = Chained(
            RowAdagrad([table], arguments.row_learning_rate),
            torch.optim.AdamW(others, arguments.learning_rate, weight_decay=0.0),
        )
    seconds: list[float] = []
    memory: dict[str, float] = {}

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak() -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if on_gpu else peak_gib()

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step % arguments.turn == 0:
                memory.setdefault("start_gib", peak())
                print(json.dumps({"step": state.global_step}), file=replies, flush=True)
                if not sys.stdin.readline():
                    sys.exit("the benchmark has ended")
            self.begin = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            seconds.append(now() - self.begin)
            memory["peak_gib"] = peak()

    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            model,
            TrainingArguments(
                out,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch,
                per_device_eval_batch_size=arguments.batch,
                learning_rate=arguments.learning_rate,
                warmup_steps=arguments.steps // 10,
                bf16=arguments.bf16,
                prediction_loss_only=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=arguments.seed,
                use_cpu=not on_gpu,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in examples],
            eval_dataset=[{"input_ids": row, "labels": row} for row in held_out],
            optimizers=(optimizer, None),
            callbacks=[Turns()],
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        model.save_pretrained(out)
        plain = GPT2LMHeadModel.from_pretrained(out).to(arguments.device)
    prompts = held_out[:PROMPTS, :PROMPT_TOKENS].to(arguments.device)
    generated = [
        m.eval().generate(prompts, attention_mask=torch.ones_like(prompts), max_length=32, do_sample=False)
        for m in (model, plain)
    ]
    low, median, high = quantiles([1000 * s for s in seconds[arguments.turn :]])
    result = {
        "held_out_loss": round(loss, 4),
        "step_ms": round(median, 1),
        "step_ms_p20": round(low, 1),
        "step_ms_p80": round(high, 1),
        "total_s": round(sum(seconds), 1),
        **{key: round(value, 3) for key, value in memory.items()},
        "generates_equally": torch.equal(*generated),
        "decisions": "" if head is None else " | ".join(getattr(head.sampler, "decisions", [])),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }
    print(json.dumps({"result": result}), file=replies, flush=True)


def take_turns(names: Sequence[str], command: Sequence[str]) -> dict[str, Row]:
    """Start a process for each contender, let each train for a turn after the other, and return their results."""
    processes = {
        name: subprocess.Popen(
            [*command, "--contender", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in names
    }
    results: dict[str, Row] = {}
    waiting = dict.fromkeys(processes, False)
    while processes:
        for name, process in list(processes.items()):
            assert process.stdin is not None
            assert process.stdout is not None
            if waiting[name]:
                process.stdin.write("go\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{name} ended with {process.wait()}")
            reply = json.loads(line)
            waiting[name] = True
            if "result" in reply:
                results[name] = reply["result"]
                process.stdin.close()
                process.stdout.close()
                process.wait()
                del processes[name]
    return results


def others(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a CSV file that are of another contender, size, seed or device than the new ones."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        old = list(csv.DictReader(file))

    def setting(row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in ("contender", *SETTINGS, "device"))

    new = {setting(row) for row in rows}
    return [row for row in old if setting(row) not in new]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, help="of these alone")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--dim", type=int, default=128, help="width of the model")
    parser.add_argument("--length", type=int, default=128, help="tokens of an example")
    parser.add_argument("--batch", type=int, default=2, help="examples of a step")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training")
    parser.add_argument("--turn", type=int, default=10, help="steps of a turn")
    parser.add_argument("--held-out", type=int, default=128, help="examples of the held-out loss")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--row-learning-rate", type=float, default=0.1, help="learning rate of RowAdagrad")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument("--data", type=Path, default=DATA / "wikitext-2", help="folder with train.txt.xz, valid.txt.xz")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender is not None:
        train(arguments.contender, arguments, arguments.folder)
        return
    if not arguments.data.exists():
        parser.exit(2, f"transformers_trainer: there is no {arguments.data}; set MANYCLASS_DATA or give --data\n")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.exit(2, "transformers_trainer: there is no GPU; --device cpu runs on the processor\n")
    with tempfile.TemporaryDirectory() as folder:
        tokens, vocabulary = encoded(arguments.data)
        torch.save(tokens, Path(folder) / "tokens.pt")
        command = [sys.executable, "-m", "benchmarks.transformers_trainer", *sys.argv[1:], "--folder", folder]
        results = take_turns(arguments.contenders, command)
    about = {**{name: getattr(arguments, name) for name in SETTINGS}, "classes": CLASSES, "vocabulary": vocabulary}
    rows = [{"contender": name, **about, **result, **provenance()} for name, result in results.items()]
    for row in rows:
        print(
            f"{row['contender']:22} held-out loss {row['held_out_loss']:.4f}, {row['step_ms']:,.0f} ms a step, "
            f"{row['peak_gib']:.2f} GiB at most"
        )
    kept = others(arguments.out, rows)
    write_csv(arguments.out, [*kept, *rows])
    print(f"{len(kept) + len(rows)} rows are in {arguments.out}")


if __name__ == "__main__":
    main()
