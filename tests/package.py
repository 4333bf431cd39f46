"""The wheel and the sdist, built, installed into empty environments and tried: python -m tests.package.

They stay in `dist`. Each gets an environment with nothing but what it asks for, and is tried with the compilers of the
machine and without any, each time with an empty cache for the kernels.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
COMPILERS = ("c++", "g++", "clang++")
DEMO = ("demo", "--seconds", "5", "--files", "200")

# Needs only what the package itself requires.
FIVE_LINES = """
import torch
from manyclass import ClassHead, diagnose
head = ClassHead(16, 20_000, counts=torch.arange(1.0, 20_001), k=256, sparse=True)
hidden, target = torch.randn(64, 16), torch.randint(20_000, (64,))
head(hidden, target).backward()
print(diagnose(head, hidden, target))
"""
HAS_KERNELS = "import torch; from manyclass.kernels.cpu import build; print(build.is_available(torch.zeros(1)))"


def built(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return their paths."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the build failed:\n{done.stdout}{done.stderr}")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def content(archive: Path) -> set[str]:
    """Return the names of the files in a wheel or an sdist, in the latter without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as sdist:
        return {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}


def path_without_compilers(folder: Path) -> str:
    """Return a search path whose one folder links to all programs but the compilers."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            if program.name not in COMPILERS and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return str(folder)


def environment(folder: Path, *, compiler: bool) -> dict[str, str]:
    """Return the variables of a process with an empty home, and with compilers or without."""
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MANYCLASS", "CXX"))}
    path = os.environ["PATH"] if compiler else path_without_compilers(folder / "bin")
    return {**kept, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PATH": path}


def has_kernels(python: Path | str, variables: dict[str, str], folder: Path) -> bool:
    """Return True if compiled kernels are there, built now or before."""
    output = subprocess.run([python, "-c", HAS_KERNELS], env=variables, cwd=folder, capture_output=True, check=True)
    return output.stdout.strip() == b"True"


def install(archive: Path, folder: Path) -> Path:
    """Install an archive with what its reports need into a new environment; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, *constraints, "torch"], check=True)
    subprocess.run([*pip, *constraints, f"manyclass[report] @ {archive.as_uri()}"], check=True)
    return python


def main() -> int:
    """Build both archives and try each with and without compilers."""
    faults = []
    with tempfile.TemporaryDirectory(prefix="manyclass-package-") as name:
        folder = Path(name)
        shutil.rmtree(DIST, ignore_errors=True)
        for archive in built(DIST):
            python = install(archive, folder / f"environment-{archive.suffix}")
            for compiler in (True, False):
                place = folder / f"{archive.suffix}-{'with' if compiler else 'without'}-compiler"
                variables = environment(place, compiler=compiler)
                found = compiler and any(shutil.which(each) for each in COMPILERS)
                subprocess.run([python, "-c", FIVE_LINES], env=variables, cwd=place, check=True)
                demo = [python.with_name("manyclass"), *DEMO, "--out", place / "report"]
                subprocess.run(demo, env=variables, cwd=place, check=True, stdout=subprocess.DEVNULL)
                pages = sorted(page.name for page in (place / "report").glob("*.html"))
                kernels = has_kernels(python, variables, place)
                print(f"{archive.name}: demo wrote {', '.join(pages)}; compiled kernels: {kernels}", flush=True)
                if not pages or kernels != found:
                    faults.append(f"{archive.name}: pages {pages}, compiled kernels {kernels}, a compiler {found}")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
