"""orc data tokenize: files of text or JSON lines → a token file.

    python -m jobs.data.tokenize INPUT… --output PREFIX [--tokenizer tokenizer.json] [--workers N]

Run in a process of its own by the command line. One process reads and writes, in the order of the inputs, so the result
does not depend on the number of workers; only a few pieces of text are in memory at once.
"""
import argparse
import functools
import hashlib
import multiprocessing
import os
import signal
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jobs.data.corpus import Piece, documents_of, list_files, read_pieces
from jobs.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from jobs.data.writer import TokenWriter
from jobs.process import die_with_parent
from jobs.spec.load import Problem, SpecError
from jobs.spec.tokens import TokensInfo, index_path

REPORT_S = 10.0  # between lines of progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A piece as tokens: sequences one after the other, their lengths, and which of them open a document."""

    tokens: np.ndarray
    lengths: list[int]
    opens: list[bool]
    problems: list[Problem]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a piece is encoded; what a worker is told."""

    tokenizer: str
    eod_token: str | None
    append_eod: bool
    field: str
    dtype: str


def tokenize(inputs: list[str], out: Path, *, recipe: Recipe, tokenizer: Tokenizer, workers: int = 1,
             skip_bad: bool = False, say: Callable[[str], None] = lambda _: None) -> TokensInfo:
    """Write `out`, its index and its description; on any error, none of them. Raises SpecError. `skip_bad` leaves out
    what is wrong, and says so."""
    files, fingerprint = list_files(inputs), hashlib.sha256()
    skipped, torn, due = 0, False, time.monotonic() + REPORT_S
    with TokenWriter(out, dtype=recipe.dtype) as writer:
        for encoded in _encoded(_fingerprinted(files, fingerprint), recipe=recipe, workers=workers):
            for problem in encoded.problems:
                if not skip_bad:
                    raise SpecError([Problem(where=problem.where, value=problem.value,
                                             message=f"{problem.message} (or --skip-bad leaves it out)")])
                say(f"left out: {problem}")
            skipped += len(encoded.problems)
            if encoded.lengths:
                opens = np.array(encoded.opens)
                opens[0] |= torn  # what is left of a text continues no other document
                writer.write(encoded.tokens, lengths=np.array(encoded.lengths), opens=opens)
            torn = bool(encoded.problems)
            if time.monotonic() > due:
                say(f"{writer.num_documents:,} documents, {writer.num_tokens:,} tokens")
                due = time.monotonic() + REPORT_S
        if writer.num_tokens == 0:
            raise SpecError([Problem(where="INPUT", value=", ".join(inputs[:3]), message="holds no text: every file "
                                     "or line is empty; give others")])
        if skipped:
            say(f"left out {skipped:,} lines or files")
        return writer.commit(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.name, tokenizer_path=tokenizer.path,
                             eod=tokenizer.eod if recipe.append_eod else None, inputs_sha256=fingerprint.hexdigest())


def dtype_for(vocab_size: int) -> str:
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "int32"


def _fingerprinted(files: list[Path], fingerprint) -> Iterator[Piece]:
    for path in files:
        size = checksum = 0
        for piece in read_pieces(path):
            size, checksum = size + len(piece.content), zlib.crc32(piece.content, checksum)
            yield piece
        fingerprint.update(f"{path.name}\0{size}\0{checksum}\n".encode())


# ------------------------------------------------------------------ workers
def _encoded(pieces: Iterable[Piece], *, recipe: Recipe, workers: int) -> Iterator[Encoded]:
    """In the order of the pieces. A worker has at most two of them waiting: memory is bounded by the workers."""
    if workers == 1:
        yield from (_encode(piece, recipe) for piece in pieces)
        return
    waiting: deque[Future[Encoded]] = deque()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker, (os.getpid(),))
    try:
        for piece in pieces:
            waiting.append(pool.submit(_encode, piece, recipe))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise SpecError([Problem(where="--workers", value=workers, message="a worker was killed, perhaps for want of "
                                 "memory; give fewer")]) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(parent_pid: int) -> None:
    die_with_parent(parent_pid)  # killed, the parent cannot end its pool
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


@functools.cache
def _tokenizer(recipe: Recipe) -> Tokenizer:
    """Once per worker."""
    return load_tokenizer(recipe.tokenizer, eod_token=recipe.eod_token,
                          needs_eod=recipe.append_eod and recipe.tokenizer != BYTES)


def _encode(piece: Piece, recipe: Recipe) -> Encoded:
    tokenizer = _tokenizer(recipe)
    documents, problems = documents_of(piece, field=recipe.field)
    if recipe.tokenizer == BYTES:
        problems += [Problem(where=f"{piece.path}:{document.line}", value=None, message="holds a text with byte 0, "
                             "which ends documents of bytes; take it out, or use a tokenizer file")
                     for document in documents if "\0" in document.text]
        problems.sort(key=lambda problem: int(problem.where.rpartition(":")[2]))
        documents = [document for document in documents if "\0" not in document.text]
    sequences = []
    for document, tokens in zip(documents, tokenizer.encode([document.text for document in documents]), strict=True):
        ended = recipe.append_eod and document.closes
        sequences.append(np.append(tokens, tokenizer.eod) if ended else tokens)
    tokens = np.concatenate(sequences) if sequences else np.empty(0)
    return Encoded(tokens=tokens.astype(recipe.dtype), lengths=[len(s) for s in sequences],
                   opens=[document.opens for document in documents], problems=problems)


# ------------------------------------------------------------------ command
def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `finally`
    out = Path(asked.output.removesuffix(".bin") + ".bin").expanduser()
    start = time.monotonic()
    try:
        if not asked.output or asked.output.endswith("/"):
            raise SpecError([Problem(where="--output", value=asked.output, message="is no prefix of files; give one, "
                                     "such as data/corpus")])
        if not out.parent.is_dir():
            raise SpecError([Problem(where="--output", value=asked.output, message="lies in no folder: make "
                                     f"{out.parent} first, or give another prefix")])
        if index_path(out).exists() and not asked.overwrite:
            raise SpecError([Problem(where="--output", value=asked.output, message="is there already; give another "
                                     "prefix, or --overwrite")])
        tokenizer = load_tokenizer(asked.tokenizer, eod_token=asked.eod_token, needs_eod=asked.append_eod)
        recipe = Recipe(tokenizer=asked.tokenizer, eod_token=asked.eod_token, append_eod=asked.append_eod,
                        field=asked.jsonl_field, dtype=dtype_for(tokenizer.vocab_size))
        workers = asked.workers or (1 if asked.tokenizer == BYTES else len(os.sched_getaffinity(0)))
        info = tokenize(asked.inputs, out, recipe=recipe, tokenizer=tokenizer, workers=workers,
                        skip_bad=asked.skip_bad, say=lambda line: print(line, file=sys.stderr, flush=True))
    except SpecError as error:
        print("\n".join(f"orc: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"orc: --output: {asked.output!r} cannot be written: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("orc: interrupted; nothing was written", file=sys.stderr)
        return 130
    seconds = time.monotonic() - start
    print(f"{info.num_documents:,} documents, {info.num_tokens:,} tokens of {info.vocab_size:,}, "
          f"{info.num_tokens / seconds:,.0f} tokens/s\nwrote {out}: data.path of a run")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orc data tokenize", description="Text or JSON lines to a token file, "
                                     "PREFIX.bin with PREFIX.idx (Megatron-LM's format) and PREFIX.bin.json.")
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="a text (one document), a .jsonl (one per line), "
                        "either as .gz or .zst, or a folder of them")
    parser.add_argument("--output", "-o", metavar="PREFIX", required=True)
    parser.add_argument("--tokenizer", default=BYTES, help="bytes (the default), or a tokenizer.json")
    parser.add_argument("--jsonl-field", default="text", help="holds the document of a line (text)")
    parser.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True,
                        help="end each document with a token of its own (the default)")
    parser.add_argument("--eod-token", help="the one that ends a document; needed where a tokenizer has several "
                        "special tokens")
    parser.add_argument("--workers", type=_positive, help="processes that tokenize (one per CPU; for bytes, which are "
                        "made faster than they are passed on, one)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out lines and files that are no text")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; give 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
