"""Text files → one token file: their bytes one after the other, byte 0 between documents.

Called as `python -m jobs.tokens DATASPEC.json OUT.bin` before a run's first attempt, and by the loader for
the description beside the token file. Never imports torch.
"""
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.spec.load import Problem, SpecError, from_dict, to_dict
from jobs.spec.training import DataSpec

SEPARATOR = b"\0"
VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensInfo:
    """What OUT.bin.json says of OUT.bin."""

    num_tokens: int
    dtype: str  # of one token, as numpy spells it
    vocab_size: int  # tokens are below this
    num_documents: int
    inputs_sha256: str  # of the sorted list of (path, size, crc32): equal for equal inputs
    checksum: str  # "crc32:…" of OUT.bin


def info_path(tokens: Path) -> Path:
    return tokens.with_name(tokens.name + ".json")


def read_info(tokens: Path) -> TokensInfo:
    """Raises SpecError if the file or its description is missing or they disagree."""
    where = info_path(tokens)
    if not tokens.is_file() or not where.is_file():
        raise SpecError([Problem(where="tokens_path", value=str(tokens),
                                 message=f"needs both the token file and {where.name} beside it; "
                                         f"make them with: python -m jobs.tokens DATASPEC.json {tokens}")])
    info = from_dict(TokensInfo, json.loads(where.read_text()), origin=str(where))
    if tokens.stat().st_size != info.num_tokens:
        raise SpecError([Problem(where="tokens_path", value=str(tokens),
                                 message=f"holds {tokens.stat().st_size} tokens where {where.name} says "
                                         f"{info.num_tokens}; delete both and build them again")])
    return info


def build_tokens(data: DataSpec, out: Path) -> TokensInfo:
    """Write `out` and its description. The order of documents is that of their paths, so the result does not
    depend on the file system. Raises SpecError if there is no text to read.
    """
    root = Path(data.path).expanduser()
    files = _files(data, root)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    size, checksum, documents, inputs = 0, 0, 0, hashlib.sha256()
    try:
        with part.open("wb") as stream:
            for name, text in _documents(files, root):
                document = text + SEPARATOR
                stream.write(document)
                checksum = zlib.crc32(document, checksum)
                size += len(document)
                documents += 1
                inputs.update(f"{name}\0{len(text)}\0{zlib.crc32(text)}\n".encode())
            stream.flush()
            os.fsync(stream.fileno())
        if documents == 0:
            raise SpecError([_problem(data, f"holds no text: {len(files)} files match {data.pattern!r}, all of them "
                                            "empty or binary; check data.pattern and data.exclude")])
        info = TokensInfo(num_tokens=size, dtype="uint8", vocab_size=VOCABULARY, num_documents=documents,
                          inputs_sha256=inputs.hexdigest(), checksum=f"crc32:{checksum:08x}")
        # The token file appears last and whole: a reader that finds it finds its description, too.
        _write_atomically(info_path(out), json.dumps(to_dict(info), indent=1).encode())
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    return info


def _files(data: DataSpec, root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise SpecError([_problem(data, "does not exist; give a folder or a file of text")])
    files = [path for path in root.glob(data.pattern)
             if path.is_file() and not set(path.relative_to(root).parts) & set(data.exclude)]
    if not files:
        raise SpecError([_problem(data, f"holds no file that matches {data.pattern!r}; check data.pattern and "
                                        "data.exclude")])
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _documents(files: list[Path], root: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each file that is text: not empty, and without the separator's byte."""
    for path in files:
        text = path.read_bytes()
        if text and SEPARATOR not in text:
            yield (path.name if path == root else path.relative_to(root).as_posix()), text


def _problem(data: DataSpec, message: str) -> Problem:
    return Problem(where="data.path", value=data.path, message=message)


def _write_atomically(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    os.replace(part, path)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m jobs.tokens DATASPEC.json OUT.bin", file=sys.stderr)
        return 2
    spec, out = map(Path, arguments)
    try:
        info = build_tokens(from_dict(DataSpec, json.loads(spec.read_text()), origin=str(spec)), out)
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(to_dict(info)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
