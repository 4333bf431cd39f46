"""Every command in the README, the documentation and the pages that it includes exists, with its options."""

import re
import shlex
import tomllib

import click
import pytest

from manyclass.cli.main import app
from tests.docs.markdown import INCLUDED, PAGES, ROOT, fences, inline_code, name

TARGETS = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PROGRAMS = ("manyclass", "torchrun", "python", "make", "pip")
VARIABLE = re.compile(r"[A-Z_]+=\S*$")
# Of torchrun, each with a value.
OF_TORCHRUN = ("--nproc-per-node", "--max-restarts", "--nnodes")


def commands(path):
    """Return the commands of a page, those in blocks first."""
    found = []
    for fence in fences(path):
        for line in fence.text.splitlines() if fence.language in ("console", "") else ():
            line = line.removeprefix("$ ").strip()
            if line and not line.startswith("#"):
                found.append((line, True))
    return found + [(code, False) for code in inline_code(path)]


def words(command):
    """Return the words of a command without variables of the environment and the comment, if it is one of ours."""
    try:
        found = shlex.split(command, comments=True)
    except ValueError:
        return []
    while found and VARIABLE.match(found[0]):
        found = found[1:]
    return found if found and found[0] in PROGRAMS else []


def check(command, strict):
    """Raise if a command does not exist; one within a sentence may lack arguments."""
    program, *rest = words(command)
    if program == "torchrun":
        while rest and rest[0] in OF_TORCHRUN:
            rest = rest[2:]
        assert rest[:2] == ["-m", "manyclass"] or not (strict or rest), command
        program, rest = "manyclass", rest[2:]
    if program == "python" and rest[:2] == ["-m", "manyclass"]:
        program, rest = "manyclass", rest[2:]
    if program == "manyclass":
        check_ours([word for word in rest if word != "…"], strict)
    elif program == "make":
        assert set(rest) <= TARGETS, command
    elif program == "pip":
        named = re.findall(r"\[([\w,-]+)\]", " ".join(rest))
        assert {extra for group in named for extra in group.split(",")} <= set(EXTRAS), command
    elif rest:
        check_script(rest)


def check_ours(rest, strict):
    with click.Context(app) as context:
        if not rest or rest[0].startswith("-"):
            app.make_context("manyclass", rest or ["--help"], resilient_parsing=True)
            return
        found = app.get_command(context, rest[0])
        assert found is not None, f"there is no command {rest[0]}"
        try:
            found.make_context(rest[0], rest[1:], parent=context)
        except (click.MissingParameter, click.BadOptionUsage):
            if strict:
                raise


def check_script(rest):
    """Raise if a script, or an option of it, does not exist."""
    if rest[0] == "-m":
        path, rest = ROOT / f"{rest[1].replace('.', '/')}.py", rest[2:]
        path = path if path.exists() else path.with_suffix("") / "__main__.py"
    else:
        path, rest = ROOT / rest[0], rest[1:]
    assert path.is_file(), path
    sources = "".join(other.read_text() for other in path.parent.glob("*.py"))
    for word in rest:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in sources, f"{path.name} has no option {word}"


@pytest.mark.parametrize("path", [*PAGES, *INCLUDED], ids=name)
def test_the_commands_of_a_page_exist(path):
    for command, strict in commands(path):
        if words(command):
            check(command, strict)
        else:
            # In a block there is nothing else.
            assert not strict or not command.startswith("manyclass"), command


def test_commands_that_do_not_exist_are_found():
    for command in (
        "manyclass fit DATA --out MODEL --magic",
        "manyclass fit DATA --out MODEL --k many",
        "manyclass trian DATA",
        "torchrun --nproc-per-node 2 -m manyclass fit DATA --magic 3 --out MODEL",
        "make magic",
        "pip install '.[magic]'",
        "python benchmarks/magic.py",
        "python -m benchmarks.gpu --magic",
    ):
        with pytest.raises(Exception, match=r"magic|many|trian"):
            check(command, True)
    assert len(commands(ROOT / "README.md")) > 5
