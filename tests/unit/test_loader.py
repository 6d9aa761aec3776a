"""Which sample a slot holds is a pure function of (seed, data_cursor, slot); no layout can change it."""
import dataclasses
import threading

import numpy as np
import pytest
import torch

from jobs.data.token_file import TokenFile
from jobs.data.writer import TokenWriter
from jobs.loader import PLACES_AT_ONCE, READ_AHEAD, Loader
from jobs.loss import IGNORED
from jobs.spec.load import SpecError
from jobs.spec.tokens import info_path
from jobs.spec.training import DataSpec, SourceSpec

CPU = torch.device("cpu")
SEQ_LEN = 4
BATCH = 8
# Lengths of the documents of each source; the first source has a sequence for each token it holds less one, by SEQ_LEN
SOURCES = {"long": (5, 1, 30, 2, 2, 160, 1), "short": (3, 50)}
NUM_SEQUENCES = {name: (sum(lengths) - 1) // SEQ_LEN for name, lengths in SOURCES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two token files whose tokens tell their source and place: 0, 1, 2, … and 1000, 1001, …"""
    folder = tmp_path_factory.mktemp("data")
    for number, (name, lengths) in enumerate(SOURCES.items()):
        with TokenWriter(folder / f"{name}.bin", dtype="int32") as writer:
            writer.write(1000 * number + np.arange(sum(lengths)), lengths=np.array(lengths),
                         opens=np.ones(len(lengths), dtype=bool))
            writer.commit(vocab_size=2000, tokenizer="counting", eod=None, inputs_sha256="")
    return folder


def spec(folder, mixture: dict[str, float] | None = None, **changes) -> DataSpec:
    sources = [SourceSpec(path=str(folder / f"{name}.bin"), weight=weight)
               for name, weight in (mixture or {"long": 1.0}).items()]
    return DataSpec(sources=sources, **changes)


def loader(data: DataSpec, slots: range = range(BATCH), *, seed=3, global_batch_size=BATCH, **changes):
    return Loader(data, **{"seq_len": SEQ_LEN, "vocab_size": 2000, "global_batch_size": global_batch_size,
                           "seed": seed, "slots": slots, "device": CPU, **changes})


MIXTURES = {
    "one source": dict(),
    "two": dict(mixture={"long": 0.7, "short": 0.3}),
    "documents": dict(mixture={"long": 1.0, "short": 2.0}, document_mask=True),
}


def assert_equal(found, wanted):
    for name in ("inputs", "targets", "documents"):
        a, b = getattr(found, name), getattr(wanted, name)
        assert (a is None and b is None) or torch.equal(a, b), name


@pytest.mark.parametrize("mixture", [{"long": 1.0}, {"long": 3.0, "short": 1.0}])
def test_an_epoch_shows_every_sequence_of_a_source_once(mixture, folder):
    whole = loader(spec(folder, mixture))
    pairs = [whole.places(cursor) for cursor in range(60)]
    sources, sequences = (np.concatenate(column) for column in zip(*pairs))
    for number, name in enumerate(mixture):
        size, seen = NUM_SEQUENCES[name], sequences[sources == number]
        assert len(seen) > 3 * size
        epochs = [seen[i * size:(i + 1) * size].tolist() for i in range(3)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]  # shuffled anew


@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.parametrize("shares", [1, 2, 4, 8])
def test_shares_of_any_number_of_ranks_make_up_the_same_batch(shares, case, folder):
    data, share = spec(folder, **MIXTURES[case]), BATCH // shares
    parts = [loader(data, range(i * share, (i + 1) * share)).batch(5) for i in range(shares)]
    whole = loader(data).batch(5)
    for name in ("inputs", "targets") + (("documents",) if data.document_mask else ()):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.parametrize("chunks", [(0, 1), (1, 0), (0,)])
def test_chunks_of_a_sequence_are_its_columns(chunks, case, folder):
    data, half = spec(folder, **MIXTURES[case]), SEQ_LEN // 2
    whole = loader(data).batch(3)
    part = loader(data, chunks=chunks, num_chunks=2).batch(3)
    for name in ("inputs", "targets"):
        columns = [getattr(whole, name)[:, chunk * half:(chunk + 1) * half] for chunk in chunks]
        assert torch.equal(getattr(part, name), torch.cat(columns, dim=1))
    if data.document_mask:
        assert torch.equal(part.documents, whole.documents)  # of whole sequences on every rank


@pytest.mark.parametrize("case", MIXTURES)
def test_a_batch_does_not_depend_on_what_was_read_before(case, folder):
    data = spec(folder, **MIXTURES[case])
    batches = [loader(data).batch(cursor) for cursor in range(8)]
    straight, resumed = loader(data), loader(data)
    for cursor in range(8):
        assert_equal(straight.batch(cursor), batches[cursor])  # the reader ahead is right each time
    for cursor in (4, 2, 5, 2, 3, 4, 5, 6, 0, 7):
        assert_equal(resumed.batch(cursor), batches[cursor])
    assert len(resumed._ahead) == READ_AHEAD


def test_any_batch_is_found_without_those_before_it(folder):
    """Also where samples are looked up in blocks."""
    data = spec(folder, {"long": 0.7, "short": 0.3})
    straight = loader(data)
    wanted = {cursor: straight.places(cursor) for cursor in range(3 * PLACES_AT_ONCE)}
    for cursor in (0, PLACES_AT_ONCE - 1, PLACES_AT_ONCE, 2 * PLACES_AT_ONCE + 7, 5):
        for found, one in zip(loader(data).places(cursor), wanted[cursor]):
            assert found.tolist() == one.tolist()


def test_targets_are_the_inputs_one_token_on(folder):
    reader = loader(spec(folder, {"long": 1.0, "short": 1.0}))
    batch = reader.batch(2)
    for row, (source, sequence) in enumerate(zip(*reader.places(2))):
        start = 1000 * source + SEQ_LEN * sequence  # of tokens that count
        assert batch.inputs[row].tolist() == list(range(start, start + SEQ_LEN))
        assert batch.targets[row].tolist() == list(range(start + 1, start + SEQ_LEN + 1))


def test_surplus_slots_weigh_nothing_and_take_no_sample(folder):
    data = spec(folder, document_mask=True)
    batch = loader(data, global_batch_size=6).batch(1)
    assert (batch.targets[6:] == IGNORED).all() and (batch.documents[6:] == 0).all()
    exact = loader(data, range(6), global_batch_size=6).batch(1)
    for name in ("inputs", "targets", "documents"):
        assert torch.equal(getattr(batch, name)[:6], getattr(exact, name))


# ------------------------------------------------------------------ documents
def naive_documents(start: int, lengths: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    """Of a sequence of SEQ_LEN tokens from `start`: numbers of its documents; which tokens end one."""
    owner = [number for number, length in enumerate(lengths) for _ in range(length)] + [-1]
    window = owner[start:start + SEQ_LEN + 1]
    numbers = [sorted(set(window)).index(document) for document in window[:-1]]
    return numbers, [a != b for a, b in zip(window, window[1:])]


@pytest.mark.parametrize("mask, ends, ignored", [(True, "auto", True), (True, "predict", False),
                                                 (False, "auto", False), (False, "ignore", True)])
def test_documents_are_numbered_and_their_ends_predict_nothing(mask, ends, ignored, folder):
    data = spec(folder, {"long": 1.0, "short": 1.0}, document_mask=mask, document_ends=ends)
    reader, seen = loader(data), set()
    for cursor in range(20):
        batch = reader.batch(cursor)
        for row, (source, sequence) in enumerate(zip(*reader.places(cursor))):
            numbers, at_end = naive_documents(SEQ_LEN * sequence, list(SOURCES.values())[source])
            assert batch.documents is None if not mask else batch.documents[row].tolist() == numbers
            assert (batch.targets[row] == IGNORED).tolist() == [end and ignored for end in at_end]
            start = 1000 * source + SEQ_LEN * sequence
            assert batch.inputs[row].tolist() == list(range(start, start + SEQ_LEN))
            seen.add(max(numbers))
    assert seen >= {0, 1, 2}  # one document, two and three in a sequence have occurred


def test_documents_are_on_the_host_in_int32(folder):
    batch = loader(spec(folder, document_mask=True)).batch(0)
    assert (batch.documents.dtype, batch.documents.device) == (torch.int32, CPU)
    assert batch.documents.shape == (BATCH, SEQ_LEN)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64


# ------------------------------------------------------------------ faults
def test_a_token_outside_the_vocabulary_is_named_where_nobody_has_declared_it(folder, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"long{suffix}").write_bytes((folder / f"long{suffix}").read_bytes())
    assert not info_path(tmp_path / "long.bin").exists()
    data = spec(tmp_path)
    loader(data, vocab_size=201).batch(0)  # 0 … 200
    with pytest.raises(SpecError, match="model.vocab_size: 30 does not cover token"):
        reader = loader(data, vocab_size=30)
        for cursor in range(6):
            reader.batch(cursor)


def test_what_no_check_has_seen_is_refused_by_the_loader_itself(folder):
    """A job started by hand."""
    with pytest.raises(SpecError, match="training.seq_len: 300 is more than the 201 tokens of "):
        loader(spec(folder), seq_len=300)
    reader = loader(spec(folder), vocab_size=1)  # of the 2,000 that are declared
    with pytest.raises(SpecError, match="model.vocab_size: 1 does not cover token"):
        reader.batch(0)


def test_a_file_that_is_not_there_is_named(folder):
    with pytest.raises(SpecError, match="nowhere.bin"):
        loader(DataSpec(path=str(folder / "nowhere.bin")))


def test_the_tokens_stay_on_disk(folder):
    file = TokenFile(folder / "long.bin")
    assert not file._tokens.flags.owndata and not file._tokens.flags.writeable
    assert file.window(0, 3).flags.owndata


def test_the_next_batches_are_read_before_they_are_asked_for(folder):
    reading = loader(spec(folder))
    read, begun = reading._read, {cursor: threading.Event() for cursor in range(3)}
    reading._read = lambda cursor: begun[cursor].set() or read(cursor)
    reading.batch(0)
    assert all(event.wait(timeout=60) for event in begun.values())
    reading.close()


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_batches_that_repeat_are_read_ahead_from_the_first_again(num_batches, folder):
    straight, repeating = loader(spec(folder)), loader(spec(folder), num_batches=num_batches)
    begun = []
    read, repeating._read = repeating._read, lambda cursor: begun.append(cursor) or read(cursor)
    for _ in range(3):
        for cursor in range(num_batches):
            assert_equal(repeating.batch(cursor), straight.batch(cursor))
    repeating.close()
    assert begun[:3 * num_batches] == 3 * [*range(num_batches)]


def test_another_seed_is_another_order(folder):
    orders = [loader(spec(folder), seed=seed).places(0)[1].tolist() for seed in (0, 1, 2)]
    assert orders[0] != orders[1] != orders[2]


def test_equal_sources_have_orders_of_their_own(folder):
    """The same file twice is not the same samples twice."""
    twice = dataclasses.replace(spec(folder), sources=2 * spec(folder).sources)
    sources, sequences = loader(twice, range(16), global_batch_size=16).places(0)
    assert sequences[sources == 0].tolist() != sequences[sources == 1].tolist()
