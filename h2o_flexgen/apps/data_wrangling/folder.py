"""The folder of a data set: the download, unpacked, or one folder of it. What is missing is named with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h2o_flexgen.apps.data_wrangling.data_sets import DOWNLOAD, SPLITS, DataSet, QuestionKind, data_set_of, names_of

DATA_DIR, DATA_SET = "--data-dir", "--data-set"


@dataclass(frozen=True)
class Folder:
    path: Path
    data_set: DataSet

    @classmethod
    def of(cls, task: QuestionKind, given: str, name: str | None) -> Folder:
        """The folder that is given, or the data set of this name below it."""
        top = Path(given).expanduser()
        if not top.is_dir():
            raise ValueError(f"{DATA_DIR} {given} is no folder; {_advice(task)}")
        if name is None:
            own = top.resolve().name
            if own not in names_of(task):
                known = ", ".join(names_of(task))
                raise ValueError(f"{DATA_DIR} {given} is called like no data set of {task.name}; add {DATA_SET}: {known}")
            return cls(top, data_set_of(task, own, DATA_DIR))
        data_set = data_set_of(task, name, DATA_SET)
        below = f"{task.folder}/{name}"
        places = [top / place for place in (below, f"datasets/{below}", f"data/datasets/{below}", name)]
        if top.resolve().name == name:
            places.append(top)
        if (found := next((place for place in places if place.is_dir()), None)) is None:
            raise ValueError(f"{DATA_DIR} {given} has no data set {name}: there is no {places[0]}; {_advice(task)}")
        return cls(found, data_set)

    def file(self, name: str) -> Path:
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"{self.data_set.name} has no {name}: there is no {path}; {_advice(self.data_set.task)}")
        return path

    def split(self, name: str) -> Path:
        return self.file(SPLITS[name])


def _advice(task: QuestionKind) -> str:
    return f"unpack {DOWNLOAD}, which has {task.folder}/..., and give its folder"
