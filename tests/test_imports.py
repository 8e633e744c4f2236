"""Where heavy packages may be imported, and that the light parts load without them.

import-linter holds the direction of imports and the homes of the heavy packages (pyproject.toml). Here is what it
cannot say: what one `import` pulls in at run time, and that every folder with modules is a package.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import LIGHT_MODULES, PACKAGES, ROOT

HEAVY = {"cuda", "cupy", "dash", "flask", "optuna", "optuna_dashboard", "plotly", "ray", "torch", "transformers"}


def sources() -> Iterator[Path]:
    """Every Python file of the six packages."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def names_at_import(tree: ast.Module) -> Iterator[str]:
    """The top-level packages that run when the module is imported: its imports outside functions and type checking."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_load_no_heavy_package(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert HEAVY.isdisjoint(loaded.stdout.split())


def test_shared_modules_import_no_heavy_package_at_load() -> None:
    """A package's own list of workloads, ops or executors must not load what only one of them needs."""
    offenders = {
        str(path.relative_to(ROOT)): heavy
        for path in sources()
        if path.name in ("__init__.py", "__main__.py", "base.py", "errors.py", "registry.py")
        and (heavy := HEAVY.intersection(names_at_import(ast.parse(path.read_text()))))
    }
    assert offenders == {}


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in sources()}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_no_module_is_reached_by_editing_the_path() -> None:
    """Packages find each other by name; a module that edits `sys.path` works only from where its author stood."""
    edits = [str(path.relative_to(ROOT)) for path in sources() if "sys.path" in path.read_text()]
    assert edits == []
