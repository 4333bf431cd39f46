"""Rooms, the folders and modules directly under src/manyclass, import only the rooms below them."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "manyclass"

# The rooms that each room may import.
MAY_IMPORT = {
    "_check": {"_recording"},
    "_context": set(),
    "_faiss": set(),
    "_handle": set(),
    "_plain_state": {"_check", "_context"},
    "_ranks": set(),
    "_recording": set(),
    "_shard": set(),
    "_sparse_gradients": set(),
    "kmeans": {"_context"},
    "candidates": {"_shard"},
    "defaults": set(),
    "eval_mode": set(),
    "forms": {"candidates"},
    "counts": {"_check", "_plain_state", "_shard"},
    "samplers": {
        "_check",
        "_context",
        "_handle",
        "_plain_state",
        "_ranks",
        "_recording",
        "_shard",
        "candidates",
        "counts",
        "defaults",
        "forms",
        "kernels",
        "kmeans",
    },
    "objectives": {"_check", "candidates", "forms"},
    "kernels": {"_check", "_context", "_recording", "candidates", "forms"},
    "heads": {
        "eval_mode",
        "_check",
        "_context",
        "_handle",
        "_plain_state",
        "_ranks",
        "_recording",
        "_shard",
        "_sparse_gradients",
        "candidates",
        "counts",
        "defaults",
        "errors",
        "forms",
        "kernels",
        "objectives",
        "samplers",
    },
    "optim": {"_check", "_shard", "_sparse_gradients", "kernels"},
    "diagnostics": {"_check", "candidates", "forms", "heads"},
    "errors": set(),
    "storage": {"_check", "errors"},
    "training": {
        "_check",
        "_context",
        "_ranks",
        "_recording",
        "candidates",
        "samplers",
        "objectives",
        "heads",
        "optim",
        "diagnostics",
        "storage",
        "errors",
        "defaults",
        "eval_mode",
    },
    "registry": {"_check", "counts", "defaults", "samplers", "objectives", "heads", "optim"},
    "encoders": {"_check", "_ranks", "_shard"},
    "parallel": {"_context", "_ranks", "_shard", "counts", "heads", "optim", "samplers"},
    "inference": {"_check", "_context", "_shard", "_faiss", "candidates", "heads", "kernels", "kmeans", "samplers"},
    "report": {"storage"},
    "data": {"_check", "defaults", "errors", "storage"},
    "estimator": {
        "_check",
        "registry",
        "counts",
        "data",
        "defaults",
        "encoders",
        "heads",
        "objectives",
        "samplers",
        "training",
    },
    "tasks": {
        "_check",
        "_shard",
        "registry",
        "counts",
        "data",
        "defaults",
        "encoders",
        "errors",
        "eval_mode",
        "heads",
        "inference",
        "parallel",
        "report",
        "samplers",
        "storage",
        "training",
    },
    "integrations": {
        "_check",
        "_context",
        "candidates",
        "counts",
        "defaults",
        "errors",
        "eval_mode",
        "forms",
        "heads",
        "objectives",
        "optim",
        "parallel",
        "samplers",
        "storage",
        "training",
    },
    "lab": {
        "tasks",
        "data",
        "candidates",
        "forms",
        "counts",
        "samplers",
        "objectives",
        "heads",
        "optim",
        "defaults",
        "diagnostics",
        "registry",
        "training",
        "errors",
        "eval_mode",
        "report",
        "storage",
    },
    "cli": {"_check", "registry", "errors", "data", "lab", "report", "storage", "tasks", "training"},
    "__main__": {"cli"},
}


def room_of(module):
    return module.split(".")[1] if "." in module else module


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "manyclass":
                # The version belongs to no room.
                yield from (f"manyclass.{alias.name}" for alias in node.names if alias.name != "__version__")
            elif node.module.startswith("manyclass."):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("manyclass"))


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES])
def test_a_room_imports_only_rooms_below_it(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert room in MAY_IMPORT, f"list in this file what {room} may import"
    imported = {room_of(module) for module in imports(path)} - {room}
    assert imported <= MAY_IMPORT[room]


def test_the_rooms_have_an_order_without_a_cycle():
    done = set()
    while len(done) < len(MAY_IMPORT):
        free = {room for room, below in MAY_IMPORT.items() if room not in done and below <= done}
        assert free, f"a cycle among {set(MAY_IMPORT) - done}"
        done |= free
