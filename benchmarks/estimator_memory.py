"""Memory beyond the data and time that the estimator takes to fit sparse rows with many features and many classes.

    python benchmarks/estimator_memory.py                    # 50,000 rows × 100,000 features, 10,000 classes
    python benchmarks/estimator_memory.py --rows 1e4 --epochs 3

Each row holds 60 words: a quarter are typical words of its class, the others follow Zipf's law. The data are made
before anything is measured. Memory is the peak of this process (VmHWM) minus its memory before the fit (VmRSS).
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from manyclass.estimator import ManyClassClassifier

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.machine import peak_gib, provenance, write_csv  # noqa: E402

RESULTS = ROOT / "results" / "estimator_memory.csv"
WORDS_PER_CLASS, CLASS_WORD_FRACTION = 20, 0.25  # typical words of a class, and their fraction of a row


def documents(rows: int, features: int, classes: int, length: int, seed: int) -> tuple[csr_array, np.ndarray]:
    """Return float32 rows of unit length and their Zipfian classes; with enough rows every class occurs."""
    rng = np.random.default_rng(seed)
    law = 1 / np.arange(1.0, classes + 1)
    y = rng.choice(classes, rows, p=law / law.sum())
    y[:classes] = np.arange(classes)[:rows]
    # The typical words of a class do not depend on the seed, so training and test rows share them.
    typical = np.random.default_rng(0).integers(features, size=(classes, WORDS_PER_CLASS))
    words = (features ** rng.random((rows, length))).astype(np.int64) - 1
    is_typical = rng.random((rows, length)) < CLASS_WORD_FRACTION
    columns = np.where(is_typical, typical[y[:, None], rng.integers(WORDS_PER_CLASS, size=words.shape)], words)
    values = np.full(rows * length, length**-0.5, dtype=np.float32)
    matrix = csr_array((values, columns.ravel(), np.arange(0, rows * length + 1, length)), shape=(rows, features))
    matrix.sum_duplicates()
    return matrix, y


def resident_gib() -> float:
    """Return the resident memory of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 2**20


def measure(rows: int, features: int, classes: int, length: int, epochs: int) -> dict[str, object]:
    """Fit, predict and return a row of results."""
    X, y = documents(rows, features, classes, length, seed=1)  # noqa: N806
    test_X, test_y = documents(max(1, rows // 10), features, classes, length, seed=2)  # noqa: N806
    known = np.isin(test_y, y)
    test_X, test_y = test_X[known], test_y[known]  # noqa: N806
    # A small fit first compiles the kernels and starts the threads.
    ManyClassClassifier(max_epochs=1, k=8, rank=4).fit(X[:200], np.arange(200) % 20)
    before = resident_gib()
    start = time.perf_counter()
    model = ManyClassClassifier(max_epochs=epochs, random_state=0).fit(X, y)
    fitted = time.perf_counter() - start
    beyond_fit = peak_gib() - before
    start = time.perf_counter()
    labels, _ = model.predict_top(test_X, 5)
    predicted = time.perf_counter() - start
    parameters = sum(p.numel() for m in (model._learner.encoder, model._learner.head) for p in m.parameters())
    return {
        "rows": rows,
        "features": features,
        "classes": len(model.classes_),
        "nonzeros": X.nnz,
        "epochs": epochs,
        "data_gib": round((X.data.nbytes + X.indices.nbytes + X.indptr.nbytes) / 2**30, 3),
        "dense_gib": round(rows * features * 4 / 2**30, 2),
        "parameters_gib": round(parameters * 4 / 2**30, 3),
        "beyond_data_fit_gib": round(beyond_fit, 3),
        "beyond_data_gib": round(peak_gib() - before, 3),
        "fit_s": round(fitted, 1),
        "rows_a_second": round(epochs * rows / fitted),
        "predict_top_s": round(predicted, 1),
        "predicted_rows": len(test_y),
        "held_out_accuracy": round(float(np.mean(labels[:, 0] == test_y)), 4),
        "held_out_accuracy_at_5": round(float(np.mean((labels == test_y[:, None]).any(1))), 4),
        "held_out_log_likelihood": round(float(model.log_prob_of(test_X, test_y).mean()), 4),
        **provenance(),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 50_000), ("features", 100_000), ("classes", 10_000), ("length", 60), ("epochs", 1)):
        parser.add_argument(f"--{name}", type=lambda text: int(float(text)), default=default)
    arguments = parser.parse_args()
    row = measure(arguments.rows, arguments.features, arguments.classes, arguments.length, arguments.epochs)
    for name, value in row.items():
        print(f"{name:26}{value}")
    if vars(arguments) == vars(parser.parse_args([])):
        write_csv(RESULTS, [row])
        print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
