"""The wheel and the sdist hold what they should, and the wheel works where there is no compiler.

`make package` installs both into empty environments.
"""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes

import pytest

import manyclass
from tests.package import COMPILERS, FIVE_LINES, ROOT, built, content, environment, has_kernels

SOURCES = {
    str(path.relative_to(ROOT / "src"))
    for path in (ROOT / "src").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return built(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def unpacked(archives, tmp_path_factory):
    """A folder with the content of the wheel, to import from."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(archives[0]) as wheel:
        wheel.extractall(folder)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(archives):
    files = content(archives[0])
    assert {name for name in files if ".dist-info/" not in name} == SOURCES
    assert any(name.endswith(".cpp") for name in files)


def test_the_sdist_holds_what_a_developer_needs(archives):
    files = content(archives[1])
    assert {f"src/{name}" for name in SOURCES} <= files
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt"} <= files
    assert {name.split("/")[0] for name in files if "/" in name} >= {"src", "tests", "docs", "examples", "benchmarks"}


def test_the_version_is_that_of_the_module(archives):
    with zipfile.ZipFile(archives[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
        metadata = message_from_bytes(wheel.read(name))
    assert metadata["Version"] == manyclass.__version__


@pytest.mark.parametrize("compiler", [True, False])
def test_the_wheel_works_with_a_compiler_and_without(unpacked, tmp_path, compiler):
    if compiler and not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("there is no C++ compiler")
    variables = environment(tmp_path / "home", compiler=compiler) | {"PYTHONPATH": str(unpacked)}
    found = subprocess.run(
        [sys.executable, "-c", f"import manyclass; print(manyclass.__file__){FIVE_LINES}"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert found.startswith(str(unpacked))
    assert "error of log Z̃" in found
    assert has_kernels(sys.executable, variables, tmp_path) == compiler
