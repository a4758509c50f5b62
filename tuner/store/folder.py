"""One study's folder: where each file lies, and that nothing is ever written outside it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from tuner.errors import InputError
from tuner.records import RequestResult, TrialRecord
from tuner.store.files import read_text, usable_name, write_atomic
from tuner.store.serial import dumps, loads, read_requests, write_requests

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


class ResultsFolder:
    """Paths and files of one study, `root` = results/STUDY."""

    def __init__(self, root: Path) -> None:
        self.root = usable_name(root, "folder")

    @property
    def study_file(self) -> Path:
        return self.root / "study.json"

    @property
    def database(self) -> Path:
        return self.root / "optuna.db"

    @property
    def inputs(self) -> Path:
        return self.root / "inputs"

    @property
    def run_file(self) -> Path:
        return self.root / "run.json"

    def inside(self, *parts: str) -> Path:
        """A path below the root; InputError for a part that could lead elsewhere."""
        for part in parts:
            if not _NAME.fullmatch(part):
                raise InputError(
                    where=str(self.root),
                    field="file name",
                    value=part,
                    rule="may hold letters, digits, '.', '_' and '-' only and must begin with a letter or digit",
                    remedy="Rename the workload or study.",
                )
        return self.root.joinpath(*parts)

    def trial_folder(self, number: int, replicate: int) -> Path:
        return self.root / "trials" / f"{number:04d}-{replicate}"

    def new_attempt(self, number: int, replicate: int) -> Path:
        """An empty folder for a trial that is about to run; what an interrupted attempt left is kept aside."""
        folder = self.trial_folder(number, replicate)
        if folder.exists():
            attempt = 1
            while (aside := folder.with_name(f"{folder.name}.attempt{attempt}")).exists():
                attempt += 1
            folder.rename(aside)
        folder.mkdir(parents=True)
        return folder

    def write_trial(self, record: TrialRecord) -> Path:
        path = self.trial_folder(record.number, record.replicate) / "trial.json"
        write_atomic(path, dumps(record))
        return path

    def trials(self) -> tuple[TrialRecord, ...]:
        """Every finished trial, by number and replicate. A folder without trial.json is an attempt that never ended."""
        found = (loads(TrialRecord, read_text(path), str(path)) for path in self._trial_files())
        return tuple(sorted(found, key=lambda record: (record.number, record.replicate)))

    def _trial_files(self) -> Iterable[Path]:
        return sorted(
            path for path in self.root.glob("trials/*/trial.json") if re.fullmatch(r"\d+-\d+", path.parent.name)
        )

    def write_requests(self, folder: Path, name: str, requests: Iterable[RequestResult]) -> str:
        """Store the raw requests of one probe; returns the path relative to the trial's folder."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a file name: {name!r}")
        relative = f"probes/{name}.jsonl.gz"
        write_requests(folder / relative, requests)
        return relative

    def requests(self, record: TrialRecord, requests_file: str) -> tuple[RequestResult, ...]:
        """The raw requests behind one probe of `record`."""
        folder = self.trial_folder(record.number, record.replicate).resolve()
        path = (folder / requests_file).resolve()
        if not path.is_relative_to(folder):
            raise InputError(
                where=str(folder / "trial.json"),
                field="requests_file",
                value=requests_file,
                rule="must lie within the trial's folder",
                remedy="The record was altered; restore it.",
            )
        return read_requests(path)

    def keep_inputs(self, files: Mapping[str, Path | str]) -> None:
        """Copy the inputs as used, so that a study can be continued and reproduced from its own folder."""
        for name, source in files.items():
            target = self.inside("inputs", *Path(name).parts)
            if isinstance(source, Path):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
            else:
                write_atomic(target, source)
