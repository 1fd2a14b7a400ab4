"""The rules of the code base, tested: sizes, names, what an import loads, what the guide lists, what the wheel holds.

Each rule is a small function from source text to a list of violations. The tests ask that the list is empty for the
package, and `test_rules_can_fail` asks that it is not for a wrong text.
"""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.error_law import code_of, faults
from tests.wheels import build

from attlas import AttlasError, errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "attlas"
FILES = sorted(PACKAGE.rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PYPROJECT["project"]["version"]

# What scores, masks, statistics and backends are built on. A further one of these is a file, or a package, of its own,
# which the budget does not count, nor what a matrix computes by them.
CORE = ("errors.py", "foundation/tiles.py", "foundation/indexing.py", "foundation/checks.py", "scores/base.py",
        "masks/base.py", "engine/", "matrix/views.py", "matrix/weights.py", "matrix/attend.py")  # fmt: skip
BESIDE_CORE = ("engine/autodiff/", "engine/backends/flex/", "engine/backends/native/", "engine/backends/triton/",
               "engine/costs.py", "engine/fused.py", "engine/given.py", "engine/held.py", "engine/limits.py",
               "engine/outputs.py", "engine/trust.py", "engine/work.py")  # fmt: skip
# Packages that are no part of the public surface; every other entry of src/attlas is (docs/stability.md).
PRIVATE = {"foundation", "engine", "matrix", "cli"}
# A fifth of it is the texts of errors.
CORE_CODE_LINES = 3160
FILE_CODE_LINES = 400
# Functions that are told a name for their errors: where it is only known as the program runs. The number only falls.
TAKE_WHERE = 10
MODEL_BYTES = 8_000_000
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "misc"}
# What an `import attlas` must not load: each costs seconds, memory or a dependency that only an extra promises.
HEAVY = ["transformers", "tokenizers", "huggingface_hub", "matplotlib", "starlette", "uvicorn", "sklearn", "scipy",
         "pandas", "anywidget", "pyarrow", "polars"]  # fmt: skip
# Packages whose public names must be documented; those of an extra that is not installed are left out.
PUBLIC_PACKAGES = ["attlas", "attlas.atlas", "attlas.corpus", "attlas.distributed", "attlas.estimators", "attlas.heads",
                "attlas.huggingface", "attlas.interventions", "attlas.models", "attlas.nn", "attlas.pictures",
                "attlas.recording",
                "attlas.scaling", "attlas.stats", "attlas.testing", "attlas.view"]  # fmt: skip

ERRORS = {name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, AttlasError)}

SOURCES = {path: path.read_text(encoding="utf-8") for path in FILES}


# ------------------------------------------------------------------------------------------------------------- sizes


@cache
def tree_of(source: str) -> ast.Module:
    """Parse a file once for all rules."""
    return ast.parse(source)


@cache
def code_lines(source: str) -> int:
    """Count the lines that hold code: no blank lines, no comments, no docstrings."""
    docstrings, texts = set(), set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and docstring_of(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno > node.lineno:
            texts.update(range(node.lineno, node.end_lineno + 1))
    lines = {number for number, line in enumerate(source.splitlines(), start=1) if line.strip()[:1] not in ("", "#")}
    return len((lines | texts) - docstrings)


def docstring_of(node: ast.AST) -> ast.stmt | None:
    """Return the statement that is the docstring of a module, class or function."""
    first = node.body[0] if node.body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return first if is_text else None


def test_files_are_short() -> None:
    sizes = {path: code_lines(source) for path, source in SOURCES.items()}
    assert not {path: lines for path, lines in sizes.items() if lines >= FILE_CODE_LINES}, "split by what it does"


def test_core_keeps_its_budget() -> None:
    sizes = {}
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        # The core computes the same without gradients, other kernels, costs and what is said of a matrix.
        if name.startswith(CORE) and not name.startswith(BESIDE_CORE):
            sizes[name] = code_lines(SOURCES[path])
    table = "\n".join(f"{lines:6d} {name}" for name, lines in sorted(sizes.items(), key=lambda item: -item[1]))
    assert sum(sizes.values()) <= CORE_CODE_LINES, f"the core has {sum(sizes.values())} code lines\n{table}"


# ------------------------------------------------------------------------------------------------------ names, words


def vague_names(names: list[str]) -> list[str]:
    """Pick the module names that say nothing about what is inside."""
    return [name for name in names if set(re.split(r"[/._]", name.lower())) & VAGUE_NAMES]


def test_no_vague_module_names() -> None:
    names = [path.relative_to(PACKAGE).as_posix() for path in FILES]
    assert not vague_names(names), "name a module by what it does"


def private_reaches(source: str, file: Path, *, root: Path = PACKAGE) -> list[str]:
    """List imports of another package's private names."""
    package = file.relative_to(root).parts[0].removesuffix(".py")
    found = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "attlas":
            parts = (node.module or "").split(".")[1:]
            for name in node.names:
                full = [*parts, name.name]
                if full[0] != package and any(part.startswith("_") and not part.endswith("__") for part in full):
                    found.append(f"line {node.lineno}: attlas.{'.'.join(full)}")
    return found


def test_packages_use_only_public_names_of_others() -> None:
    found = {path.relative_to(PACKAGE): private_reaches(source, path) for path, source in SOURCES.items()}
    assert not {name: reaches for name, reaches in found.items() if reaches}


def private_names(source: str) -> tuple[set[str], set[str]]:
    """Return the private names that a file defines, and those that it reads of objects other than `self` and `cls`."""
    defined, read = set(), set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            read.add(node.attr)
    of_tuples = {"_asdict", "_fields", "_replace"}  # public in spite of their names
    return tuple({name for name in names - of_tuples if re.match(r"_[^_]", name)} for names in (defined, read))


def test_no_private_member_of_another_modules_object_is_read() -> None:
    names = {path.relative_to(PACKAGE).as_posix(): private_names(source) for path, source in SOURCES.items()}
    ours = set().union(*(defined for defined, _ in names.values()))
    found = {name: (read & ours) - defined for name, (defined, read) in names.items()}
    assert not {name: read for name, read in found.items() if read}, "give it a public name, or a verb of its owner"


# ----------------------------------------------------------------------------------------------------------- errors


def functions_that_take_where(source: str) -> list[str]:
    """List the functions that are told the public function which their errors name; a `Where` is an index."""
    return [
        node.name
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg == "where" and (argument.annotation is None or ast.unparse(argument.annotation) == "str")
    ]


def incomplete_errors(source: str) -> list[str]:
    """List the errors that are made without a rule which ends in a full stop, without what was found or a fix."""
    found = []
    for node in ast.walk(tree_of(source)):
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not name or name not in ERRORS:
            continue
        named = {word.arg for word in node.keywords}
        rule = node.args[0] if node.args else None
        open_end = isinstance(rule, ast.Constant) and not str(rule.value).endswith(".")
        if open_end or len(node.args) + len(named & {"rule", "found", "fix"}) < 3:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_private_functions_are_not_told_who_calls_them() -> None:
    found = {path.relative_to(PACKAGE): functions_that_take_where(source) for path, source in SOURCES.items()}
    count = sum(map(len, found.values()))
    assert count <= TAKE_WHERE, f"decorate the public function with @public: {[*filter(None, found.items())]}"


def test_every_error_has_a_rule_what_was_found_and_a_fix() -> None:
    found = {path.relative_to(PACKAGE): incomplete_errors(source) for path, source in SOURCES.items()}
    assert not {name: errors for name, errors in found.items() if errors}


def test_the_law_over_error_texts_can_fail() -> None:
    assert faults("x must be y.", "x = 3", "give Alibi(4), with 4 slopes.") == []
    assert faults("x must be y.", "x = 3", "leave x out, for its default.") == []
    assert faults("x must be y", "", "") == [
        "the rule does not end in a full stop",
        "nothing was found",
        "there is no fix",
    ]
    assert faults("x must be y.", "x = 3", "A.topk(8") == ["the fix is no Python: A.topk(8"]
    assert code_of('keep="disk", or a folder') == 'keep="disk"'
    assert code_of("f(a, [1, 2]).sum(-1) for the sum") == "f(a, [1, 2]).sum(-1)"


def test_rules_can_fail() -> None:
    assert functions_that_take_where("def f(where: str): ...\ndef g(where: Where): ...\n") == ["f"]
    assert len(incomplete_errors("ShapeError('r.', 'found')\nShapeError('r', 'found', 'fix')\n")) == 2
    assert not incomplete_errors("ShapeError('r.', 'found', fix='fix', x=3)\n")
    assert private_names("class A:\n    def _f(self): self._x = 1\na._y, self._z, b._f()\n") == (
        {"_f", "_x"},
        {"_y", "_f"},
    )
    assert code_lines('"""One\ntwo."""\n\n# three\nx = """\n\n"""\n') == 3
    assert vague_names(["nn/utils.py", "_helpers.py", "nn/gpt2.py"]) == ["nn/utils.py", "_helpers.py"]
    assert private_reaches("from attlas.engine.backends.tiled import _row", PACKAGE / "matrix.py")
    assert not private_reaches("from attlas.engine.backends.tiled import _row", PACKAGE / "engine" / "apply.py")
    assert loose_code("import os\n__all__ = ['os']\nx = 3\n") == ["line 3: x = 3"]
    assert docstring_violations(wrong_function) == [
        "wrong_function: Parameters documents ['b'], the signature has ['a']",
        "wrong_function: no Returns section",
        "wrong_function: no Raises section",
        "wrong_function: no Examples section",
    ]


def wrong_function(a: int) -> int:
    """Be documented wrongly.

    Parameters
    ----------
    b : int
        Not there.
    """
    if a < 0:
        raise ValueError("a")
    return a


# ------------------------------------------------------------------------------------------------- import attlas


def loose_code(source: str) -> list[str]:
    """List the statements of an `__init__` that are neither imports nor plain names."""
    found = []
    tree = ast.parse(source)
    for node in tree.body:
        if node is docstring_of(tree) or isinstance(node, ast.Import | ast.ImportFrom):
            continue
        targets = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        if targets in (["__all__"], ["__version__"]) and isinstance(node.value, ast.List | ast.Constant):
            continue
        found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_init_holds_only_public_names() -> None:
    stub = (PACKAGE / "__init__.pyi").read_text(encoding="utf-8").replace("__version__: str", "")
    assert not loose_code(stub), "attlas/__init__.pyi holds imports and __all__"
    attlas = importlib.import_module("attlas")
    assert len(set(attlas.__all__)) == len(attlas.__all__), "a name is listed twice"
    absent = [name for name in attlas.__all__ if not hasattr(attlas, name)]
    assert not absent, "listed in __all__ and not there"
    imported = [alias for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in imported), "type checkers take `a as a` for public"
    modules = {alias.name for alias in imported if isinstance(getattr(attlas, alias.name), ModuleType)}
    assert {alias.name for alias in imported} - modules == set(attlas.__all__) - {"stats", "testing"}
    assert set(attlas.__all__) <= set(dir(attlas))


def package_entries() -> set[str]:
    """List the modules and packages of attlas; git leaves the caches of packages that have moved in empty folders."""
    files = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    return files | {path.parent.name for path in PACKAGE.glob("*/*.py")}


def test_entries_of_the_package_are_public_or_private_packages() -> None:
    entries = package_entries()
    public = {name.split(".")[1] for name in PUBLIC_PACKAGES[1:]} | {"errors", "masks", "scores"}
    assert entries == (public - {"atlas"}) | PRIVATE


def test_former_names_import_the_same_modules() -> None:
    code = "import sys; from attlas.atlas import Atlas; import attlas.recording.atlas as atlas, attlas"
    code += "; assert attlas.atlas is atlas and Atlas is atlas.Atlas and sys.modules['attlas.atlas'] is atlas"
    code += "; import attlas.atlas.entry; assert attlas.atlas.entry.Entry is attlas.Entry"
    code += "; assert atlas.__spec__.name == 'attlas.recording.atlas'"
    subprocess.check_call([sys.executable, "-W", "error", "-c", code])


def test_import_loads_torch_when_it_is_used_and_nothing_heavy() -> None:
    code = "import sys, json, attlas; early = 'torch' in sys.modules; attlas.attend"
    code += "; assert not early, 'import attlas alone loads torch'; print(json.dumps(sorted(sys.modules)))"
    code += "; import torch, attlas.recording; attlas.attend(torch.ones(2, 2), torch.ones(2, 2))"
    code += "; from attlas.cli import stats"
    code += "; print(json.dumps(sorted(sys.modules)))"
    said = subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True).splitlines()
    for modules in map(set, map(json.loads, said)):
        loaded = {name.split(".")[0] for name in modules}
        assert "torch" in loaded
        assert not loaded & set(HEAVY), "these are loaded only when someone asks for them"
        assert "torch._dynamo" not in modules, "torch's compiler takes as long to load as all the rest of torch"
        unasked = {"distributed", "view", "estimators", "huggingface", "nn"}
        assert not modules & {f"attlas.{name}" for name in unasked}
    assert {"attlas.cli.stats", "attlas.recording"} <= modules


def test_names_of_the_package_are_found_in_any_order() -> None:
    code = "from attlas.matrix.explain import explain; import attlas; assert attlas.explain is explain"
    code += "; import attlas.corpus; assert callable(attlas.corpus)"
    code += "; from attlas import *; assert attend is attlas.attend"
    code += "; assert attlas.engine.__name__ == 'attlas.engine'; assert not hasattr(attlas, 'nonsense')"
    subprocess.check_call([sys.executable, "-W", "error", "-c", code])


def test_version_is_the_same_everywhere() -> None:
    attlas = importlib.import_module("attlas")
    assert getattr(attlas, "__version__", VERSION) == VERSION
    assert re.search(rf"^## \[{re.escape(VERSION)}\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert re.search(rf"^version: {re.escape(VERSION)}$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)


# --------------------------------------------------------------------------------------------------------- docstrings


def test_the_stub_of_the_package_lists_its_public_modules() -> None:
    """`attlas/__init__.pyi` tells type checkers which modules `import attlas` offers."""
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    listed = [node.names[0].name for node in stub.body if isinstance(node, ast.ImportFrom) and node.module == "attlas"]
    modules = {name.removeprefix("attlas.") for name in PUBLIC_PACKAGES[1:]} | {"errors", "masks", "scores"}
    assert listed == sorted(modules - {"atlas", "corpus"})  # a package within another, and a function


def public_objects() -> Iterator[tuple[str, object]]:
    """Yield each public class and function once, under the shortest name that it is known by."""
    seen = set()
    for name in PUBLIC_PACKAGES:
        package = package_if_installed(name)
        for public in getattr(package, "__all__", []):
            item = getattr(package, public)
            is_ours = getattr(item, "__module__", "").startswith("attlas")
            if (inspect.isclass(item) or inspect.isfunction(item)) and is_ours and id(item) not in seen:
                seen.add(id(item))
                yield f"{name}.{public}", item


def package_if_installed(name: str) -> ModuleType | None:
    """Import a package, or return None when it is not built or its extra is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        extra = {"sklearn", "matplotlib", "starlette", "uvicorn", "transformers", "anywidget"}
        if error.name == name or error.name in extra:
            return None
        raise


def sections(text: str) -> dict[str, str]:
    """Split a numpydoc text into its underlined sections."""
    found = {}
    pieces = re.split(r"^([A-Z][A-Za-z ]+)\n-{3,}\n", text, flags=re.M)
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        found[title] = body
    return found


def docstring_violations(item: object) -> list[str]:
    """List what is missing in the documentation of a public class or function."""
    name = item.__qualname__
    text = inspect.getdoc(item) if "__doc__" in vars(item) or inspect.isfunction(item) else None
    if not text or not text.splitlines()[0].strip():
        return [f"{name}: no docstring"]
    parts = sections(text)
    found = []
    expected = parameter_names(item)
    documented = re.findall(r"^(\S[^:\n]*?)\s*(?::.*)?$", parts.get("Parameters", ""), flags=re.M)
    documented = [single.lstrip("*") for names in documented for single in re.split(r",\s*", names)]
    # The order is free: attention() is documented as attend() is, with v and dropout_p after that.
    if sorted(expected) != sorted(documented):
        found.append(f"{name}: Parameters documents {documented}, the signature has {expected}")
    if inspect.isfunction(item):
        tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
        returns = inspect.signature(item).return_annotation
        if returns not in (None, "None", inspect.Signature.empty) and not parts.keys() & {"Returns", "Yields"}:
            found.append(f"{name}: no Returns section")
        if any(isinstance(node, ast.Raise) for node in ast.walk(tree)) and "Raises" not in parts:
            found.append(f"{name}: no Raises section")
    if not is_exception(item) and ">>> " not in parts.get("Examples", ""):
        found.append(f"{name}: no Examples section")
    return found


def is_exception(item: object) -> bool:
    """Tell whether a public name is an error class; those are documented by their text alone."""
    return inspect.isclass(item) and issubclass(item, BaseException)


def parameter_names(item: object) -> list[str]:
    """List the parameters that a caller sees: none of an object that something else makes, as its text then says."""
    if inspect.isclass(item) and hasattr(item, "_fields"):
        return list(item._fields)
    if (is_exception(item) and "__init__" not in vars(item)) or (
        inspect.isclass(item) and "__init__" not in all_names(item)
    ):
        return []
    if getattr(item, "_is_protocol", False):  # it has no instances; Python gives it an __init__ of its own
        return []
    if inspect.isclass(item) and re.search(r"\b[Mm]ade by\b", inspect.getdoc(item).partition("\n\n")[0]):
        return []
    return [name for name in inspect.signature(item).parameters if not name.startswith("_")]


def all_names(item: type) -> set[str]:
    """Collect the names that a class and its bases within this package define."""
    return {name for base in item.__mro__ if base.__module__.startswith("attlas") for name in vars(base)}


def test_public_names_are_documented() -> None:
    violations = [violation for _, item in public_objects() for violation in docstring_violations(item)]
    assert not violations, "\n" + "\n".join(violations)


def test_public_methods_are_documented() -> None:
    violations = []
    for name, item in public_objects():
        for method, value in vars(item).items() if inspect.isclass(item) else ():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if (
                not method.startswith("_")
                and inspect.isfunction(function)
                and not inspect.getdoc(getattr(item, method))
            ):
                violations.append(f"{name}.{method}")
    assert not violations, "public methods without a docstring:\n" + "\n".join(violations)


def test_guide_lists_every_package() -> None:
    packages = package_entries()
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([a-z_]+)(?:\.py|/)` ", guide, flags=re.M))
    assert listed == packages, "the table of modules in CONTRIBUTING.md and src/attlas differ"


# ------------------------------------------------------------------------------------------------------------- builds


def source_files() -> set[str]:
    """List the files of the package that users must get."""
    kinds = {".py", ".typed", ".safetensors", ".json", ".md", ".txt", ".html", ".js", ".css", ".svg", ".pyi"}
    return {path.relative_to(ROOT / "src").as_posix() for path in PACKAGE.rglob("*") if path.suffix in kinds
            and not {"__pycache__", "kernels"} & set(path.parts)} | {"attlas/py.typed"}  # fmt: skip


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    # tests/test_build.py builds the kernels. Here CMake may be there and must not be asked.
    wheel = build("wheel", ROOT, tmp_path, ATTLAS_PURE="1")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    info = f"attlas-{VERSION}.dist-info/"
    assert wheel.name == f"attlas-{VERSION}-py3-none-any.whl"
    assert not source_files() - names, "missing in the wheel"
    assert not {name for name in names if not name.startswith(("attlas/", info))}, "does not belong in the wheel"
    assert not {name for name in names if name.endswith((".pyc", ".so", ".d.ts"))}
    assert f"{info}licenses/LICENSE" in names
    if (PACKAGE / "models").is_dir():
        assert any(name.startswith("attlas/models/") and name.endswith(".safetensors") for name in names)


def test_shipped_model_is_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (PACKAGE / "models").rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= MODEL_BYTES, f"the model in the package has {sum(sizes.values())} bytes: {sizes}"


def test_sdist_can_build_the_wheel(tmp_path: Path) -> None:
    archive = build("sdist", ROOT, tmp_path, ATTLAS_PURE="1")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "tests/test_house.py"}
    needed |= {f"src/{name}" for name in source_files()}
    needed |= {path.relative_to(ROOT).as_posix() for path in (PACKAGE / "engine/backends/native/kernels").iterdir()}
    needed |= {"CMakeLists.txt", "editable/CMakeLists.txt", "tests/engine/native/cpp/check.h"}
    assert not needed - names, "missing in the sdist"
    assert not {name for name in names if name.startswith((".venv", "demo-output", "dist"))}
    editable = {"editable", "editable/CMakeLists.txt", "editable/.gitignore"}
    assert not {name for name in names if name.startswith("editable")} - editable
    assert not {name for name in names if name.endswith((".so", ".o"))}
