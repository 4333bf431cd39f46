"""Check the links within a built site: python docs/_extensions/check_links.py FOLDER.

Files and anchors that pages refer to must exist. Links to other sites are checked by their syntax alone.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITES = {"http", "https"}


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to and what can refer to it."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def faults(site: Path) -> list[str]:
    """Return a sentence for each link that leads nowhere."""
    # The theme has a template among its static files.
    pages = {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.relative_to(site).parts}
    found = []
    for path, page in sorted(pages.items()):
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if parts.scheme in SITES and "." not in parts.netloc:
                    found.append(f"{path.relative_to(site)}: {link} names no site")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{path.relative_to(site)}: {link} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path.relative_to(site)}: {link} has no such anchor")
    return found


if __name__ == "__main__":
    broken = faults(Path(sys.argv[1]).resolve())
    print("\n".join(broken) or "All links lead somewhere.")
    sys.exit(1 if broken else 0)
