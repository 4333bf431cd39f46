"""Search by meaning in Python's standard library: sentence embeddings trained with corrected in-batch negatives.

    python examples/sentence_pairs.py

The text is on every machine: the docstrings of the standard library. A pair is the docstring of a function and the
description of its module. Large modules are the positive of many pairs, so they are among the negatives of nearly every
batch; the loss corrects for that. The model is the mean of word vectors. It needs the extra sentence-transformers:
`pip install 'manyclass[sentence-transformers]'`.
"""

import argparse
import ast
import sysconfig
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer

from manyclass.integrations.sentence_transformers import InBatchLoss, number_positives

DIM, TOP = 64, 10
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo"}
QUERIES = ("a random integer between two numbers", "parse a date", "wait until a thread ends", "compress a file")


def docstrings(files: int | None) -> Dataset:
    """Return the docstrings of functions as anchors, and the descriptions of their modules as positives."""
    library = Path(sysconfig.get_paths()["stdlib"])
    anchors, positives = [], []
    paths = [path for path in sorted(library.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(library).parts)]
    for path in paths[:files]:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        name = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        description = f"{name}: {(ast.get_docstring(tree) or '').partition(chr(10))[0]}"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                anchors.append(text.partition("\n\n")[0])
                positives.append(description)
    return Dataset.from_dict({"anchor": anchors, "positive": positives})


def new_model(texts: list[str]) -> SentenceTransformer:
    """Return a model that is the mean of vectors of the words in some texts."""
    tokenizer = Tokenizer(WordLevel(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), Whitespace()
    tokenizer.train_from_iterator(
        texts, WordLevelTrainer(special_tokens=["<unk>"], min_frequency=2, show_progress=False)
    )
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=DIM)], device="cpu")


def nearest(model: SentenceTransformer, queries: list[str], modules: list[str]) -> torch.Tensor:
    """Return the places [N, 10] of the modules nearest to each query."""
    return model.similarity(model.encode(queries), model.encode(modules)).topk(TOP).indices


def recall(model: SentenceTransformer, held_out: Dataset, modules: list[str]) -> float:
    """Return the share of held-out docstrings with the right module among the nearest ten."""
    target = torch.tensor([modules.index(text) for text in held_out["positive"][:]])
    found = nearest(model, held_out["anchor"][:], modules)
    return float((found == target.unsqueeze(1)).any(1).float().mean())


def main() -> None:
    """Train a model, measure it and search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps to train")
    parser.add_argument("--files", type=int, help="source files to read (default: all)")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    split = docstrings(arguments.files).train_test_split(0.1, seed=0)
    train, held_out, counts = number_positives(split["train"], split["test"])
    modules = sorted({*train["positive"][:], *held_out["positive"][:]})
    print(f"{len(train):,} docstrings of {len(modules):,} modules, {int(counts.raw.max())} of one")

    model = new_model([*train["anchor"][:], *modules])
    before = recall(model, held_out, modules)
    with tempfile.TemporaryDirectory() as folder:
        SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(
                folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=128,
                learning_rate=0.05,
                use_cpu=True,
                save_strategy="no",
                logging_steps=max(1, arguments.steps // 5),
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=train,
            # A transformer takes larger batches with gradient caching: InBatchLoss(model, counts, mini_batch_size=32).
            loss=InBatchLoss(model, counts),
        ).train()
    after = recall(model, held_out, modules)
    print(f"recall@{TOP} of held-out docstrings {before:.3f} before training, {after:.3f} after\n")

    for query, found in zip(QUERIES, nearest(model, list(QUERIES), modules).tolist(), strict=True):
        print(f"  {query:40}" + ", ".join(modules[place].partition(":")[0] for place in found[:4]))


if __name__ == "__main__":
    main()
