"""What is built where there is a compiler, and where there is none; all without network, and without touching src.

`tests/test_house.py` looks at what the plain wheel and the sdist hold.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from tests.wheels import build

from attlas.engine.backends.native import library

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "src" / "attlas" / "engine" / "backends" / "native" / "kernels"
LIBRARY = "attlas/engine/backends/native/_kernels.so"
# The compiler that CMake takes.
COMPILER = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
has_cmake = pytest.mark.skipif(not shutil.which("cmake"), reason="CMake is not installed")
has_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler is installed")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy what a build reads, with one family of kernels only: all of them would take minutes."""
    folder = tmp_path / "attlas"
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore"):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "editable", folder / "editable", ignore=only("CMakeLists.txt", ".gitignore"))
    native = folder / "src" / "attlas" / "engine" / "backends" / "native"
    shutil.copytree(KERNELS, native / "kernels", ignore=only("api.cpp", "elementary.cpp", "*.h"))
    for path in KERNELS.parent.glob("*.py"):
        shutil.copy(path, native)
    (folder / "src" / "attlas" / "__init__.py").touch()
    return folder


def only(*patterns: str):
    """Leave out, when a folder is copied, the files that have none of these names."""
    return lambda folder, names: (
        set(names) - {name for name in names if any(Path(name).match(pattern) for pattern in patterns)}
    )


def built(kind: str, folder: Path, **environment: str) -> tuple[Path, set[str]]:
    """Build in a folder; return the wheel and the names of the files in it."""
    # Most of the time goes into the other instruction sets.
    defined = "ATTLAS_OPTIMIZE=-O0;ATTLAS_WIDEST=baseline"
    wheel = build(kind, folder, folder.parent / "out", SKBUILD_CMAKE_DEFINE=defined, **environment)
    with zipfile.ZipFile(wheel) as archive:
        return wheel, {name for name in archive.namelist() if not name.endswith("/")}


@has_cmake
@has_compiler
def test_wheel_with_a_compiler_holds_the_library(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, names = built("wheel", sources, CXX=COMPILER)
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    if sys.platform == "linux":
        # One file for every Python: nothing in it knows Python.
        assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert LIBRARY in names
    assert not {name for name in names if "/kernels/" in name or name.endswith((".cpp", ".h", ".txt.in", ".new"))}
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(LIBRARY, tmp_path / "unpacked")
    unpacked = tmp_path / "unpacked" / LIBRARY
    assert exported(unpacked) == {
        *("attlas_abi", "attlas_best", "attlas_pool"),
        *("attlas_from_main_thread", "attlas_look_every", "attlas_python"),
        *("attlas_elementary", "attlas_elementary_size"),
    }
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
    monkeypatch.setattr(library, "_LIBRARY_FILE", unpacked)
    assert library.current().call("elementary", count=0) == library.current().codes["DONE"]


def exported(library: Path) -> set[str]:
    """List the names that a library shows; those of the C++ library inside it must not be among them."""
    if not shutil.which("nm") or sys.platform != "linux":
        pytest.skip("nm of binutils lists what a library exports")
    listing = subprocess.check_output(["nm", "-D", "--defined-only", str(library)], text=True)
    return {line.split()[-1] for line in listing.splitlines()}


@has_cmake
@pytest.mark.parametrize("case", ["no compiler", "a compiler that fails"])
def test_wheel_without_a_compiler_is_plain_python(case: str, sources: Path, tmp_path: Path) -> None:
    # A library that an earlier build left in src must not get in.
    (sources / "src" / LIBRARY).write_bytes(b"left behind")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("cmake", "ninja", "make"):
        if shutil.which(tool):
            (tools / tool).symlink_to(shutil.which(tool))
    hidden = {"CXX": "", "CC": ""} if case == "no compiler" else {"CXX": shutil.which("false") or "false"}
    wheel, names = built("wheel", sources, PATH=str(tools), **hidden)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "attlas/engine/backends/native/library.py" in names
    assert not {name for name in names if name.endswith((".so", ".cpp", ".h"))}


@has_cmake
@has_compiler
def test_editable_install_compiles_into_src(sources: Path) -> None:
    _, names = built("editable", sources, CXX=COMPILER)
    assert (sources / "src" / LIBRARY).stat().st_size > 10_000
    assert LIBRARY not in names
    # What the build leaves lies where git ignores it.
    assert {path.name for path in sources.iterdir()} == {
        *("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore", "editable", "src")
    }
