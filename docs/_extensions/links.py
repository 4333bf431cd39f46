"""Links the public names that docstrings and pages mention to the API reference."""

import re
from collections.abc import Iterable
from typing import Any

from docutils import nodes
from docutils.nodes import Element
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform

NAME = re.compile(r"(?:[\w.]+\.)?\w+")
PREFERRED = "manyclass."  # `manyclass.ClassHead` rather than `manyclass.heads.ClassHead`


def documented(env: BuildEnvironment) -> dict[str, str]:
    """Return the full documented names by each of their endings, such as `Learned`, without ambiguous ones."""
    found: dict[str, set[str]] = {}
    for name, entry in env.domaindata["py"]["objects"].items():
        if entry.aliased or entry.objtype == "module" or not name.startswith(PREFERRED):
            continue
        parts = name.split(".")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), set()).add(name)
    return {ending: names.pop() for ending, names in found.items() if len(names) == 1}


def resolve(app: Sphinx, env: BuildEnvironment, node: Element, content: Element) -> Element | None:
    """Return a link for a name that is documented elsewhere than where it is defined, as annotations have it."""
    if node.get("refdomain") != "py":
        return None
    target = node.get("reftarget", "")
    names = documented(env)
    full = names.get(target) or names.get(target.rpartition(".")[2])
    if full is None or (target.count(".") and not target.startswith("manyclass")):
        return None
    entry = env.domaindata["py"]["objects"][full]
    return _link(app, env.current_document.docname or node.get("refdoc", ""), entry, full, content)


def _link(app: Sphinx, page: str, entry: Any, title: str, content: Element) -> Element:
    link = nodes.reference("", "", content, internal=True, reftitle=title)
    link["refuri"] = app.builder.get_relative_uri(page, entry.docname) + "#" + entry.node_id
    return link


class LinkLiterals(SphinxPostTransform):
    """Makes a link of each literal that is the name, or a call, of something public."""

    default_priority = 400

    def run(self, **options: Any) -> None:
        """Replace the literals of one page."""
        names = documented(self.env)
        page = self.env.current_document.docname
        for literal in list(self._literals()):
            text = literal.astext()
            found = NAME.match(text)
            if not found or text[found.end() : found.end() + 1] not in ("", "("):
                continue
            name = found[0]
            if not (name[:1].isupper() or "." in name):
                continue
            full = names.get(name.removeprefix("manyclass.")) or names.get(name)
            entry = full and self.env.domaindata["py"]["objects"][full]
            # Not to where the reader is.
            if entry and entry.docname != page:
                literal.replace_self(_link(self.app, page, entry, str(full), literal.deepcopy()))

    def _literals(self) -> Iterable[nodes.literal]:
        for literal in self.document.findall(nodes.literal):
            parents = (nodes.reference, addnodes.pending_xref, nodes.title, addnodes.desc_signature, addnodes.toctree)
            node: Any = literal
            while node is not None and not isinstance(node, parents):
                node = node.parent
            if node is None:
                yield literal


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the extension."""
    app.connect("missing-reference", resolve)
    app.add_post_transform(LinkLiterals)
    return {"parallel_read_safe": True}
