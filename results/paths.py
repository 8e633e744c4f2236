"""Where best files are looked for and where they are written.

Looked for, first to last: the folder that the caller names (`--results`), else the one that `SPANTUNE_RESULTS` names;
`./results/best` in a checkout; the user's data folder; what this package ships. Written to: the first of these that
may be written, which the shipped ones never are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from results.best import best_path
from results.errors import ResultsPathError

VARIABLE = "SPANTUNE_RESULTS"
SHIPPED = Path(__file__).parent / "best"


class Origin(StrEnum):
    """Who named a folder of best files."""

    OPTION = "option"
    ENVIRONMENT = "environment"
    CHECKOUT = "checkout"
    USER = "user"
    SHIPPED = "shipped"


@dataclass(frozen=True)
class Place:
    """A folder of best files and who named it."""

    folder: Path
    origin: Origin

    def __str__(self) -> str:
        return f"{self.folder} ({self.origin})"


def search_path(
    results: str | Path | None = None,
    *,
    working_directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Place, ...]:
    """The folders to look in, in order, those that exist.

    Args:
        results: the folder that the caller names.
        working_directory: where a checkout would be, the current one when None.
        environment: of the process when None.

    Raises:
        ResultsPathError: the caller or the environment names a folder that does not exist. A typing error would
            otherwise load a default config without a word.
    """
    places = _places(results, working_directory, environment)
    for place in places:
        if place.origin in (Origin.OPTION, Origin.ENVIRONMENT) and not place.folder.is_dir():
            raise ResultsPathError(f"{place.folder}: no such folder, named by {_named_by(place.origin)}")
    found: dict[Path, Place] = {}
    for place in places:
        if place.folder.is_dir():
            # In a checkout the shipped folder is the checkout's own: the first name of a folder stands.
            found.setdefault(place.folder.resolve(), place)
    return tuple(found.values())


def write_place(
    results: str | Path | None = None,
    *,
    working_directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Place:
    """The folder that new winners are published to; need not exist yet.

    Raises:
        ResultsPathError: what should be that folder is not one, or may not be written.
    """
    place = _places(results, working_directory, environment)[0]
    if place.folder.exists() and not place.folder.is_dir():
        raise ResultsPathError(f"{place.folder}: not a folder, named by {_named_by(place.origin)}")
    parent = next(folder for folder in (place.folder, *place.folder.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ResultsPathError(f"{place.folder}: cannot be written below {parent}, named by {_named_by(place.origin)}")
    return place


def best_files(places: tuple[Place, ...], device: str, workload: str) -> tuple[tuple[Path, Place], ...]:
    """The best files of a workload on a device along a search path, those that exist."""
    paths = [(best_path(place.folder, device, workload), place) for place in places]
    return tuple((path, place) for path, place in paths if path.is_file())


def _places(
    results: str | Path | None, working_directory: Path | None, environment: Mapping[str, str] | None
) -> tuple[Place, ...]:
    environment = os.environ if environment is None else environment
    here = working_directory or Path.cwd()
    places = []
    if results is not None:
        places.append(Place(Path(results), Origin.OPTION))
    elif environment.get(VARIABLE):
        places.append(Place(Path(environment[VARIABLE]), Origin.ENVIRONMENT))
    checkout = here / "results" / "best"
    if checkout.is_dir() or (here / ".git").exists():
        places.append(Place(checkout, Origin.CHECKOUT))
    places.append(Place(_user_folder(environment), Origin.USER))
    places.append(Place(SHIPPED, Origin.SHIPPED))
    return tuple(places)


def _user_folder(environment: Mapping[str, str]) -> Path:
    """By the XDG rules, which also say that a relative `XDG_DATA_HOME` does not count."""
    named = Path(environment.get("XDG_DATA_HOME", ""))
    data = named if named.is_absolute() else Path.home() / ".local" / "share"
    return data / "spantune" / "best"


def _named_by(origin: Origin) -> str:
    return {Origin.OPTION: "--results", Origin.ENVIRONMENT: VARIABLE}.get(origin, f"the {origin} rule")
