"""The arrows between the rooms, and what importing them costs."""

import ast
import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "checkpoints": {"jax", "flax", "pallas_kernels", "bonsai_jax"},
    "pallas_kernels": {"checkpoints", "bonsai_jax"},
    "bonsai_jax": set(),
}


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere in it."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            packages.add(node.module.split(".")[0])
    return packages


# The rooms of bonsai_jax, folders and files, the lowest first: a room imports only rooms of lines above its
# own. "__init__" is what users import.
ROOMS = (
    ("arguments",),
    ("choices", "compile_cache", "forks", "machine", "progress", "threads", "tokens"),
    ("config", "constraints", "sampling_params", "starting"),
    ("weights",),
    ("network",),
    ("decoding",),
    ("adapters", "card"),
    ("model",),
    ("engine", "making", "nnx", "save"),
    ("research", "training"),
    ("protocols", "text", "tunix"),
    ("__init__",),
    ("batch", "server"),
    ("measure",),
    ("cli",),
    ("__main__",),
)
ROOM_NAMES = {name for line in ROOMS for name in line}


def room(path: Path) -> str:
    """The room of bonsai_jax that a file is in."""
    return path.relative_to(ROOT / "bonsai_jax").parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    """The rooms of bonsai_jax that a file imports anywhere in it, also inside of functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for package, *below in (module.split(".") for module in modules):
            if package == "bonsai_jax":
                rooms.add(below[0] if below and below[0] in ROOM_NAMES else "__init__")
    return rooms


def test_every_room_is_in_the_list_and_no_other():
    assert {room(path) for path in (ROOT / "bonsai_jax").rglob("*.py")} == ROOM_NAMES


@pytest.mark.parametrize("name", sorted(ROOM_NAMES))
def test_rooms_import_lower_rooms_alone(name):
    line = next(i for i, names in enumerate(ROOMS) if name in names)
    lower = {name, *(other for names in ROOMS[:line] for other in names)}
    for path in (ROOT / "bonsai_jax").rglob("*.py"):
        if room(path) == name:
            assert rooms_imported(path) <= lower, path


def test_tokens_know_no_model():
    for path in (ROOT / "bonsai_jax" / "tokens").glob("*.py"):
        assert rooms_imported(path) <= {"tokens"} and not imports(path) & {"jax", "pallas_kernels"}, path


def test_only_the_command_line_measures():
    for path in (ROOT / "bonsai_jax").rglob("*.py"):
        assert room(path) in ("cli", "measure") or "measure" not in rooms_imported(path), path


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_arrows_point_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not imports(path) & FORBIDDEN[package], path


# What kernels are written in, products, and what is made of these: each imports those before it alone.
FOLDERS = ("gpu", "matmul", "attention", "experts", "latent", "step")


def test_folders_of_kernels_import_no_later_ones():
    for at, folder in enumerate(FOLDERS):
        for path in (ROOT / "pallas_kernels" / folder).rglob("*.py"):
            source = path.read_text()
            for later in FOLDERS[at + 1 :]:
                assert f"pallas_kernels.{later}" not in source, path


def imported_files(name: str, source: str, files) -> set[str]:
    """Those of `files` that the file called `name` imports anywhere in it, also inside of functions; of
    import_module(f"{__name__}.{...}") every file that it may be."""
    taken = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            taken |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & set(files)
            taken |= modules if len(modules) == len(node.names) else modules | {node.module}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            start = known_start(node.args[0], name)
            taken |= {file for file in files if start and file.startswith(start) and file != name}
    return taken & set(files)


def known_start(argument: ast.expr, name: str) -> str:
    """How the module that an f-string names begins; "" for a variable (bonsai_jax/__init__.py has one, and
    names what it may be for the type checker)."""
    start = ""
    for part in argument.values if isinstance(argument, ast.JoinedStr) else [argument]:
        if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == "__name__":
            start += name
        elif isinstance(part, ast.Constant):
            start += str(part.value)
        else:
            break
    return start


def test_only_one_folder_imports_private_parts_of_jax():
    """An upgrade of jax then is a matter of pallas_kernels/gpu."""
    for package in FORBIDDEN:
        for path in (ROOT / package).rglob("*.py"):
            assert "jax._src" not in path.read_text() or path.parent == ROOT / "pallas_kernels" / "gpu", path


def test_files_do_not_import_in_a_circle():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in FORBIDDEN
        for path in (ROOT / package).rglob("*.py")
    }
    graph = {name: imported_files(name, path.read_text(), files) for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_a_circle_by_name_is_seen():
    files = {
        "pallas_kernels.formats": 'def get(name): importlib.import_module(f"{__name__}.{name}")',
        "pallas_kernels.formats.q4_k": "from pallas_kernels.matmul.int_mma.decode_block import Unit",
        "pallas_kernels.matmul.int_mma.decode_block": "from pallas_kernels import formats",
    }
    graph = {name: imported_files(name, source, files) for name, source in files.items()}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


def test_the_tests_page_names_every_module_and_every_test():
    """tests/README.md: a module by its name, or by its folder's; names behind the first are of its folder."""
    modules, tests = set(), set()
    for row in re.findall(r"^\| (.*?) \| (.*?) \|", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE):
        names = re.findall(r"`([\w/]+(?:\.py|/))`", row[0])
        modules |= {f"{os.path.dirname(names[0])}/{name}" if "/" not in name else name for name in names}
        tests |= set(re.findall(r"`([\w/]+\.py)`", row[1]))
    files = {str(path.relative_to(ROOT)) for package in FORBIDDEN for path in (ROOT / package).rglob("*.py")}
    named = {file for file in files if any(file.startswith(name) for name in modules)}
    assert {file for file in files - named if Path(file).name not in ("__init__.py", "__main__.py")} == set()
    assert all(any(file.startswith(name) for file in files) for name in modules)
    assert tests == {str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}


def test_only_one_file_looks_at_the_device():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        words = ("default_backend", "default_device", "jax.devices", "local_devices", "device_kind")
        looks = any(word in path.read_text() for word in words)
        assert looks == (path.name == "device.py"), path


def test_importing_needs_no_more_than_numpy_jax_flax_and_jaxtyping():
    """GPU machines may lack the rest. Flax itself brings rich."""
    script = (
        "import sys, json\n"
        "for name in ('typer', 'jinja2', 'tokenizers', 'huggingface_hub', 'safetensors', 'gguf'):\n"
        "    sys.modules[name] = None  # importing it now fails\n"
        "import bonsai_jax, checkpoints, pallas_kernels\n"
        "bonsai_jax.load, bonsai_jax.Tokenizer, bonsai_jax.step  # attributes are imported when first used\n"
        "checkpoints.open_checkpoint('synth:tiny-llama:q8_0')\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "bonsai_jax.cli" not in json.loads(done.stdout)


def test_a_file_or_folder_that_shadows_ours_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import bonsai_jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    shadowed = (tmp_path / "checkpoints" / "__init__.py").write_text("")
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr  # a folder without __init__.py is weaker than a package
    assert shadowed == 0 and again.returncode == 1
    assert f"Python found {tmp_path / 'checkpoints'}; rename that folder" in again.stderr
    shutil.rmtree(tmp_path / "checkpoints")
    for name in ("checkpoints.py", "pallas_kernels.py"):
        (tmp_path / name).write_text("")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 1 and f"Python found {tmp_path / name}; rename that file" in done.stderr
        (tmp_path / name).unlink()


def test_a_warning_of_pytest_benchmark_stops_no_run(tmp_path):
    """Its releases up to 5.2.3 warn while pytest starts, because our options name --dist."""
    (tmp_path / "benchmark.py").write_text(
        "import warnings\nclass PytestBenchmarkWarning(Warning): pass\n"
        "def pytest_sessionstart():\n    warnings.warn(PytestBenchmarkWarning(\n"
        "        'Benchmarks are automatically disabled because xdist plugin is active.'))\n"
    )
    (tmp_path / "test_one.py").write_text("def test(): pass\n")
    options = (
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        tmp_path,
        "-p",
        "benchmark",
        "-p",
        "no:cacheprovider",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_one.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Words that say nothing in a name, and "of", alone or at the beginning of one: each has a better noun.
EMPTY_WORDS = {
    "of",
    "held",
    "told",
    "mine",
    "wanted",
    "found",
    "there",
    "here",
    "anew",
    "aside",
    "nobodys",
    "nowhere",
}
EMPTY_WORDS |= {"unhurried", "never", "kept", "behind", "ahead", "finished"}


def names_given(tree: ast.AST):
    """(line, name) for each variable, argument, field, function and class that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


@pytest.mark.parametrize("package", FORBIDDEN)
def test_names_are_terms_of_the_field(package):
    for path in (ROOT / package).rglob("*.py"):
        for line, name in names_given(ast.parse(path.read_text())):
            assert name not in EMPTY_WORDS and not name.startswith("of_"), f"{path}:{line}: {name}"


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_names_in_tests_and_benchmarks_say_what_they_are(folder):
    """The words that say least. Others of EMPTY_WORDS are still used there."""
    for path in (ROOT / folder).rglob("*.py"):
        for line, name in names_given(ast.parse(path.read_text())):
            assert name not in {"held", "told", "mine", "wanted", "anew", "nobodys", "nowhere"}, (
                f"{path}:{line}"
            )
