"""Split a file of novels into a training text and a held-out text, which gets every twentieth novel.

    python benchmarks/novels.py FOLDER
    manyclass study --data FOLDER --split words --min-count 2 --full --out novels-report

A line `# name` starts a novel, every other line is a paragraph. FOLDER gets train.txt.xz and test.txt.xz.
"""

import argparse
import lzma
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import DATA  # noqa: E402

HELD_OUT_EVERY = 20


def split_novels(source: Path, folder: Path) -> tuple[int, int]:
    """Write both texts, and return the number of novels in each."""
    folder.mkdir(parents=True, exist_ok=True)
    novels = [0, 0]
    number = -1
    with (
        lzma.open(source, "rt", encoding="utf-8") as text,
        lzma.open(folder / "train.txt.xz", "wt", encoding="utf-8", preset=1) as train,
        lzma.open(folder / "test.txt.xz", "wt", encoding="utf-8", preset=1) as test,
    ):
        for line in text:
            if line.startswith("# "):
                number += 1
                novels[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1] += 1
            else:
                (test if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).write(line)
    return novels[0], novels[1]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--data", type=Path, default=DATA / "eltec-hun" / "hun.txt.xz", help="file of novels")
    arguments = parser.parse_args()
    if not arguments.data.exists():
        parser.exit(2, f"novels: {arguments.data} does not exist; set MANYCLASS_DATA or --data\n")
    train, test = split_novels(arguments.data, arguments.folder)
    print(f"{train} novels to train on, {test} held out, in {arguments.folder}")


if __name__ == "__main__":
    main()
