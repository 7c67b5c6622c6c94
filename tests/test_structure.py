"""The arrows between the rooms, and what importing them costs."""

import ast
import graphlib
import json
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
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_arrows_point_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not imports(path) & FORBIDDEN[package], path


def test_files_do_not_import_in_a_circle():
    """Imports inside of functions count too."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in FORBIDDEN
        for path in (ROOT / package).rglob("*.py")
    }
    graph = {}
    for name, path in files.items():
        taken = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                taken |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = {f"{node.module}.{alias.name}" for alias in node.names} & files.keys()
                taken |= modules if len(modules) == len(node.names) else modules | {node.module}
        graph[name] = taken & files.keys()
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_only_one_file_looks_at_the_device():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        looks = any(word in path.read_text() for word in ("default_backend", "jax.devices", "device_kind"))
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


def test_a_folder_that_shadows_ours_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import bonsai_jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    shadowed = (tmp_path / "checkpoints" / "__init__.py").write_text("")
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr  # a folder without __init__.py is weaker than a package
    assert shadowed == 0 and again.returncode == 1
    assert f"Python found {tmp_path / 'checkpoints'}; rename that folder" in again.stderr
