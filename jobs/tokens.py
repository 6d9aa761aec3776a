"""A run's text → one token file for each of its sources that is text: the bytes of its files, byte 0 between them.

Called as `python -m jobs.tokens DATA.json FOLDER` (a DataSpec for each place in the config that has one) before a run's
first attempt. Never imports torch.
"""
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jobs.data.tokenizer import BYTES, EOD_BYTE
from jobs.data.writer import TokenWriter
from jobs.spec.load import Problem, SpecError, from_dict, to_dict
from jobs.spec.sources import named_sources, with_token_files
from jobs.spec.tokens import TEXT_VOCABULARY, TokensInfo, is_token_file
from jobs.spec.training import DataSpec, SourceSpec

SEPARATOR = bytes([EOD_BYTE])


def build_all(datasets: dict[str, DataSpec], folder: Path) -> dict[str, TokensInfo]:
    """A token file in `folder` for each source that is text; by the source's place in the config. Raises SpecError."""
    targets = [source for at, data in datasets.items() for source in with_token_files(data, folder, at=at).all_sources]
    return {where: build_tokens(source, Path(target.path), where=where)
            for (where, source), target in zip(named_sources(datasets), targets) if not is_token_file(source.path)}


def build_tokens(source: SourceSpec, out: Path, *, where: str = "data") -> TokensInfo:
    """Write `out`, its index and its description. The order of documents is that of their paths, so the result does not
    depend on the file system. Raises SpecError if there is no text to read.
    """
    root = Path(source.path).expanduser()
    files = _files(source, root, where)
    inputs = hashlib.sha256()
    with TokenWriter(out, dtype="uint8") as writer:
        for name, text in _documents(files, root):
            document = np.frombuffer(text + SEPARATOR, dtype=np.uint8)
            writer.write(document, lengths=np.array([len(document)]), opens=np.array([True]))
            inputs.update(f"{name}\0{len(text)}\0{zlib.crc32(text)}\n".encode())
        if writer.num_documents == 0:
            raise _refusal(source, where, f"holds no text: {len(files)} files match {source.pattern!r}, all of them "
                                          f"empty or binary; check {where}.pattern and {where}.exclude")
        return writer.commit(vocab_size=TEXT_VOCABULARY, tokenizer=BYTES, eod=EOD_BYTE,
                             inputs_sha256=inputs.hexdigest())


def _files(source: SourceSpec, root: Path, where: str) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise _refusal(source, where, "does not exist; give a folder or a file of text, or a token file")
    files = [path for path in root.glob(source.pattern)
             if path.is_file() and not set(path.relative_to(root).parts) & set(source.exclude)]
    if not files:
        raise _refusal(source, where, f"holds no file that matches {source.pattern!r}; check {where}.pattern and "
                                      f"{where}.exclude")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _documents(files: list[Path], root: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each file that is text: not empty, and without the separator's byte."""
    for path in files:
        text = path.read_bytes()
        if text and SEPARATOR not in text:
            yield (path.name if path == root else path.relative_to(root).as_posix()), text


def _refusal(source: SourceSpec, where: str, message: str) -> SpecError:
    return SpecError([Problem(where=f"{where}.path", value=source.path, message=message)])


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m jobs.tokens DATA.json FOLDER", file=sys.stderr)
        return 2
    spec, folder = map(Path, arguments)
    try:
        made = build_all(from_dict(dict[str, DataSpec], json.loads(spec.read_text()), origin=str(spec)), folder)
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(to_dict(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
