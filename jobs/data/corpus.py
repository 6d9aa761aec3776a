"""Files of text and of JSON lines as a stream of pieces small enough for memory, in an order of their own.

Called by jobs.data.tokenize, whose workers take the documents out of the pieces. Knows no tokens.
"""
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jobs.spec.load import Problem, SpecError

PIECE_BYTES = 2**18
COMPRESSED_BYTES = 2**16  # read at once
JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive whole lines of JSON, a document each; or a text, or a part of one too long to be held whole."""

    path: str
    content: bytes
    is_json: bool
    first_line: int = 1  # of the file
    opens: bool = True  # a document
    closes: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    text: str
    line: int  # of the file: where it begins
    opens: bool = True
    closes: bool = True


def list_files(inputs: list[str]) -> list[Path]:
    """The inputs in their order, a folder as its files by name. Raises SpecError for each that is not there."""
    found, problems = [], []
    for name in inputs:
        path = Path(name).expanduser()
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        if not path.exists():
            problems.append(Problem(where="INPUT", value=name, message="does not exist; give text or JSON lines, as "
                                    "files or folders"))
        elif not inside:
            problems.append(Problem(where="INPUT", value=name, message="is a folder without a file; give another"))
        found += inside
    if problems:
        raise SpecError(problems)
    return found


def read_pieces(path: Path) -> Iterator[Piece]:
    """Raises SpecError where the file cannot be read."""
    is_json = _uncompressed(path).suffix in JSON_LINES
    try:
        yield from (_json_pieces if is_json else _text_pieces)(_cut(_blocks(path), at_lines=is_json), str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise SpecError([Problem(where=str(path), value=None, message=f"cannot be read: {error}; repair it, or leave "
                                 "it out")]) from error


def documents_of(piece: Piece, *, field: str) -> tuple[list[Document], list[Problem]]:
    """What is in a piece, and what is wrong with the lines that are left out."""
    if not piece.is_json:
        text = _decode(piece.content, where=f"{piece.path}:{piece.first_line}")
        if isinstance(text, Problem):
            return [], [text]
        return [Document(text=text, line=piece.first_line, opens=piece.opens, closes=piece.closes)], []
    found, problems = [], []
    for number, line in enumerate(piece.content.split(b"\n"), start=piece.first_line):
        if line.strip():
            text = _field_of(line, field=field, where=f"{piece.path}:{number}")
            problems += [text] if isinstance(text, Problem) else []
            found += [Document(text=text, line=number)] if isinstance(text, str) and text else []
    return found, problems


# ------------------------------------------------------------------ reading
def _uncompressed(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (".gz", ".zst") else path


def _blocks(path: Path) -> Iterator[bytes]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
        yield from _decompressed(stream) if path.suffix == ".zst" else iter(lambda: stream.read(PIECE_BYTES), b"")


def _decompressed(stream: BinaryIO) -> Iterator[bytes]:
    """Of all frames of a .zst file. The library's own reader ends silently after the first one, or in a torn one."""
    try:
        import zstandard
    except ImportError:
        raise SpecError([Problem(where="INPUT", value=stream.name, message="needs the `zstandard` library: "
                                 "pip install zstandard")]) from None
    frame = None
    try:
        while block := stream.read(COMPRESSED_BYTES):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(block)
                block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")


def _json_pieces(contents: Iterator[bytes], path: str) -> Iterator[Piece]:
    first_line = 1
    for content in contents:
        yield Piece(path=path, content=content, is_json=True, first_line=first_line)
        first_line += content.count(b"\n")


def _text_pieces(contents: Iterator[bytes], path: str) -> Iterator[Piece]:
    first_line, last, opens = 1, b"", True
    for content in contents:  # one behind: only the last piece closes the document
        if last:
            yield Piece(path=path, content=last, is_json=False, first_line=first_line, opens=opens, closes=False)
            first_line, opens = first_line + last.count(b"\n"), False
        last = content
    if last:
        yield Piece(path=path, content=last, is_json=False, first_line=first_line, opens=opens)


def _cut(blocks: Iterator[bytes], *, at_lines: bool) -> Iterator[bytes]:
    """The content in pieces that end with a line; in a text, if no line ends in time, with a character."""
    rest: list[bytes] = []  # joined once: a line may be many blocks long
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if not cut and not at_lines:
            block, rest = b"".join((*rest, block)), []
            cut = _last_character(block)
        if cut:
            yield b"".join((*rest, block[:cut]))
            rest = []
        rest.append(block[cut:])
    if last := b"".join(rest):
        yield last


def _last_character(block: bytes) -> int:
    """Where the last character of UTF-8 begins: everything before it is whole."""
    start = len(block) - 1
    while start > 0 and block[start] & 0xC0 == 0x80:
        start -= 1
    return start


# ------------------------------------------------------------------ documents
def _decode(content: bytes, *, where: str) -> str | Problem:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        bad = content[error.start:error.start + 8]
        path, _, line = where.rpartition(":")
        line = int(line) + content.count(b"\n", 0, error.start)
        return Problem(where=f"{path}:{line}", value=bad, message="is not UTF-8; convert the file, or leave it out")
    if "\0" in text:
        return Problem(where=where, value="\\0", message="is no text: it holds byte 0; leave the file out")
    return text


def _field_of(line: bytes, *, field: str, where: str) -> str | Problem:
    def problem(value: Any, message: str) -> Problem:
        return Problem(where=where, value=value, message=message)

    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # of UTF-8, too
        return problem(line[:60].decode(errors="replace"), f"is not JSON ({error}); one object per line is expected")
    if not isinstance(row, dict):
        return problem(line[:60].decode(errors="replace"), "is no JSON object; one per line is expected")
    if field not in row:
        names = ", ".join(map(str, list(row)[:12]))
        return problem(None, f"has no field {field!r} but {names or 'none'}; name one with --jsonl-field")
    if not isinstance(row[field], str):
        return problem(row[field], f"is no text: field {field!r}; name another with --jsonl-field, or repair the line")
    if not _is_unicode(row[field]):
        return problem(None, f"holds half of a surrogate pair (\\ud800 to \\udfff) in field {field!r}; repair the line")
    return row[field]


def _is_unicode(text: str) -> bool:
    """JSON can spell what UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
