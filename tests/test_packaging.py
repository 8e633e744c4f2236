"""The wheel holds every module and data file, and works from an environment outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.project import LIGHT_MODULES, PACKAGES, ROOT

DATA = ("backends/cuda/include/**/*.cuh", "backends/simulator/*.json", "results/best/**/*.json")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def shipped() -> set[str]:
    """What the checkout holds and the wheel must hold too."""
    paths = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    paths.update(path for pattern in DATA for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix() for path in paths if "studies" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy, so that no build folder of an earlier build can leak into it."""
    top = tmp_path_factory.mktemp("wheel")
    source = top / "source"
    source.mkdir()
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__", "studies"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-build-isolation", "--no-index", "--wheel-dir", str(top), "."]
    done = subprocess.run([*build, *options], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = top.glob("spantune-*.whl")
    return built


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An environment with nothing but the wheel, unpacked where an installer would put it."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    done = subprocess.run(
        [*install, "--quiet", "--no-deps", "--no-index", str(wheel)], cwd=home, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return python


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    assert sorted(shipped() - held) == []
    extra = {name for name in held if ".dist-info/" not in name} - shipped()
    assert sorted(extra) == []


def test_wheel_carries_its_licence(wheel: Path) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_import_from_the_wheel_alone(empty_python: Path, tmp_path: Path, module: str) -> None:
    code = f"import {module}; print({module.partition('.')[0]}.__file__)"
    done = subprocess.run([empty_python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(empty_python.parent.parent)


def test_the_command_runs_from_the_wheel(empty_python: Path, tmp_path: Path) -> None:
    """With the dependencies of this environment, but spantune itself from the wheel only."""
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    command = empty_python.parent / "spantune"
    done = subprocess.run([command, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tune" in done.stdout
