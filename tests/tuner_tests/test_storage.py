"""Storage: schemes, whole records, torn files, strangers' trials, older studies, one process per GPU."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from results.record import Outcome, TrialRecord
from search_spaces.config import to_json
from tests.tuner_tests.test_sampling import SMALL
from tuner import devices
from tuner.devices import DeviceLock, check_device
from tuner.errors import DeviceBusy, OptionError, StorageBusy
from tuner.sampling import distributions
from tuner.storage import DEFAULT_FOLDER, Location, TrialStore, file_name, older_winners, parse_location
from workloads.errors import InputError

NAME = "pdl_chain/l4n1024/sim-fake/cmp/aaaa/bbbb"
DISTRIBUTIONS = distributions(SMALL)


def trial(
    outcome: Outcome, ratio: float | None = None, seed: int = 0
) -> tuple[dict[str, int | float | str], TrialRecord]:
    point = SMALL.sample(random.Random(seed))
    samples = (40.0, 41.0) if ratio is not None else ()
    record = TrialRecord(
        outcome, to_json(SMALL.decode(point)), "why", "p", "n", "bits", 40.5, ratio, samples, samples, True, 0.5
    )
    return point, record


TRIALS = [trial(Outcome.SCORED, 0.9, 0), trial(Outcome.WRONG, None, 1), trial(Outcome.LOST, None, 2)]


@pytest.mark.parametrize("scheme", ["journal:{}/a/b.journal", "sqlite:///{}/b.db"])
def test_records_come_back_whole(tmp_path: Path, scheme: str) -> None:
    location = parse_location(scheme.format(tmp_path))
    store = TrialStore(location, NAME)
    for point, record in TRIALS:
        store.append(point, record, DISTRIBUTIONS)
    assert TrialStore(location, NAME).load() == TRIALS


def test_optunas_own_tools_read_the_study(tmp_path: Path) -> None:
    path = tmp_path / "s.journal"
    store = TrialStore(Location("journal", str(path)), NAME)
    for point, record in TRIALS:
        store.append(point, record, DISTRIBUTIONS)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    study = optuna.load_study(study_name=NAME, storage=storage)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.FAIL]
    assert study.best_value == 0.9 and study.best_trial.user_attrs["outcome"] == "scored"
    assert [max(t.constraints.values(), default=-1.0) > 0 for t in study.trials] == [False, True, False]


@pytest.mark.parametrize(
    "text", ["mysql://host/x", "journal:", "journal", "sqlite:", "sqlite://", "/tmp/x.journal", "", "postgresql:"]
)
def test_unknown_schemes_are_one_line(text: str) -> None:
    with pytest.raises(OptionError, match="use journal:PATH, sqlite:///PATH or postgresql://") as caught:
        parse_location(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["journal:/proc/nowhere/x", "sqlite:////nowhere/at/all.db", "postgresql+psycopg://nobody@127.0.0.1:1/x"]
)
def test_storage_that_cannot_be_opened_is_bad_input(text: str) -> None:
    with pytest.raises(OptionError, match="cannot be opened") as caught:
        TrialStore(parse_location(text), NAME)
    assert "\n" not in str(caught.value)


def test_passwords_are_not_shown() -> None:
    assert "secret" not in str(parse_location("postgresql://me:secret@host/db"))


def test_the_default_journal_is_named_after_the_study() -> None:
    location = parse_location(None, NAME)
    assert location.scheme == "journal" and Path(location.target).parent == DEFAULT_FOLDER
    assert "/" not in file_name(NAME)


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_a_torn_last_line_loses_only_itself(tmp_path: Path, cut: int) -> None:
    location = Location("journal", str(tmp_path / "s.journal"))
    store = TrialStore(location, NAME)
    for point, record in TRIALS:
        store.append(point, record, DISTRIBUTIONS)
    path = Path(location.target)
    path.write_bytes(path.read_bytes()[:-cut])
    store = TrialStore(location, NAME)
    assert store.load() == TRIALS[:2]
    store.append(*TRIALS[2], DISTRIBUTIONS)
    assert TrialStore(location, NAME).load() == TRIALS


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("one\ntwo")
    with pytest.raises(OptionError, match="cannot be opened"):
        TrialStore(Location("journal", str(path)), NAME)
    assert path.read_text() == "one\ntwo"


def test_trials_that_others_left_running_are_failed(tmp_path: Path) -> None:
    location = Location("journal", str(tmp_path / "s.journal"))
    store = TrialStore(location, NAME)
    store._study.ask(DISTRIBUTIONS)
    again = TrialStore(location, NAME)
    assert [t.state for t in again._study.trials] == [TrialState.FAIL]
    assert again.load() == []


def test_older_studies_offer_their_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = NAME.replace("aaaa", "0000")
    store = TrialStore(parse_location(None, old), old)
    for seed, ratio in enumerate((0.95, 0.85, 0.99)):
        store.append(*trial(Outcome.SCORED, ratio, seed), DISTRIBUTIONS)
    assert older_winners(parse_location(None, NAME), NAME) == [trial(Outcome.SCORED, 0.85, 1)[1].config]
    assert older_winners(parse_location(None, old), old) == []
    other = NAME.replace("sim-fake", "sim-other")
    assert older_winners(parse_location(None, other), other) == []


# --- Devices ---


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:x", "gpu:0", "sim:", "sim:../x", ""])
def test_malformed_devices_are_refused(device: str) -> None:
    with pytest.raises(InputError, match="use cuda:N or sim:NAME"):
        check_device(device)


def test_one_process_measures_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANTUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(devices, "gpu_uuids", lambda: ("aa", "bb"))
    first = DeviceLock("cuda:0")
    with pytest.raises(DeviceBusy, match=r"cuda:0 is being measured by another process \(pid \d+\)"):
        DeviceLock("cuda:0")
    DeviceLock("cuda:1").release()
    first.release()
    first.release()
    DeviceLock("cuda:0").release()


def test_simulated_devices_need_no_lock() -> None:
    lock = DeviceLock("sim:b300")
    assert lock.descriptors() == ()
    lock.release()


def test_a_journal_is_claimed_by_one_process_and_free_when_it_dies(tmp_path: Path) -> None:
    location = parse_location(f"journal:{tmp_path}/s.journal", "s")
    code = (
        "import sys, time; from tuner.storage import TrialStore, parse_location\n"
        "store = TrialStore(parse_location(sys.argv[1], 's'), 's')\n"
        "with store.claimed():\n    print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, f"journal:{tmp_path}/s.journal"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        store = TrialStore(location, "s")
        with pytest.raises(StorageBusy, match="another process runs a study on .*s.journal"), store.claimed():
            pass
    finally:
        holder.kill()
        holder.communicate()
    with store.claimed():
        pass
    with store.claimed():
        pass
