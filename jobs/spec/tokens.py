"""Token files as both sides know them: what they are called, and what can be said of one without reading its tokens.

Read by the checks of a run's config, and by jobs.data, which reads and writes the tokens. Standard library only.

The format is Megatron-LM's indexed dataset, so its files are read as they are and ours can be read by it. PREFIX.bin
holds the tokens and nothing else. PREFIX.idx, little-endian: "MMIDIDX\\0\\0", version 1 (8 bytes), number code (1),
number of sequences n (8) and of document marks m (8); then n lengths in tokens (4 each), n offsets in bytes (8), and
m marks (8): the sequence that each document begins with, and n. A document is one sequence or several. What Megatron-LM
does not say, the vocabulary above all, is in PREFIX.bin.json where orc has written the file.
"""
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from jobs.spec.load import Problem, SpecError, from_dict

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
NUMBERS = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are no integers
BYTES = {"uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "int64": 8}
TEXT_VOCABULARY = 256  # text that is not tokenized beforehand is read as bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensInfo:
    """What is known of a token file; None: nobody has said."""

    num_tokens: int
    dtype: str  # of one token, as numpy spells it
    num_documents: int
    vocab_size: int | None = None  # tokens are below this
    tokenizer: str | None = None  # "bytes", or the name and digest of a tokenizer's file
    tokenizer_path: str | None = None
    eod: int | None = None  # the token that ends documents
    inputs_sha256: str | None = None  # of the list of (name, size, crc32): equal for equal inputs
    checksum: str | None = None  # "crc32:…" of PREFIX.bin


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexHeader:
    dtype: str
    num_sequences: int
    num_marks: int  # of documents; 0 or 1: each sequence is a document

    @property
    def num_documents(self) -> int:
        return self.num_sequences if self.num_marks < 2 else self.num_marks - 1

    @property
    def offsets_at(self) -> int:
        """Where in the index the sequences' offsets begin; their lengths are between the header and them."""
        return HEADER.size + 4 * self.num_sequences

    @property
    def marks_at(self) -> int:
        return self.offsets_at + 8 * self.num_sequences


def is_token_file(path: str) -> bool:
    """By its name alone, so that everybody agrees: anything else is text."""
    return path.endswith(".bin")


def absolute_source(path: str) -> str:
    """As it was meant where it was typed; the prefix of a token file, or its index, becomes the token file."""
    path = os.path.abspath(os.path.expanduser(path))
    if path.endswith(".idx"):
        return path.removesuffix(".idx") + ".bin"
    return path + ".bin" if not os.path.exists(path) and os.path.exists(path + ".idx") else path


def index_path(tokens: Path) -> Path:
    return tokens.with_suffix(".idx")


def info_path(tokens: Path) -> Path:
    return tokens.with_name(tokens.name + ".json")


def num_sequences(info: TokensInfo, *, seq_len: int) -> int:
    """Samples in an epoch: consecutive sequences, the last target of each being the next one's first input."""
    return (info.num_tokens - 1) // seq_len


def read_info(tokens: Path) -> TokensInfo:
    """Raises SpecError if a file is missing, is something else, or does not belong to the others."""
    header = read_header(tokens)
    size = tokens.stat().st_size
    if size != _end(tokens, header):
        raise _refusal(tokens, f"is {size:,} bytes long where {index_path(tokens).name} says {_end(tokens, header):,}; "
                               "the two do not belong together: make them again")
    if size == 0:
        raise _refusal(tokens, "holds no token; make it again from a text that is not empty")
    found = TokensInfo(num_tokens=size // BYTES[header.dtype], dtype=header.dtype, num_documents=header.num_documents)
    described = info_path(tokens)
    if not described.is_file():
        return found
    try:
        content = json.loads(described.read_text())
    except (ValueError, RecursionError) as error:  # of UTF-8, too
        raise _refusal(tokens, f"has a description that is not JSON, {described.name} ({error}); make it again, or "
                               f"remove {described.name}") from None
    info = from_dict(TokensInfo, content, origin=str(described))
    if (info.num_tokens, info.dtype, info.num_documents) != (found.num_tokens, found.dtype, found.num_documents):
        raise _refusal(tokens, f"is not what {described.name} describes; make them again, or remove {described.name}")
    return info


def read_header(tokens: Path) -> IndexHeader:
    """Of the index beside `tokens`. Raises SpecError."""
    index = index_path(tokens)
    if not tokens.is_file() or not index.is_file():
        raise _refusal(tokens, f"needs both {tokens.name} and {index.name}; make them with: orc data tokenize "
                               f"INPUT --output {tokens.with_suffix('')}")
    with index.open("rb") as stream:
        start = stream.read(HEADER.size)
    if len(start) < HEADER.size or not start.startswith(MAGIC):
        kind = "Megatron-LM's old index (TNTIDX)" if start.startswith(b"TNTIDX") else "no index of tokens"
        raise _refusal(tokens, f"has {kind} beside it; make it again with `orc data tokenize`, or Megatron-LM's "
                               "preprocess_data.py and --dataset-impl mmap")
    _, version, code, num_sequences, num_marks = HEADER.unpack(start)
    if version != 1 or code not in NUMBERS:
        raise _refusal(tokens, f"has an index of version {version} with numbers of kind {code}; known are version 1 "
                               f"and kinds {', '.join(f'{k} ({v})' for k, v in NUMBERS.items())}")
    header = IndexHeader(dtype=NUMBERS[code], num_sequences=num_sequences, num_marks=num_marks)
    if index.stat().st_size < header.marks_at + 8 * num_marks:
        raise _refusal(tokens, f"has an index that is cut short: {num_sequences:,} sequences and {num_marks:,} marks "
                               f"take more than {index.stat().st_size:,} bytes; make it again")
    return header


def _end(tokens: Path, header: IndexHeader) -> int:
    """Bytes of tokens, as the index's last sequence has it."""
    if header.num_sequences == 0:
        return 0
    with index_path(tokens).open("rb") as index:
        index.seek(header.offsets_at - 4)
        length = struct.unpack("<i", index.read(4))[0]
        index.seek(header.marks_at - 8)
        return struct.unpack("<q", index.read(8))[0] + length * BYTES[header.dtype]


def _refusal(tokens: Path, message: str) -> SpecError:
    return SpecError([Problem(where="data.path", value=str(tokens), message=message)])
