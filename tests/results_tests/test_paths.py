"""The search path: its order, who named what, and where winners go."""

from __future__ import annotations

from pathlib import Path

import pytest

from results import best, paths
from results.errors import ResultsPathError
from results.files import LockTimeout, locked
from results.paths import Origin
from tests.results_tests.entries import entry


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with a data folder, and a shipped folder."""
    (tmp_path / "home" / ".local" / "share" / "spantune" / "best").mkdir(parents=True)
    (tmp_path / "shipped").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv(paths.VARIABLE, raising=False)
    monkeypatch.setattr(paths, "SHIPPED", tmp_path / "shipped")
    return tmp_path


def checkout(home: Path) -> Path:
    folder = home / "checkout"
    (folder / "results" / "best").mkdir(parents=True)
    return folder


def origins(results: str | None = None, **arguments: object) -> list[Origin]:
    return [place.origin for place in paths.search_path(results, **arguments)]  # type: ignore[arg-type]


def test_the_order(home: Path) -> None:
    here = checkout(home)
    (home / "mine").mkdir()
    environment = {paths.VARIABLE: str(home / "mine")}
    rest = [Origin.CHECKOUT, Origin.USER, Origin.SHIPPED]
    assert origins(working_directory=here, environment={}) == rest
    assert origins(working_directory=here, environment=environment) == [Origin.ENVIRONMENT, *rest]
    option = origins(str(home / "mine"), working_directory=here, environment={paths.VARIABLE: "not looked at"})
    assert option == [Origin.OPTION, *rest]


def test_outside_a_checkout(home: Path) -> None:
    assert origins(working_directory=home, environment={}) == [Origin.USER, Origin.SHIPPED]
    assert paths.write_place(working_directory=home, environment={}).origin is Origin.USER


def test_a_folder_is_listed_once_by_its_first_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = checkout(home)
    monkeypatch.setattr(paths, "SHIPPED", here / "results" / "best")
    found = origins(str(here / "results" / ".." / "results" / "best"), working_directory=here, environment={})
    assert found == [Origin.OPTION, Origin.USER]


@pytest.mark.parametrize(("environment", "by"), [({}, "--results"), ({paths.VARIABLE: "none"}, paths.VARIABLE)])
def test_a_named_folder_must_exist_to_be_read(home: Path, environment: dict[str, str], by: str) -> None:
    with pytest.raises(ResultsPathError, match=f"none: no such folder, named by {by}"):
        paths.search_path(None if environment else "none", working_directory=home, environment=environment)


def test_winners_go_to_the_first_place_that_is_ours(home: Path) -> None:
    here = home / "work"
    (here / ".git").mkdir(parents=True)
    place = paths.write_place(working_directory=here, environment={})
    assert (place.folder, place.origin) == (here / "results" / "best", Origin.CHECKOUT)
    assert paths.write_place("new", working_directory=here).folder == Path("new")
    assert paths.write_place(working_directory=here, environment={paths.VARIABLE: "env"}).folder == Path("env")
    data = {"XDG_DATA_HOME": str(home / "data")}
    assert paths.write_place(working_directory=home, environment=data).folder == home / "data" / "spantune" / "best"
    relative = paths.write_place(working_directory=home, environment={"XDG_DATA_HOME": "data"})
    assert relative.folder == home / "home" / ".local" / "share" / "spantune" / "best"


def test_a_file_is_no_place_to_write_to(home: Path) -> None:
    (home / "file").touch()
    with pytest.raises(ResultsPathError, match="file: not a folder, named by --results"):
        paths.write_place(home / "file")


def test_best_files_follow_the_search_path(home: Path) -> None:
    user = home / "home" / ".local" / "share" / "spantune" / "best"
    first, second = best.publish(user, entry()), best.publish(home / "shipped", entry())
    places = paths.search_path(working_directory=home, environment={})
    assert paths.best_files(places, "Test GPU", "attention_pre") == ((first, places[0]), (second, places[1]))
    assert paths.best_files(places, "Test GPU", "pdl_chain") == ()
    assert str(places[1]) == f"{home / 'shipped'} (shipped)"


def test_a_writer_waits_no_longer_than_told(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "file"),
        pytest.raises(LockTimeout, match="another process"),
        locked(tmp_path / "file", 0.05),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_or_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsPathError, match="cannot be written below .*file"):
        paths.write_place(tmp_path / "file" / "sub")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ResultsPathError, match="named by --results"):
        paths.write_place(tmp_path / "new")
