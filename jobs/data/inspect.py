"""orc data inspect: what a token file holds.

    python -m jobs.data.inspect PREFIX [--check]

Run in a process of its own by the command line.
"""
import argparse
import hashlib
import sys
import zlib
from pathlib import Path

import numpy as np

from jobs.data.token_file import TokenFile
from jobs.data.tokenizer import BYTES, load_tokenizer
from jobs.spec.load import Problem, SpecError
from jobs.spec.tokens import TokensInfo, absolute_source

SAMPLE_TOKENS = 64
BLOCK = 2**24  # tokens read at once by --check


def describe(file: TokenFile) -> str:
    """The facts, and the beginnings of the first documents."""
    info = file.info
    rows = [("tokens", f"{info.num_tokens:,}"), ("documents", f"{info.num_documents:,}"),
            ("per token", info.dtype),
            ("vocabulary", f"{info.vocab_size:,}" if info.vocab_size else "unknown: no description beside it"),
            ("tokenizer", info.tokenizer or "unknown"),
            ("end of document", "none" if info.eod is None else f"token {info.eod}"),
            ("checksum", info.checksum or "none")]
    text = [f"{name:<17}{value}" for name, value in rows]
    starts = file.document_starts(0, info.num_tokens)[:2] if info.num_documents < 1000 else [0]
    for number, start in enumerate(map(int, starts)):
        end, *_ = *file.document_starts(start + 1, start + SAMPLE_TOKENS), start + SAMPLE_TOKENS
        text.append(f"{f'document {number}':<17}{_decoded(file.window(start, int(end) - start), info)}")
    return "\n".join(text)


def check(file: TokenFile) -> str:
    """Read everything. Raises SpecError if it is not what its description says."""
    checksum, largest, info = 0, 0, file.info
    for start in range(0, len(file.offsets), BLOCK):
        if (np.diff(file.offsets[start:start + BLOCK + 1]) < 0).any():
            raise SpecError([Problem(where="PREFIX", value=str(file.path), message="has sequences that do not lie in "
                                     "the order of its index: documents cannot be told apart; make it again")])
    for start in range(0, info.num_tokens, BLOCK):
        window = file.window(start, BLOCK)
        checksum = zlib.crc32(window.astype(info.dtype).tobytes(), checksum)
        largest = max(largest, int(window.max()))
    if info.checksum is not None and info.checksum != f"crc32:{checksum:08x}":
        raise SpecError([Problem(where="PREFIX", value=str(file.path), message=f"is damaged: its checksum is "
                                 f"crc32:{checksum:08x}, not {info.checksum}; make it again")])
    if info.vocab_size is not None and largest >= info.vocab_size:
        raise SpecError([Problem(where="PREFIX", value=str(file.path), message=f"holds token {largest:,} where its "
                                 f"description says {info.vocab_size:,} tokens; make it again")])
    return f"{'largest token':<17}{largest:,}"


def _decoded(tokens: np.ndarray, info: TokensInfo) -> str:
    """As text where the tokenizer is at hand, and is the one that made the file."""
    path = Path(info.tokenizer_path) if info.tokenizer_path else None
    if info.tokenizer == BYTES:
        return repr(load_tokenizer(BYTES).decode(tokens))
    if path is not None and path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        if (info.tokenizer or "").endswith(digest):
            return repr(load_tokenizer(str(path)).decode(tokens))
    return " ".join(map(str, tokens)) + (f"  ({path} is not the tokenizer it was made with)" if path else "")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="orc data inspect", description="What a token file holds.")
    parser.add_argument("prefix", metavar="PREFIX", help="of PREFIX.bin and PREFIX.idx")
    parser.add_argument("--check", action="store_true", help="read all of it: checksum and largest token")
    asked = parser.parse_args(arguments)
    path = absolute_source(asked.prefix)
    try:
        file = TokenFile(Path(path if path.endswith(".bin") else path + ".bin"))
        print(describe(file))
        if asked.check:
            print(check(file))
    except SpecError as error:
        print("\n".join(f"orc: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
