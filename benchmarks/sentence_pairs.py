"""Sentence embeddings trained with in-batch negatives, with and without the correction for their frequency.

    python -m benchmarks.sentence_pairs                                  # into benchmarks/results/sentence_pairs.csv
    python -m benchmarks.sentence_pairs --pairs headings --seeds 1 --steps 200
    python -m benchmarks.sentence_pairs --plot                           # the plot alone, from the CSV file

Pairs are made from WikiText-2; its test part, other articles, is held out:

- headings: a sentence and the heading of its section. A few headings, such as History, head many sections.
- words: a sentence without one of its words, and that word. Frequencies follow Zipf's law.
- next: a sentence and the next one. No positive occurs twice, so the correction is the same factor for all.

The model is the mean of word vectors (StaticEmbedding), trained by SentenceTransformerTrainer with one of these losses:

- corrected: InBatchLoss.
- uncorrected: InBatchLoss(objective=SubsetSoftmax()), the same without κ; on the pairs of "next" it equals
  MultipleNegativesRankingLoss.
- none: no model, the frequencies alone.

A row of results has recall@10 among all classes, and the mean of -log p(positive) over all of them, for the positives
in one band of frequency in the training pairs. The uncorrected model has a second row, where log f is added to the
scores in retrieval instead. All trainings have the same learning rate, which was not tuned for either loss.
"""

import argparse
import csv
import functools
import itertools
import lzma
import random
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from benchmarks.counts import DATA
from benchmarks.machine import provenance, write_csv
from manyclass import ClassCounts
from manyclass.integrations.sentence_transformers import InBatchLoss, number_positives
from manyclass.objectives import Likelihood, SubsetSoftmax

RESULTS = Path(__file__).parent / "results" / "sentence_pairs.csv"
STEPS, BATCH_SIZE, DIM, SCALE = 2000, 64, 64, 20.0
LEARNING_RATE = 0.03
LEAST_WORDS, MOST_WORDS = 6, 32  # of a sentence: shorter ones are left out, longer ones cut
WORDS_PER_SENTENCE = 4  # left out, one at a time
HELD_OUT_PAIRS = 5000
TOP = 10
HEADING = re.compile(r"\s*((?:= )+)(.+?)(?: =)+\s*")
BANDS = {"unseen": 0, "1-9": 1, "10-99": 10, "100-999": 100, "1000+": 1000}  # least count in the training pairs
QUANTITIES = {"recall_at_10": "recall@10", "nll": "- log p(positive)"}
BAR_WIDTH = 0.2
LEAST_SHARE = 0.01  # of the held-out positives, for a band to be in the plot
# Loss, whether log f is added in retrieval, label, and colour of Okabe and Ito.
STYLES = (
    ("corrected", "0", "corrected", "#D55E00"),
    ("uncorrected", "0", "uncorrected", "#0072B2"),
    ("uncorrected", "1", "uncorrected, log f added in retrieval", "#56B4E9"),
    ("none", "1", "frequencies alone", "#999999"),
)
Pair = tuple[str, str]
Row = dict[str, Any]


def paragraphs(part: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield the paragraphs of a part of WikiText-2: the heading of the section, if it has one, and the sentences."""
    heading = None
    with lzma.open(DATA / "wikitext-2" / f"{part}.txt.xz", "rt", encoding="utf-8") as file:
        for line in file:
            if found := HEADING.fullmatch(line):
                # A single mark is that of an article's title.
                heading = found[2] if len(found[1]) > 2 else None
            elif line.strip():
                sentences = [sentence.split() for sentence in re.split(r"(?<= [.?!]) ", line)]
                yield heading, [" ".join(tokens[:MOST_WORDS]) for tokens in sentences if len(tokens) >= LEAST_WORDS]


def headings(part: str) -> list[Pair]:
    """Return sentences and the headings of their sections, without headings that hold unknown words."""
    return [
        (sentence, heading)
        for heading, sentences in paragraphs(part)
        if heading and "<unk>" not in heading
        for sentence in sentences
    ]


def words(part: str) -> list[Pair]:
    """Return sentences without one of their words, and that word."""
    choose = random.Random(0)
    pairs = []
    for tokens in (sentence.split() for _, sentences in paragraphs(part) for sentence in sentences):
        for place in choose.sample(range(len(tokens)), min(len(tokens), WORDS_PER_SENTENCE)):
            if tokens[place].isalpha():
                pairs.append((" ".join(tokens[:place] + tokens[place + 1 :]), tokens[place]))
    return pairs


def neighbours(part: str) -> list[Pair]:
    """Return sentences and the next ones, each of them once."""
    pairs = [pair for _, sentences in paragraphs(part) for pair in itertools.pairwise(sentences)]
    return list({positive: (anchor, positive) for anchor, positive in pairs}.values())


PAIRS: dict[str, Callable[[str], list[Pair]]] = {"headings": headings, "words": words, "next": neighbours}
LOSSES = {"corrected": Likelihood(), "uncorrected": SubsetSoftmax(), "none": None}
LOG_F_ADDED = {"corrected": (False,), "uncorrected": (False, True), "none": (True,)}  # in retrieval


@functools.cache
def numbered(kind: str) -> tuple[Dataset, Dataset, ClassCounts]:
    """Return the training pairs, the held-out pairs, and the counts of the positives."""
    train, held_out = (
        Dataset.from_dict({"anchor": [anchor for anchor, _ in pairs], "positive": [text for _, text in pairs]})
        for pairs in (PAIRS[kind]("train"), PAIRS[kind]("test"))
    )
    held_out = held_out.shuffle(seed=0).select(range(min(HELD_OUT_PAIRS, len(held_out))))
    return number_positives(train, held_out)


def new_model(train: Dataset) -> SentenceTransformer:
    """Return a model whose words are those of the training pairs."""
    seen = Counter(word for column in ("anchor", "positive") for text in train[column][:] for word in text.split())
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(sorted(seen))}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=DIM)], device="cpu")


def train_model(
    loss: str, train: Dataset, counts: ClassCounts, *, seed: int, steps: int
) -> tuple[SentenceTransformer, float]:
    """Train a model; return it and the seconds."""
    torch.manual_seed(seed)
    model = new_model(train)
    with tempfile.TemporaryDirectory() as folder:
        options = SentenceTransformerTrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            seed=seed,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(
            model, options, train_dataset=train, loss=InBatchLoss(model, counts, scale=SCALE, objective=LOSSES[loss])
        )
        start = time.perf_counter()
        trainer.train()
    return model.eval(), time.perf_counter() - start


def score(queries: Tensor, table: Tensor, target: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each target among all classes, from 0, and -log p of it.

    Args:
        queries: [N, D], of length 1.
        table: [C, D], of length 1.
        target: places [N] in the table.
        log_weight: [C], added to the scores.
    """
    ranks, losses = [], []
    for rows in torch.arange(len(target)).split(512):
        scores = SCALE * queries[rows] @ table.T + log_weight
        own = scores.gather(1, target[rows].unsqueeze(1))
        ranks.append((scores > own).sum(1))
        losses.append(scores.logsumexp(1) - own.squeeze(1))
    return torch.cat(ranks), torch.cat(losses)


def band(count: int) -> str:
    """Return the band of a positive with a count in the training pairs."""
    return next(name for name, least in reversed(BANDS.items()) if count >= least)


def rows_of(kind: str, loss: str, *, seed: int, steps: int) -> Iterator[Row]:
    """Train and yield a row for each band, without log f in retrieval and with it, as far as the loss calls for it."""
    train, held_out, counts = numbered(kind)
    # Positives that occur once are a class each, so only those held out are ranked.
    ranked = held_out if kind == "next" else concatenate_datasets([train, held_out])
    classes = dict(zip(ranked["label"][:], ranked["positive"][:], strict=True))
    place = {label: i for i, label in enumerate(classes)}
    target = torch.tensor([place[label] for label in held_out["label"][:]])
    log_f = counts.frequency().log().float()[list(classes)]
    seen = Counter(train["label"][:])
    bands = [band(seen[label]) for label in held_out["label"][:]]

    queries, table, seconds = torch.zeros(len(target), 1), torch.zeros(len(classes), 1), 0.0
    if loss != "none":
        model, seconds = train_model(loss, train, counts, seed=seed, steps=steps)
        queries, table = (
            model.encode(
                texts, batch_size=1024, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
            )
            for texts in (held_out["anchor"][:], list(classes.values()))
        )
    # If all positives are equally frequent, log f is a constant.
    for added in LOG_F_ADDED[loss][: 1 if kind == "next" else None]:
        ranks, losses = score(queries, table, target, log_f if added else torch.zeros(len(classes)))
        for name in ("all", *BANDS):
            chosen = torch.tensor([name in ("all", other) for other in bands])
            if not chosen.any():
                continue
            yield {
                "pairs": kind,
                "loss": loss,
                "log_f_added": int(added),
                "seed": seed,
                "positives": name,
                "examples": int(chosen.sum()),
                "recall_at_10": round(float((ranks[chosen] < TOP).float().mean()), 4),
                "nll": round(float(losses[chosen].mean()), 4),
                "classes": len(classes),
                "train_pairs": len(train),
                "steps": steps,
                "batch_size": BATCH_SIZE,
                "learning_rate": LEARNING_RATE,
                "ms_per_step": round(1000 * seconds / steps, 1),
                **provenance(),
            }


def plot(path: Path) -> None:
    """Draw recall@10 and -log p by the frequency of the positive: means over the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "manyclass", "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot

    found = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["positives"] == "all":
                total = int(row["examples"])
            if int(row["examples"]) < LEAST_SHARE * total:
                continue
            for quantity in QUANTITIES:
                key = (row["pairs"], row["positives"], row["loss"], row["log_f_added"], quantity)
                found[key].append(float(row[quantity]))
    kinds = list(dict.fromkeys(key[0] for key in found))
    bands = {kind: [name for name in ("all", *BANDS) if (kind, name) in {key[:2] for key in found}] for kind in kinds}
    figure, panels = pyplot.subplots(
        len(QUANTITIES),
        len(kinds),
        figsize=(12, 6),
        squeeze=False,
        width_ratios=[1 + len(bands[kind]) for kind in kinds],
    )
    for (line, quantity), (column, kind) in itertools.product(enumerate(QUANTITIES), enumerate(kinds)):
        axes = panels[line][column]
        for place, (loss, added, label, colour) in enumerate(STYLES):
            for at, name in enumerate(bands[kind]):
                if seeds := found[kind, name, loss, added, quantity]:
                    mean = statistics.fmean(seeds)
                    spread = [[mean - min(seeds)], [max(seeds) - mean]]
                    middle = at + (place - 1.5) * BAR_WIDTH
                    axes.bar(middle, mean, BAR_WIDTH, yerr=spread, color=colour, label=label, ecolor="#555555")
        axes.set_xticks(range(len(bands[kind])), bands[kind], fontsize=9)
        axes.set_ylabel(QUANTITIES[quantity] if column == 0 else "")
        axes.set_title(kind if line == 0 else "", loc="left")
    panels[-1][0].set_xlabel("occurrences of the positive in the training pairs", loc="left")
    labelled = dict(zip(*reversed(panels[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(labelled.values(), labelled.keys(), ncols=len(STYLES), frameon=False, loc="lower right")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def run(kinds: list[str], losses: list[str], *, seeds: int, steps: int, path: Path | None) -> None:
    """Train and evaluate all models, print the results and write them to a CSV file."""
    disable_progress_bars()
    rows: list[Row] = []
    for kind, seed, loss in itertools.product(kinds, range(seeds), losses):
        if loss == "none" and (seed > 0 or kind == "next"):
            continue  # frequencies have no seed, and equal ones rank nothing
        found = list(rows_of(kind, loss, seed=seed, steps=steps))
        for row in found:
            print(
                f"{kind:9}{loss:12}{'+ log f' if row['log_f_added'] else '':8} seed {seed} {row['positives']:>8} "
                f"recall@10 {row['recall_at_10']:.4f}, -log p {row['nll']:.3f}, {row['ms_per_step']} ms a step",
                flush=True,
            )
        rows += found
        if path:
            write_csv(path, rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    parser.add_argument("--plot", action="store_true", help="draw the plot of the CSV file and train nothing")
    parser.add_argument("--out", type=Path, help="CSV file (default: results/sentence_pairs.csv, for a whole run)")
    arguments = parser.parse_args()
    whole = all(getattr(arguments, name) == parser.get_default(name) for name in ("pairs", "losses", "seeds", "steps"))
    path = arguments.out or (RESULTS if whole else None)
    if not arguments.plot:
        run(arguments.pairs, arguments.losses, seeds=arguments.seeds, steps=arguments.steps, path=path)
    if path:
        plot(path)


if __name__ == "__main__":
    main()
