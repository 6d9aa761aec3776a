"""orc data tokenize: the tokens of a plain loop over the documents, whatever the number of workers; all or nothing."""
import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from jobs.data import corpus, tokenize as command
from jobs.data.token_file import TokenFile
from jobs.data.tokenizer import load_tokenizer
from jobs.spec.tokens import read_info

DOCUMENTS = ["one", "zwei drei\n", "été ☃", "a\tb\\n", "x" * 3000, "the mesh of ranks", " ", "the end of the ranks"] * 9

BAD = {  # content of a .jsonl or .txt file → the place that is named, and what is said of it
    "no JSON": (".jsonl", b'{"text": "a"}\n\n{"text": \n', 3, "is not JSON"),
    "not UTF-8": (".jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', 2, "is not JSON"),
    "a list": (".jsonl", b'["text"]\n', 1, "is no JSON object"),
    "no field": (".jsonl", b'{"text": "a"}\n{"content": "b", "id": 1}\n', 2, "has no field 'text' but content, id;"),
    "a number": (".jsonl", b'{"text": 5}\n', 1, "5 is no text: field 'text'"),
    "null": (".jsonl", b'{"text": null}\n', 1, "is no text"),
    "a byte 0": (".jsonl", b'{"text": "a"}\n{"text": "a\\u0000"}\n', 2, "byte 0, which ends documents of bytes"),
    "half a surrogate pair": (".jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', 2, "half of a surrogate pair"),
    "a deep nest": (".jsonl", b"[" * 10**5 + b"\n", 1, "is not JSON"),
    "text, not UTF-8": (".txt", b"fine\n\xe9t\xe9\n", 2, "is not UTF-8; convert"),
    "a binary": (".txt", b"\x7fELF\0\0", 1, "holds byte 0"),
}


def run(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "jobs.data.tokenize", *map(str, arguments)], capture_output=True,
                          text=True, **options)


def json_lines(path: Path, documents=DOCUMENTS, *, field: str = "text", opened=open) -> Path:
    with opened(path, "wt") as out:
        for number, text in enumerate(documents):
            out.write(json.dumps({"id": number, field: text}) + "\n")
    return path


def documents_in(tokens: Path) -> list[list[int]]:
    file = TokenFile(tokens)
    bounds = [*file.document_starts(0, file.info.num_tokens), file.info.num_tokens]
    return [file.window(a, b - a).tolist() for a, b in zip(bounds, bounds[1:])]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A real byte-level BPE, trained here."""
    library = pytest.importorskip("tokenizers", reason="needs the `tokenizers` library: pip install tokenizers")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>", "<pad>"], show_progress=False,
                                          initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(["the mesh of ranks", "the end"] * 10, trainer)
    bpe.save(str(path))
    return path


@pytest.fixture
def small_pieces(monkeypatch):
    """So that a few documents take many pieces; inherited by forked workers."""
    monkeypatch.setattr(corpus, "PIECE_BYTES", 50)


def tokenized(inputs: list[Path], out: Path, *extra: str | Path) -> Path:
    assert command.main([*map(str, inputs), "--output", str(out.with_suffix("")), *map(str, extra)]) == 0
    return out


# ------------------------------------------------------------------ the same tokens as a plain loop
@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_are_those_of_the_documents(workers, small_pieces, tmp_path):
    out = tokenized([json_lines(tmp_path / "a.jsonl")], tmp_path / "t.bin", "--workers", str(workers))
    assert documents_in(out) == [[*text.encode(), 0] for text in DOCUMENTS]
    info = read_info(out)
    assert (info.tokenizer, info.vocab_size, info.eod, info.dtype) == ("bytes", 256, 0, "uint8")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_tokenizer_file_gives_what_its_library_gives(workers, tokenizer_file, small_pieces, tmp_path):
    import tokenizers

    out = tokenized([json_lines(tmp_path / "a.jsonl")], tmp_path / "t.bin", "--workers", str(workers),
                    "--tokenizer", tokenizer_file, "--eod-token", "<end>")
    library = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    end = library.token_to_id("<end>")
    assert documents_in(out) == [[*library.encode(text, add_special_tokens=False).ids, end] for text in DOCUMENTS]
    info = read_info(out)
    assert (info.vocab_size, info.eod, info.dtype) == (library.get_vocab_size(), end, "uint16")
    assert re.fullmatch(r"tokenizer\.json sha256:[0-9a-f]{16}", info.tokenizer)
    assert load_tokenizer(info.tokenizer_path).decode(np.array(documents_in(out)[2])) == DOCUMENTS[2] + "<end>"


def test_the_result_does_not_depend_on_workers_or_pieces(tmp_path, monkeypatch):
    source, made = json_lines(tmp_path / "a.jsonl"), []
    for piece_bytes, workers in ((7, 1), (1000, 2), (10**6, 3)):
        monkeypatch.setattr(corpus, "PIECE_BYTES", piece_bytes)
        (tmp_path / f"{piece_bytes}").mkdir()
        out = tokenized([source], tmp_path / f"{piece_bytes}" / "t.bin", "--workers", str(workers))
        made.append([(p.name, p.read_bytes()) for p in sorted(out.parent.iterdir())])
    assert made[0] == made[1] == made[2]


def test_files_folders_and_compressed_files_follow_in_order(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("text\nof lines")
    (folder / "empty.txt").write_text("")
    json_lines(folder / "a.jsonl.gz", ["first", "", "second"], opened=gzip.open)
    json_lines(tmp_path / "c.json", ["third"])
    json_lines(tmp_path / "d.json", ["fourth"])
    (folder / "sub" / "c.json.zst").write_bytes(b"".join(  # two frames, as parallel compressors write them
        zstandard.compress((tmp_path / name).read_bytes()) for name in ("c.json", "d.json")))
    with gzip.open(tmp_path / "last.txt.gz", "wt") as out:
        out.write("last")
    out = tokenized([folder, tmp_path / "last.txt.gz"], tmp_path / "t.bin")
    wanted = ["first", "second", "text\nof lines", "third", "fourth", "last"]  # documents without text are none
    assert documents_in(out) == [[*text.encode(), 0] for text in wanted]


@pytest.mark.parametrize("text", ["line\n" * 60, "é" * 199, "☃" * 99 + "\n" + "🙂" * 44, "a" * 400], ids=range(4))
def test_a_text_too_long_for_memory_is_one_document_of_several_sequences(text, tokenizer_file, small_pieces, tmp_path):
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "next.txt").write_text("next")
    inputs = [tmp_path / "long.txt", tmp_path / "next.txt"]
    out = tokenized(inputs, tmp_path / "t.bin")
    assert documents_in(out) == [[*text.encode(), 0], [*b"next", 0]]
    assert len(TokenFile(out).offsets) > 3
    other = tokenized(inputs, tmp_path / "u.bin", "--tokenizer", tokenizer_file, "--no-append-eod")
    decoded = [load_tokenizer(str(tokenizer_file)).decode(np.array(document)) for document in documents_in(other)]
    assert decoded == [text, "next"]


def test_eod_is_optional(tmp_path):
    out = tokenized([json_lines(tmp_path / "a.jsonl", ["ab", "c"])], tmp_path / "t.bin", "--no-append-eod")
    assert documents_in(out) == [[97, 98], [99]] and read_info(out).eod is None


def test_another_field_can_hold_the_text(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", ["ab"], field="content")
    assert documents_in(tokenized([source], tmp_path / "t.bin", "--jsonl-field", "content")) == [[97, 98, 0]]


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_and_nothing_is_left(case, workers, tmp_path, capsys):
    suffix, content, line, message = BAD[case]
    source = tmp_path / f"in{suffix}"
    source.write_bytes(content)
    (tmp_path / "out").mkdir()
    assert command.main([str(source), "-o", str(tmp_path / "out" / "t"), "--workers", workers]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"orc: {source}:{line}: ") and message in said and "--skip-bad" in said
    assert said.count("\n") == 1 and list((tmp_path / "out").iterdir()) == []


def test_bad_lines_can_be_left_out(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "ab"}\n{"text": 5}\nno\n{"text": "c"}\n')
    assert documents_in(tokenized([source], tmp_path / "t.bin", "--skip-bad")) == [[97, 98, 0], [99, 0]]
    said = capsys.readouterr().err
    assert f"left out: {source}:2" in said and f"left out: {source}:3" in said and "left out 2 lines" in said


def test_bad_lines_are_named_in_their_order(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a\\u0000b"}\n{"text": 5}\n{"text": "a\\u0000"}\n')
    assert command.main([str(source), "-o", str(tmp_path / "t")]) == 2
    assert f"{source}:1: holds a text with byte 0" in capsys.readouterr().err
    assert command.main([str(source), "-o", str(tmp_path / "t"), "--skip-bad"]) == 2  # holds nothing else
    said = capsys.readouterr().err
    assert 0 <= said.find(f"{source}:1:") < said.find(f"{source}:2:") < said.find(f"{source}:3:")


def test_what_is_left_of_a_text_continues_no_other_document(small_pieces, tmp_path):
    (tmp_path / "1.txt").write_text("one")
    (tmp_path / "2.txt").write_bytes(b"\xff" * 20 + b"\n" + b"b" * 39 + b"\n" + b"c" * 9)
    out = tokenized([tmp_path / "1.txt", tmp_path / "2.txt"], tmp_path / "t.bin", "--skip-bad")
    assert [bytes(document) for document in documents_in(out)] == [b"one\0", b"b" * 39 + b"\n" + b"c" * 9 + b"\0"] or \
        [bytes(document) for document in documents_in(out)] == [b"one\0", b"c" * 9 + b"\0"]


def test_a_long_line_is_joined_once(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_BYTES", 16)
    line = b'{"text": "' + b"a" * 10**6 + b'"}'
    (tmp_path / "a.jsonl").write_bytes(line + b"\n" + line)
    start = time.process_time()
    pieces = list(corpus.read_pieces(tmp_path / "a.jsonl"))
    assert [piece.content for piece in pieces] == [line + b"\n", line] and [p.first_line for p in pieces] == [1, 2]
    assert time.process_time() - start < 5  # joined block by block it would take minutes


ARGUMENTS = {
    "no such input": (["nowhere.txt"], "INPUT: 'nowhere.txt' does not exist"),
    "an empty folder": (["empty"], "is a folder without a file"),
    "no text": (["empty.txt"], "holds no text"),
    "no tokenizer": (["a.jsonl", "--tokenizer", "nowhere.json"], "cannot be read as a tokenizer"),
    "no tokenizer's JSON": (["a.jsonl", "--tokenizer", "a.jsonl"], "cannot be read as a tokenizer"),
    "an end for bytes": (["a.jsonl", "--eod-token", "x"], "byte 0 ends"),
    "a broken archive": (["broken.txt.gz"], "cannot be read"),
    "a torn archive": (["torn.txt.gz"], "cannot be read"),
    "a broken zst": (["broken.txt.zst"], "cannot be read"),
    "a torn zst": (["torn.txt.zst"], "cannot be read: it ends in the middle of a frame"),
    "no workers": (["a.jsonl", "--workers", "0"], "give 1 or more"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_wrong_arguments_are_refused(case, tmp_path):
    pytest.importorskip("tokenizers")
    zstandard = pytest.importorskip("zstandard")
    arguments, message = ARGUMENTS[case]
    json_lines(tmp_path / "a.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.txt.gz").write_bytes(b"not gzip")
    (tmp_path / "broken.txt.zst").write_bytes(b"not zst.")
    (tmp_path / "torn.txt.zst").write_bytes(zstandard.compress(b"x" * 10**5)[:-2])
    (tmp_path / "torn.txt.gz").write_bytes(gzip.compress(os.urandom(10**5))[:5000])
    (tmp_path / "out").mkdir()
    done = run(*arguments, "-o", tmp_path / "out" / "t", cwd=tmp_path,
               env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("prefix, said", [("", "is no prefix of files"), ("out/", "is no prefix of files"),
                                          ("out/t", "lies in no folder: make out first")])
def test_the_output_is_a_prefix_in_a_folder_that_exists(prefix, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main([str(json_lines(tmp_path / "a.jsonl")), "-o", prefix]) == 2
    assert said in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_several_special_tokens_need_a_choice(tokenizer_file, tmp_path, capsys):
    arguments = [str(json_lines(tmp_path / "a.jsonl")), "-o", str(tmp_path / "t"), "--tokenizer", str(tokenizer_file)]
    assert command.main(arguments) == 2
    assert "--eod-token" in capsys.readouterr().err
    assert command.main([*arguments, "--eod-token", "<stop>"]) == 2
    said = capsys.readouterr().err
    assert "'<stop>'" in said and "<end>, <pad>" in said


def test_a_missing_library_is_named_with_the_line_that_installs_it(tmp_path):
    code = ("import sys; sys.modules['tokenizers'] = None; sys.modules['zstandard'] = None;"
            "from jobs.data.tokenize import main; sys.exit(main(sys.argv[1:]))")
    (tmp_path / "a.txt.zst").write_text("")
    for arguments in (["a.txt", "--tokenizer", "t.json"], [str(tmp_path / "a.txt.zst")]):
        done = subprocess.run([sys.executable, "-c", code, *arguments, "-o", str(tmp_path / "t")], capture_output=True,
                              text=True)
        assert done.returncode == 2 and "pip install" in done.stderr and "Traceback" not in done.stderr


def test_what_is_there_is_replaced_only_on_request(tmp_path, capsys):
    first, second = json_lines(tmp_path / "a.jsonl", ["a"]), json_lines(tmp_path / "b.jsonl", ["b"])
    out = tokenized([first], tmp_path / "t.bin")
    assert command.main([str(second), "-o", str(tmp_path / "t")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert documents_in(out) == [[97, 0]]
    tokenized([second], out, "--overwrite")
    assert documents_in(out) == [[98, 0]]


# ------------------------------------------------------------------ ends before its end
@pytest.fixture
def endless(tmp_path):
    """A command in the middle of its work: its input is a pipe that never ends."""
    os.mkfifo(tmp_path / "in.jsonl")
    (tmp_path / "out").mkdir()
    process = subprocess.Popen([sys.executable, "-m", "jobs.data.tokenize", str(tmp_path / "in.jsonl"), "-o",
                                str(tmp_path / "out" / "t"), "--workers", "2"], stderr=subprocess.PIPE, text=True)
    pipe = os.open(tmp_path / "in.jsonl", os.O_WRONLY)
    line = json.dumps({"text": "y" * 1000}).encode() + b"\n"
    os.set_blocking(pipe, False)
    deadline = time.monotonic() + 60

    def feed() -> None:
        try:
            for _ in range(100):
                os.write(pipe, line * 4)  # below PIPE_BUF: whole, or not at all
        except (BlockingIOError, BrokenPipeError):
            pass  # it is full, or the command has ended

    while not any(p.stat().st_size for p in (tmp_path / "out").glob("*tokens.part")):
        assert process.poll() is None and time.monotonic() < deadline
        feed()
        time.sleep(0.005)
    workers = psutil.Process(process.pid).children()
    yield process, feed, workers
    os.close(pipe)
    for left in (process, *workers):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.communicate()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_leaves_nothing(number, code, endless, tmp_path):
    process, _, workers = endless
    assert len(workers) == 2
    process.send_signal(number)
    assert process.wait(60) == code
    assert "Traceback" not in process.stderr.read()
    assert list((tmp_path / "out").iterdir()) == []
    assert psutil.wait_procs(workers, timeout=60)[1] == []


def test_a_killed_worker_is_an_error_and_no_hang(endless, tmp_path):
    process, feed, workers = endless
    workers[0].kill()
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        feed()
        time.sleep(0.01)
    assert process.returncode == 2
    assert "a worker was killed" in process.stderr.read()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_command_leaves_no_process(endless):
    process, _, workers = endless
    process.kill()
    assert psutil.wait_procs(workers, timeout=60)[1] == []


def test_memory_does_not_grow_with_the_input(tmp_path):
    json_lines(tmp_path / "a.jsonl", ["the mesh of ranks " * 50] * 10_000)  # 9 MB
    code = ("import resource, sys; from jobs.data.tokenize import main; rc = main(sys.argv[1:]);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); sys.exit(rc)")
    peak_mib = []
    for inputs in (1, 4):
        done = subprocess.run([sys.executable, "-c", code, *[str(tmp_path / "a.jsonl")] * inputs, "-o",
                               str(tmp_path / f"t{inputs}"), "--workers", "2"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peak_mib.append(int(done.stdout.split()[-1]))
    assert peak_mib[1] < peak_mib[0] + 8


# ------------------------------------------------------------------ as a person sees it
def test_the_command_says_how_much_it_made(tmp_path):
    done = run(json_lines(tmp_path / "a.jsonl", ["ab", "c"]), "-o", tmp_path / "t")
    assert done.returncode == 0 and done.stderr == ""
    assert re.match(r"2 documents, 5 tokens of 256, [\d,]+ tokens/s\nwrote ", done.stdout)


def test_no_torch_is_loaded():
    code = "import sys, jobs.data.tokenize, jobs.data.inspect; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
