"""The check of a built site finds links that lead nowhere."""

import subprocess
import sys

from tests.docs.markdown import ROOT

SCRIPT = ROOT / "docs" / "_extensions" / "check_links.py"


def check(site):
    done = subprocess.run([sys.executable, SCRIPT, site], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_links_to_pages_anchors_and_sites(tmp_path):
    other = '<h1 id="top">Other</h1><a href="../index.html#end">back</a>'
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.html").write_text(other)
    good = '<a href="more/other.html#top">x</a><p id="end"></p><a href="#end">y</a><a href="https://pytorch.org/">z</a>'
    (tmp_path / "index.html").write_text(good)
    assert check(tmp_path) == (0, "All links lead somewhere.\n")


def test_each_fault_is_found(tmp_path):
    links = ("missing.html", "#missing", "page.html#missing", "https://pytorch")
    (tmp_path / "page.html").write_text("<p></p>")
    (tmp_path / "index.html").write_text("".join(f'<a href="{link}">x</a>' for link in links))
    code, found = check(tmp_path)
    assert code == 1
    assert [link for link in links if f"index.html: {link} " in found] == [*links]
