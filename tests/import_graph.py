"""Import edges between the rooms of the package, the folders and modules directly under src/manyclass, as Mermaid.

    python tests/import_graph.py                          # print the graph
    python tests/import_graph.py --check CONTRIBUTING.md  # fail if the block in the file is not current
    python tests/import_graph.py --write CONTRIBUTING.md  # update the block in the file

It exits with 1 if the rooms import each other in a cycle. Imports inside functions and under TYPE_CHECKING count. The
package's `__init__` and `__main__` are not rooms: a name imported from the package counts as one of its room.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "manyclass"
BEGIN, END = "<!-- import graph: begin -->", "<!-- import graph: end -->"

Edges = dict[str, list[str]]


def import_edges(package: Path = PACKAGE) -> Edges:
    """Return the rooms that each room imports, all sorted."""
    facade = {name: module for module, name in _imports(package / "__init__.py", package) if name is not None}
    edges: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = _room(path, package)
        if room in ("__init__", "__main__"):
            continue
        found = edges.setdefault(room, set())
        for module, name in _imports(path, package):
            if module == package.name and name is not None:
                module = facade.get(name, f"{module}.{name}")
            parts = module.split(".")
            if parts[0] == package.name and len(parts) > 1 and parts[1] != room:
                found.add(parts[1])
    return {room: sorted(found & edges.keys()) for room, found in sorted(edges.items())}


def _room(path: Path, package: Path) -> str:
    return path.relative_to(package).with_suffix("").parts[0]


def _imports(path: Path, package: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the absolute module and the name, None in `import module`, of each import in a file."""
    parents = path.relative_to(package.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((module, alias.name) for alias in node.names)


def find_cycle(edges: Edges) -> list[str] | None:
    """Return rooms that import each other in a cycle, the first one repeated at the end, or None."""
    finished: set[str] = set()

    def visit(room: str, path: list[str]) -> list[str] | None:
        if room in path:
            return [*path[path.index(room) :], room]
        if room in finished:
            return None
        for imported in edges.get(room, []):
            if cycle := visit(imported, [*path, room]):
                return cycle
        finished.add(room)
        return None

    return next((cycle for room in edges if (cycle := visit(room, []))), None)


def mermaid(edges: Edges) -> str:
    """Format edges as a Mermaid graph in a Markdown code block."""
    lines = [f"    {room} --> {' & '.join(imported)}" for room, imported in edges.items() if imported]
    return "\n".join(["```mermaid", "graph LR", *lines, "```"])


def with_block(text: str, graph: str) -> str:
    """Return a document with the graph between its two markers.

    Raises:
        ValueError: the document does not have both markers once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the file must have the markers {BEGIN} and {END} once, in this order")
    block = f"{BEGIN}\n{graph}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, metavar="FILE", help="check that the block in the file is current")
    parser.add_argument("--write", type=Path, metavar="FILE", help="update the block in the file")
    options = parser.parse_args(arguments)
    edges = import_edges()
    if cycle := find_cycle(edges):
        print(f"rooms import each other in a cycle: {' -> '.join(cycle)}", file=sys.stderr)
        return 1
    graph, path = mermaid(edges), options.check or options.write
    if path is None:
        print(graph)
        return 0
    text = path.read_text(encoding="utf-8")
    try:
        current = with_block(text, graph)
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if options.check and current != text:
        print(f"{path}: the import graph is out of date; run {parser.prog} --write {path}", file=sys.stderr)
        return 1
    if options.write:
        path.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
