"""How long training waits for data, how fast samples are read, and tokenizing beside the loop one would write by hand.

    python -m tests.benchmarks.data [--mib 64] [--steps 40]

Waits are those of the whole trainer on one rank: the model of tests.benchmarks.core, steps of about 50 ms. The loader
alone reads sequences of 2,048 tokens in shuffled order from files that are in the page cache, in its own thread and
nothing beside it. Tokenizing and the plain loop take turns; the ratio is the median of neighbouring turns.
"""
import argparse
import dataclasses
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from jobs.data.tokenize import Recipe, dtype_for, tokenize
from jobs.data.tokenizer import BYTES, load_tokenizer
from jobs.data.writer import TokenWriter
from jobs.loader import Loader
from jobs.spec.reports import StepReport
from jobs.spec.training import DataSpec, SourceSpec
from tests.benchmarks.core import MODEL, TRAINING
from tests.helpers.ranks import run_ranks
from tests.helpers.training import job, layout, train_here

SEQ_LEN, BATCH, VOCABULARY = 2048, 64, 50_000
DOCUMENT_TOKENS = 700  # on average
ROUNDS = 3


# ------------------------------------------------------------------ training
def waits(folder: Path, *, steps: int) -> str:
    """Medians over the steps of a whole trainer."""
    where = layout(model=MODEL, global_batch_size=TRAINING.global_batch_size, microbatch_size=8)
    spec = job(folder / "run", where, model=MODEL, training=dataclasses.replace(TRAINING, steps=steps))
    reports = [r for r in run_ranks(train_here, world_size=1, args=(spec,))[0] if isinstance(r, StepReport)][5:]
    wait, step = (statistics.median(getattr(r, name) for r in reports) for name in ("data_s", "step_time_s"))
    return f"waiting for data  {1e6 * wait:,.0f} µs of a step of {1e3 * step:.1f} ms: {100 * wait / step:.2f}%"


# ------------------------------------------------------------------ the loader alone
def write_tokens(path: Path, *, num_tokens: int) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 2 * DOCUMENT_TOKENS, num_tokens // DOCUMENT_TOKENS)
    with TokenWriter(path, dtype=dtype_for(VOCABULARY)) as writer:
        writer.write(random.integers(0, VOCABULARY, lengths.sum()), lengths=lengths, opens=np.ones(len(lengths), bool))
        writer.commit(vocab_size=VOCABULARY, tokenizer="none", eod=None, inputs_sha256="")


def loader_speed(data: DataSpec, *, seconds: float = 3.0) -> float:
    """tokens/s"""
    loader = Loader(data, seq_len=SEQ_LEN, vocab_size=VOCABULARY, global_batch_size=BATCH, seed=0, slots=range(BATCH),
                    device=torch.device("cpu"))
    start, cursor = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        loader.batch(cursor)
        cursor += 1
    rate = cursor * BATCH * SEQ_LEN / (time.perf_counter() - start)
    loader.close()
    return rate


# ------------------------------------------------------------------ tokenizing
def write_json_lines(path: Path, *, num_bytes: int) -> None:
    """Documents of the running Python's own library."""
    texts = [p.read_text(errors="replace") for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    with path.open("w") as out:
        number = 0
        while out.tell() < num_bytes:
            text = texts[number % len(texts)]
            start = number * 7919 % len(text)
            out.write(json.dumps({"id": number, "text": text[start:start + 3000]}) + "\n")
            number += 1


def train_tokenizer(path: Path, source: Path) -> None:
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=8000, special_tokens=["<end>"], show_progress=False)
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()[:500]]
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(path))


def by_hand(source: Path, out: Path, *, tokenizer: str) -> int:
    """One document after the other; what is written is the same tokens."""
    library, num_tokens = load_tokenizer(tokenizer, needs_eod=tokenizer != BYTES), 0
    dtype = dtype_for(library.vocab_size)
    with source.open() as lines, out.open("wb") as tokens:
        for line in lines:
            text = json.loads(line)["text"]
            ids = list(text.encode()) if tokenizer == BYTES else library._tokenizer.encode(
                text, add_special_tokens=False).ids
            tokens.write(np.array([*ids, library.eod], dtype=dtype).tobytes())
            num_tokens += len(ids) + 1
    return num_tokens


def ours(source: Path, out: Path, *, tokenizer: str, workers: int) -> int:
    library = load_tokenizer(tokenizer, needs_eod=tokenizer != BYTES)
    recipe = Recipe(tokenizer=tokenizer, eod_token=None, append_eod=True, field="text",
                    dtype=dtype_for(library.vocab_size))
    return tokenize([str(source)], out, recipe=recipe, tokenizer=library, workers=workers).num_tokens


def timed(function: Callable[[], int]) -> float:
    """tokens/s"""
    start = time.perf_counter()
    return function() / (time.perf_counter() - start)


def compare(source: Path, folder: Path, *, tokenizer: str, name: str) -> str:
    turns = {"a plain loop": lambda: by_hand(source, folder / "hand.bin", tokenizer=tokenizer)}
    for workers in (1, 2):
        turns[f"{workers} workers"] = lambda workers=workers: ours(source, folder / f"ours-{workers}.bin",
                                                                   tokenizer=tokenizer, workers=workers)
    rates = [{label: timed(turn) for label, turn in turns.items()} for _ in range(ROUNDS)]
    assert (folder / "hand.bin").read_bytes() == (folder / "ours-2.bin").read_bytes()
    columns = []
    for label in turns:
        rate, ratio = (statistics.median(r[label] / r[base] if base else r[label] for r in rates)
                       for base in ("", "a plain loop"))
        columns.append(f"{label} {rate:,.0f} tokens/s ({ratio:.2f}×)")
    return f"tokenize {name:<9}{', '.join(columns)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="of tokens for the loader; an eighth of it as bytes, "
                        "a thirty-second for BPE")
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(waits(folder, steps=asked.steps), flush=True)
        for part in ("a", "b"):
            write_tokens(folder / f"{part}.bin", num_tokens=asked.mib * 2**20 // 4)
        whole = DataSpec(path=str(folder / "a.bin"))
        sources = [SourceSpec(path=str(folder / f"{part}.bin"), weight=w) for part, w in (("a", 0.7), ("b", 0.3))]
        for label, data in (("one source", whole), ("a mixture", DataSpec(sources=sources)),
                            ("documents", dataclasses.replace(whole, document_mask=True))):
            print(f"loader {label:<11}{loader_speed(data):,.0f} tokens/s", flush=True)
        write_json_lines(folder / "text.jsonl", num_bytes=asked.mib * 2**20 // 8)
        print(compare(folder / "text.jsonl", folder, tokenizer=BYTES, name="bytes"), flush=True)
        train_tokenizer(folder / "tokenizer.json", folder / "text.jsonl")
        small = folder / "small.jsonl"
        write_json_lines(small, num_bytes=asked.mib * 2**20 // 32)
        print(compare(small, folder, tokenizer=str(folder / "tokenizer.json"), name="BPE 8000"), flush=True)


if __name__ == "__main__":
    main()
