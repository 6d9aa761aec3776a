"""Which sample a slot holds is a pure function of (seed, data_cursor, slot); no layout can change it."""
import numpy as np
import pytest
import torch

from jobs.loader import Loader, permute
from jobs.loss import IGNORED
from jobs.spec.load import SpecError
from jobs.spec.training import DataSpec
from jobs.tokens import build_tokens

SIZES = [1, 2, 3, 5, 16, 17, 100, 1000, 4097]
CPU = torch.device("cpu")
SEQ_LEN = 4
NUM_SEQUENCES = 50
BATCH = 8


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    text = bytes(1 + (i * 7) % 251 for i in range(NUM_SEQUENCES * SEQ_LEN))  # with the separator: one token more
    (folder / "text").write_bytes(text)
    build_tokens(DataSpec(path=str(folder / "text")), folder / "t.bin")
    return folder / "t.bin"


def loader(tokens, slots: range, *, seed=3, global_batch_size=BATCH, **changes):
    return Loader(tokens, **{"seq_len": SEQ_LEN, "vocab_size": 256, "global_batch_size": global_batch_size,
                             "seed": seed, "slots": slots, "device": CPU, **changes})


@pytest.mark.parametrize("size", SIZES)
def test_permute_is_a_permutation(size):
    found = permute(np.arange(size), size=size, seed=1, epoch=0)
    assert sorted(found.tolist()) == list(range(size))


def test_permute_depends_on_seed_and_epoch_but_not_on_the_company():
    positions = np.arange(1000)
    base = permute(positions, size=1000, seed=1, epoch=0)
    assert (base == permute(positions, size=1000, seed=1, epoch=0)).all()
    for seed, epoch in ((2, 0), (1, 1), (-1, 0)):
        other = permute(positions, size=1000, seed=seed, epoch=epoch)
        assert (other == base).mean() < 0.02  # two random permutations agree in one place on average
    assert permute(np.array([7]), size=1000, seed=1, epoch=0)[0] == base[7]


def test_permute_leaves_no_neighbours_together():
    order = permute(np.arange(10_000), size=10_000, seed=0, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_an_epoch_shows_every_sequence_once(tokens):
    whole = loader(tokens, range(BATCH))
    seen = np.concatenate([whole.sequences(cursor) for cursor in range(2 * NUM_SEQUENCES // BATCH + 1)])
    assert sorted(seen[:NUM_SEQUENCES].tolist()) == list(range(NUM_SEQUENCES))
    assert sorted(seen[NUM_SEQUENCES:2 * NUM_SEQUENCES].tolist()) == list(range(NUM_SEQUENCES))
    assert seen[:NUM_SEQUENCES].tolist() != seen[NUM_SEQUENCES:2 * NUM_SEQUENCES].tolist()  # epochs differ


@pytest.mark.parametrize("shares", [1, 2, 4, 8])
def test_shares_of_any_number_of_ranks_make_up_the_same_batch(shares, tokens):
    share = BATCH // shares
    parts = [loader(tokens, range(i * share, (i + 1) * share)).batch(5) for i in range(shares)]
    whole = loader(tokens, range(BATCH)).batch(5)
    for i in (0, 1):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


@pytest.mark.parametrize("chunks", [(0, 1), (1, 0), (0,)])
def test_chunks_of_a_sequence_are_its_columns(chunks, tokens):
    whole = loader(tokens, range(BATCH)).batch(3)
    part = loader(tokens, range(BATCH), chunks=chunks, num_chunks=2).batch(3)
    half = SEQ_LEN // 2
    for i in (0, 1):
        wanted = torch.cat([whole[i][:, chunk * half:(chunk + 1) * half] for chunk in chunks], dim=1)
        assert torch.equal(part[i], wanted)


def test_a_batch_does_not_depend_on_what_was_read_before(tokens):
    straight = loader(tokens, range(BATCH))
    batches = [straight.batch(cursor) for cursor in range(6)]  # the reader ahead is right each time
    resumed = loader(tokens, range(BATCH))
    for cursor in (4, 2, 5, 2):
        assert torch.equal(resumed.batch(cursor)[0], batches[cursor][0])


def test_targets_are_the_inputs_one_token_on(tokens):
    memory = np.fromfile(tokens, dtype=np.uint8)
    reader = loader(tokens, range(BATCH))
    inputs, targets = reader.batch(2)
    for row, sequence in enumerate(reader.sequences(2)):
        start = sequence * SEQ_LEN
        assert inputs[row].tolist() == memory[start:start + SEQ_LEN].tolist()
        assert targets[row].tolist() == memory[start + 1:start + SEQ_LEN + 1].tolist()


def test_surplus_slots_weigh_nothing_and_take_no_sample(tokens):
    with_surplus = loader(tokens, range(BATCH), global_batch_size=6)
    inputs, targets = with_surplus.batch(1)
    assert (targets[6:] == IGNORED).all() and (targets[:6] != IGNORED).all()
    exact = loader(tokens, range(6), global_batch_size=6).batch(1)
    assert torch.equal(inputs[:6], exact[0]) and torch.equal(targets[:6], exact[1])


@pytest.mark.parametrize("changes, message", [(dict(vocab_size=100), "model.vocab_size: 100 "),
                                              (dict(seq_len=1000), "training.seq_len: 1000 ")])
def test_data_that_does_not_fit_the_model_is_refused(changes, message, tokens):
    with pytest.raises(SpecError, match=message):
        loader(tokens, range(BATCH), **changes)
