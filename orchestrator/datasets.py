"""A run's data as its config is checked: does it exist, does it fit the model and the training, what lies where.

Called by orchestrator.config (check), orchestrator.load and orchestrator.submission.prepare. Reads headers, no tokens.
"""
import dataclasses
import json
import math
import os
from pathlib import Path

from jobs.spec.load import Problem, SpecError, from_dict, to_dict
from jobs.spec.sources import all_data, fit_problems, named_sources, whole_shares, with_token_files
from jobs.spec.tokens import TokensInfo, absolute_source, is_token_file, read_info
from jobs.spec.training import DataSpec, SourceSpec, TrainingSpec


FILES = "files.json"  # in the run's folder of data
IDENTITY = ("num_tokens", "dtype", "num_documents", "vocab_size", "checksum")


def absolute_data(data: DataSpec) -> DataSpec:
    """Paths as they were meant where the command was typed."""
    sources = [dataclasses.replace(source, path=absolute_source(source.path)) for source in data.sources]
    return dataclasses.replace(data, path=None if data.path is None else absolute_source(data.path), sources=sources)


def absolute_training(training: TrainingSpec | None) -> TrainingSpec | None:
    """With the paths of what is validated on as they were meant."""
    validation = training and training.validation
    if validation is None:
        return training
    return dataclasses.replace(training, validation=dataclasses.replace(validation,
                                                                        data=absolute_data(validation.data)))


def data_problems(data: DataSpec | None, *, vocab_size: int | None, training: TrainingSpec | None,
                  made: dict[str, TokensInfo] | None = None) -> list[Problem]:
    """Of what is trained on and what is validated on. `made`: of sources that were text and are tokenized by now, by
    their place in the config."""
    datasets = all_data(data, training)
    found = [problem for at, one in datasets.items() if (problem := _given_problem(one, at=at)) is not None]
    weights = [source.weight for one in datasets.values() for source in one.all_sources]
    if found or not all(0 < weight < math.inf for weight in weights):
        return found  # weights are reported with all other numbers
    infos = dict(made or {})
    found = [problem for at, one in datasets.items() for problem in _weight_problems(one, at=at)]
    for where, source in named_sources(datasets):
        if where in infos:
            continue
        infos[where] = None
        if is_token_file(source.path):
            try:
                infos[where] = read_info(Path(source.path))
            except SpecError as error:
                found += [dataclasses.replace(problem, where=f"{where}.path") for problem in error.problems]
        elif not os.path.exists(source.path):  # False, not an error, for a name too long
            found.append(Problem(where=f"{where}.path", value=source.path, message="does not exist; give a folder or a "
                                 "text file, or what `orc data tokenize` made"))
    if not found and vocab_size is not None and training is not None:
        found = fit_problems(datasets, infos, vocab_size=vocab_size, training=training)
    return found


def _given_problem(data: DataSpec, *, at: str) -> Problem | None:
    if data.path is None and not data.sources:
        return Problem(where=f"{at}.path", value=None, message=f"is missing; give it, or {at}.sources")
    if data.path is not None and data.sources:
        return Problem(where=f"{at}.path", value=data.path, message=f"is given and {at}.sources, too; give one of them")
    return None


def _weight_problems(data: DataSpec, *, at: str) -> list[Problem]:
    try:
        whole_shares(tuple(source.weight for source in data.all_sources))
    except ValueError as error:
        source = data.all_sources[error.args[0]]
        return [Problem(where=f"{at}.sources[{error.args[0]}].weight", value=source.weight,
                        message="is less than one sample in 65,536; raise it, or leave the source out")]
    return []


# ------------------------------------------------------------------ the same data from the first attempt to the last
def record_files(datasets: dict[str, DataSpec], folder: Path) -> None:
    """Write down what the token files are that a run begins with, by their place in the config: a run's own may move
    with its directory."""
    files = {where: to_dict(read_info(Path(source.path))) for where, source in _read_files(datasets, folder)}
    (folder / FILES).write_text(json.dumps(files, indent=1) + "\n")


def refuse_changed_files(datasets: dict[str, DataSpec], folder: Path) -> None:
    """Raises SpecError where a file is not the one that the run began with: it would go on with other samples."""
    path = folder / FILES
    recorded = json.loads(path.read_text()) if path.is_file() else {}
    if recorded.keys() != {where for where, _ in named_sources(datasets)}:
        raise SpecError([Problem(where="data", value=str(path), message="does not say what the run began with: it "
                                 "was prepared with other sources, or by another version; put them back, or start a "
                                 "run of another name")])
    for where, source in _read_files(datasets, folder):
        before, now = from_dict(TokensInfo, recorded[where]), read_info(Path(source.path))
        if any(getattr(before, name) != getattr(now, name) for name in IDENTITY):
            raise SpecError([Problem(where=f"{where}.path", value=source.path, message="is not the file that the run "
                                     f"began with ({before.num_tokens:,} tokens, {before.checksum or 'no checksum'}); "
                                     "put that back, or start a run of another name")])


def _read_files(datasets: dict[str, DataSpec], folder: Path) -> list[tuple[str, SourceSpec]]:
    """The token files that ranks read, each with its place in the config."""
    read = [source for at, data in datasets.items() for source in with_token_files(data, folder, at=at).all_sources]
    return [(where, source) for (where, _), source in zip(named_sources(datasets), read, strict=True)]
