"""What is wrong with a run's data is said before it starts: at its place in the config, with the value and a remedy."""
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jobs.data.writer import TokenWriter
from jobs.spec.load import SpecError
from jobs.spec.rundir import RunDir
from jobs.spec.sources import all_data
from jobs.spec.training import DataSpec, SourceSpec, TrainingSpec, ValidationSpec
from orchestrator.datasets import FILES, absolute_data, data_problems, refuse_changed_files
from orchestrator.load import load, load_traced, read_stored
from orchestrator.planner.plan import plan_json
from orchestrator.planning import make_plan
from orchestrator.submission.assemble import assemble_job
from orchestrator.submission.prepare import prepare, submit
from tests.helpers.orc import training_run

TRAINING = TrainingSpec(steps=10, seq_len=16, global_batch_size=4)

# changes of a good DataSpec, of a model's vocabulary and of the training → the problems' beginnings
WRONG = {
    "nothing": (dict(path=None), {}, {}, ["data.path: is missing; give it, or data.sources"]),
    "two ways": (dict(sources=[SourceSpec(path="x")]), {}, {}, ["is given and data.sources, too"]),
    "no file": (dict(path="nowhere"), {}, {}, ["data.path: 'nowhere' does not exist; give"]),
    "no index": (dict(path="lonely.bin"), {}, {}, ["data.path: 'lonely.bin' needs both lonely.bin and lonely.idx"]),
    "no source": (dict(path=None, sources=[SourceSpec(path="good.bin"), SourceSpec(path="nowhere.bin"),
                                           SourceSpec(path="nowhere")]), {}, {},
                  ["data.sources[1].path: 'nowhere.bin' needs both", "data.sources[2].path: 'nowhere' does not exist"]),
    "a small vocabulary": (dict(), dict(vocab_size=299), {},
                           ["model.vocab_size: 299 is below the vocabulary of 300 tokens of good.bin"]),
    "a small vocabulary for bytes": (dict(path="some.txt"), dict(vocab_size=255), {},
                                     ["model.vocab_size: 255 is below the vocabulary of 256 tokens of some.txt"]),
    "less than a sequence": (dict(), {}, dict(seq_len=1000), ["data.path: 'good.bin' holds 1,000 tokens, less than one "
                                                              "sequence: training.seq_len=1000 needs one more"]),
    "too few epochs": (dict(max_epochs=1.0), {}, dict(steps=1000),
                       ["data.max_epochs: 1.0 is less than the 64.52 epochs of good.bin that training.steps=1000"]),
    "too few epochs of one": (dict(path=None, max_epochs=2.0,
                                   sources=[SourceSpec(path="good.bin"), SourceSpec(path="other.bin", weight=3.0)]),
                              {}, dict(steps=60), ["data.max_epochs: 2.0 is less than the 15.00 epochs of other.bin"]),
    "nothing of a source": (dict(path=None, sources=[SourceSpec(path="good.bin"),
                                                     SourceSpec(path="other.bin", weight=1e-6)]), {}, {},
                            ["data.sources[1].weight: 1e-06 is less than one sample in 65,536"]),
    "two tokenizers": (dict(path=None, sources=[SourceSpec(path="some.txt"), SourceSpec(path="strange.bin")]), {}, {},
                       ["data.sources[1].path: 'strange.bin' is made with another tokenizer (t) than the sources "
                        "before it (bytes)"]),
}
FINE = {
    "a token file": dict(),
    "text": dict(path="some.txt"),
    "as often as it takes": dict(max_epochs=1.0),  # 40 samples of 62
    "a mixture": dict(path=None, sources=[SourceSpec(path="good.bin", weight=0.3), SourceSpec(path="some.txt")]),
}


# what is validated on; batches → the problem's beginning, None: it fits. good.bin holds 62 sequences, other.bin 12
PLACE = "training.validation.data"
VALIDATED = {
    "it fits exactly": (dict(path="good.bin"), 15, None),
    "a sequence would be used twice": (dict(path="good.bin"), 16, "training.validation.batches: 16 of 4 sequences of "
                                       "16 tokens take 64 sequences of good.bin, which holds 62 (1,000 tokens); "
                                       "try 15, or"),
    "not even one batch": (dict(path="tiny.bin"), 1, "training.validation.batches: 1 of 4 sequences of 16 tokens take "
                           "4 sequences of tiny.bin, which holds 3 (50 tokens); give more data"),
    "a source of a mixture is too short": (
        dict(sources=[SourceSpec(path="good.bin"), SourceSpec(path="other.bin", weight=3.0)]), 5,
        "training.validation.batches: 5 of 4 sequences of 16 tokens take 15 sequences of other.bin, which holds 12 "
        "(200 tokens); try 4"),
    "and one that is just long enough": (
        dict(sources=[SourceSpec(path="good.bin"), SourceSpec(path="other.bin", weight=3.0)]), 4, None),
    "no file": (dict(path="nowhere"), 1, f"{PLACE}.path: 'nowhere' does not exist"),
    "no index": (dict(path="lonely.bin"), 1, f"{PLACE}.path: 'lonely.bin' needs both"),
    "nothing": (dict(), 1, f"{PLACE}.path: is missing; give it, or {PLACE}.sources"),
    "another tokenizer than what is trained on": (dict(path="strange.bin"), 1, f"{PLACE}.path: 'strange.bin' is made "
                                                  "with another tokenizer (t) than the sources before it (bytes)"),
    "part of an epoch at most": (dict(path="good.bin", max_epochs=0.5), 10, f"{PLACE}.max_epochs: 0.5 is less than the "
                                 "0.65 epochs of good.bin that training.validation.batches=10 take"),
    "text is read later": (dict(path="some.txt"), 1000, None),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, num_tokens, tokenizer in (("good", 1000, "bytes"), ("other", 200, "bytes"), ("strange", 200, "t"),
                                        ("tiny", 50, "bytes")):
        with TokenWriter(tmp_path / f"{name}.bin", dtype="uint16") as writer:
            writer.write(np.arange(num_tokens) % 256, lengths=np.array([num_tokens]), opens=np.array([True]))
            writer.commit(vocab_size=300, tokenizer=tokenizer, eod=None, inputs_sha256="")
    Path("lonely.bin").write_text("x")
    Path("some.txt").write_text("some text\n" * 50)
    return tmp_path


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case, folder):
    changes, model, training, beginnings = WRONG[case]
    data = dataclasses.replace(DataSpec(path="good.bin"), **changes)
    found = data_problems(data, vocab_size=model.get("vocab_size", 300),
                          training=dataclasses.replace(TRAINING, **training))
    assert len(found) == len(beginnings)
    for problem, beginning in zip(found, beginnings):
        assert beginning in str(problem)


@pytest.mark.parametrize("case", FINE)
def test_what_fits_is_taken(case, folder):
    data = dataclasses.replace(DataSpec(path="good.bin"), **FINE[case])
    assert data_problems(data, vocab_size=300, training=TRAINING) == []


@pytest.mark.parametrize("case", VALIDATED)
def test_what_is_validated_on_is_checked_like_what_is_trained_on(case, folder):
    data, batches, beginning = VALIDATED[case]
    validation = ValidationSpec(data=DataSpec(**data), batches=batches)
    found = data_problems(DataSpec(path="good.bin"), vocab_size=300,
                          training=dataclasses.replace(TRAINING, validation=validation))
    assert len(found) == (beginning is not None)
    assert not found or str(found[0]).startswith(beginning)


def test_paths_are_those_of_where_the_command_was_typed(folder):
    names = ("good", "good.idx", "good.bin", "some.txt", "no")
    data = absolute_data(DataSpec(sources=[SourceSpec(path=name) for name in names]))
    assert [source.path for source in data.sources] == [
        *[str(folder / "good.bin")] * 3, str(folder / "some.txt"), str(folder / "no")]


# ------------------------------------------------------------------ in a run
def test_a_mixture_is_prepared_and_handed_to_the_ranks(folder):
    run_file = training_run(folder, nodes=1, ranks=1, data={"document_mask": True, "sources": [
        {"path": str(folder / "good"), "weight": 0.25}, {"path": str(folder / "some.txt"), "weight": 0.75}]})
    config = load(run_file, ["model.vocab_size=300"])
    run_dir = prepare(config, None)
    job = assemble_job(config, layout=None, world_size=1, run_dir=run_dir.path, attempt=1, resume_step=None)
    assert [(source.path, source.weight) for source in job.data.all_sources] == [
        (str(folder / "good.bin"), 0.25), (str(run_dir.path / "data" / "tokens-1.bin"), 0.75)]
    assert job.data.document_mask
    assert Path(job.data.all_sources[1].path).read_bytes() == Path("some.txt").read_bytes() + b"\0"


def validating(folder, data: dict, *overrides: str):
    """A run that trains on good.bin and validates on `data`."""
    run_file = training_run(folder, nodes=1, ranks=1, data={"path": str(folder / "good")})
    given = [f"training.validation.data.{name}={value}" for name, value in data.items()]
    return load(run_file, ["model.vocab_size=300", "training.global_batch_size=4", "training.seq_len=16", *given,
                           *overrides])


def test_what_is_validated_on_is_prepared_and_handed_to_the_ranks(folder):
    config = validating(folder, {"path": "some.txt"}, "training.validation.batches=7")
    assert config.training.validation.data.path == str(folder / "some.txt")
    run_dir = prepare(config, None)
    job = assemble_job(read_stored(run_dir.config), layout=None, world_size=1, run_dir=run_dir.path, attempt=1,
                       resume_step=None)
    mine = run_dir.path / "data" / "validation-0.bin"
    assert [source.path for source in job.training.validation.data.all_sources] == [str(mine)]
    assert mine.read_bytes() == Path("some.txt").read_bytes() + b"\0"
    assert [source.path for source in job.data.all_sources] == [str(folder / "good.bin")]
    mine.with_suffix(".bin.json").write_text(mine.with_suffix(".bin.json").read_text().replace("crc32:", "crc32:0"))
    with pytest.raises(SpecError, match="training.validation.data.path: .*is not the file that the run began with"):
        submit(config, run_dir, executor=None, submissions=None)


def test_text_that_is_too_short_to_validate_on_is_refused_once_it_is_read(folder):
    config = validating(folder, {"path": "some.txt"}, "training.validation.batches=8")
    with pytest.raises(SpecError, match="batches: 8 of 4 sequences of 16 tokens take 32 sequences of .*some.txt, which "
                                        "holds 31 .501 tokens.; try 7"):
        prepare(config, None)
    assert not RunDir(config.run_dir).path.exists()


def test_validation_without_data_is_refused(folder):
    with pytest.raises(SpecError, match="training.validation.data: is missing; it has no default"):
        validating(folder, {}, "training.validation.interval_steps=5")


# what would be ignored, or cannot be done → changes of the run, the refusal
NOT_THERE = {
    "a trainer of one's own": ({"model": None, "command": ["sh"]}, "training.validation: 100 is what the built-in "
                               "trainer does; a trainer of your own validates itself"),
    "documents of an own model": (
        {"model": {"entrypoint": "a.b:c", "vocab_size": 300}}, "training.validation.data.document_mask: True is for "
        "the decoders that orc builds; an own model is given tokens alone"),
}


@pytest.mark.parametrize("case", NOT_THERE)
def test_a_validation_that_cannot_be_is_refused(case, folder):
    changes, refusal = NOT_THERE[case]
    training = {"steps": 6, "seq_len": 16, "global_batch_size": 4,
                "validation": {"data": {"path": str(folder / "good"), "document_mask": True}}}
    with pytest.raises(SpecError) as refused:
        load(training_run(folder, nodes=1, ranks=1, data={"path": str(folder / "good")}, training=training, **changes))
    assert refusal in str(refused.value)


def test_validation_changes_no_plan(folder):
    loaded = load_traced(training_run(folder, nodes=1, ranks=4), ["training.validation.data.path=some.txt"])
    plain = dataclasses.replace(loaded.config, training=dataclasses.replace(loaded.config.training, validation=None))
    with_it, without = (plan_json(make_plan(dataclasses.replace(loaded, config=config), trainable=True))
                        for config in (loaded.config, plain))
    assert loaded.config.training.validation is not None
    assert with_it["layout"] == without["layout"] and with_it["predicted"] == without["predicted"]


def test_a_run_does_not_go_on_with_other_data(folder):
    run_file = training_run(folder, nodes=1, ranks=1, data={"path": str(folder / "good")})
    config = load(run_file, ["model.vocab_size=300"])
    run_dir = prepare(config, None)
    refuse_changed_files(all_data(config.data, config.training), run_dir.data)
    with TokenWriter(folder / "good.bin", dtype="uint16") as writer:  # as many tokens in as many documents
        writer.write(np.arange(1000) % 255, lengths=np.array([1000]), opens=np.array([True]))
        writer.commit(vocab_size=300, tokenizer="t", eod=None, inputs_sha256="")
    with pytest.raises(SpecError, match="data.path: .*good.bin' is not the file that the run began with"):
        submit(config, run_dir, executor=None, submissions=None)


def test_a_runs_own_token_file_may_move_with_its_directory(folder):
    run_file = training_run(folder, nodes=1, ranks=1, data={"path": str(folder / "some.txt")})
    config = load(run_file, [])
    moved = prepare(config, None).path.rename(folder / "moved")
    refuse_changed_files(all_data(config.data, config.training), RunDir(moved).data)
    (RunDir(moved).data / FILES).write_text("{}")
    with pytest.raises(SpecError, match="does not say what the run began with"):
        refuse_changed_files(all_data(config.data, config.training), RunDir(moved).data)


def test_text_that_does_not_fit_is_refused_once_it_is_read(folder):
    run_file = training_run(folder, nodes=1, ranks=1, data={"path": str(folder / "some.txt")})
    config = load(run_file, ["training.seq_len=600"])
    with pytest.raises(SpecError, match="holds 501 tokens, less than one sequence: training.seq_len=600"):
        prepare(config, None)
    assert not RunDir(config.run_dir).path.exists()


def test_text_that_cannot_be_read_is_said_once_with_its_place(folder):
    (folder / "nothing").mkdir()
    config = load(training_run(folder, nodes=1, ranks=1, data={"path": str(folder / "nothing")}))
    with pytest.raises(SpecError) as refused:
        prepare(config, None)
    assert str(refused.value).startswith(f"data.path: '{folder}/nothing' holds no file")


def test_a_small_vocabulary_is_refused_where_the_run_is_read(folder):
    """By the one function that plan, run and submit read it with."""
    run_file = training_run(folder, nodes=1, ranks=1, data={"path": str(folder / "good")})
    with pytest.raises(SpecError, match="model.vocab_size: 256 is below the vocabulary of 300 tokens of "):
        load(run_file)
