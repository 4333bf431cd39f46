"""Lines of text files, compressed or not."""

import gzip
import io
import os

import pytest

from manyclass.data import files
from manyclass.data.files import blocks, line_batches, lines, writing
from manyclass.errors import UserError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.txt"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\r", [""]),
        (b"a", ["a"]),
        (b"a\nb\r\nc\rd", ["a", "b", "c", "d"]),
        (b"a\r\r\nb\n\rc", ["a", "", "b", "", "c"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
        ("é\u2028\x0b\x85ő\n".encode(), ["é\u2028\x0b\x85ő"]),
    ],
)
def test_lines_have_any_end_and_blocks_any_size(path, monkeypatch, content, expected, size):
    monkeypatch.setattr(files, "_READ_BYTES", size)
    path.write_bytes(content)
    assert list(lines(path)) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1 << 20])
def test_the_standard_input_is_read_as_a_file_is(path, monkeypatch, size):
    content = b"\xef\xbb\xbfa\nb\r\nc\rd\xc3\xa9\n\ne"
    path.write_bytes(content)
    monkeypatch.setattr(files, "_READ_BYTES", size)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    came = list(line_batches(files.STANDARD_INPUT, 2))
    assert [pair for batch in came for pair in batch] == list(enumerate(["a", "b", "c", "dé", "", "e"], 1))
    assert [pair for batch in line_batches(path, 2) for pair in batch] == [pair for batch in came for pair in batch]
    assert max(map(len, came)) <= 2


def test_blocks_know_the_number_of_their_first_line(path, monkeypatch):
    monkeypatch.setattr(files, "_READ_BYTES", 8)
    path.write_bytes(b"one\r\ntwo\r\nthree\r\nfour\r\n")
    found = list(blocks(path))
    assert [line for block in found for line in block.data.split(b"\n")[:-1]] == [b"one", b"two", b"three", b"four"]
    assert [block.first for block in found] == [
        1 + b"".join(b.data for b in found[:i]).count(b"\n") for i in range(len(found))
    ]
    assert len(found) > 1
    assert found[-1].done == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\0c\n", "must be text, got a NUL byte in line 2 of"),
        (b"a\n\nb\xffc\n", "must be UTF-8, got byte 0xff in line 3 of"),
        ("é".encode("utf-16"), "must be UTF-8, got byte 0xff in line 1 of"),
        ("aé".encode()[:-1], "must be UTF-8, got byte 0xc3 in line 1 of"),
    ],
)
def test_bytes_that_are_no_text_are_refused_with_their_line(path, content, message):
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(lines(path))


def test_a_line_without_end_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"short\n" + b"a" * (100 << 20), 1))
    with pytest.raises(UserError, match="lines of at most 64 MiB, got a longer one, line 2 of"):
        sum(1 for _ in lines(path))


def test_folders_missing_files_and_pipes_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"`data` must be a file, got the folder "):
        list(lines(tmp_path))
    with pytest.raises(UserError, match="No such file or directory"):
        list(lines(tmp_path / "missing"))
    with pytest.raises(UserError, match="must be a file that can be read"):
        list(lines(tmp_path / "a\0b"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="must be a file on a disk"):
        list(lines(tmp_path / "pipe"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(path):
    path.write_text("a")
    path.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        list(lines(path))


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path):
    def fill():
        with writing(tmp_path / "new", ("a", "b")):
            (tmp_path / "new" / "a").write_text("begun")
            (tmp_path / "new" / "other").write_text("other")
            with open("/dev/full", "wb") as full:
                full.write(b"more")

    if not os.path.exists("/dev/full"):
        pytest.skip("this machine has no /dev/full")
    with pytest.raises(UserError, match=r"The disk of .*new is full"):
        fill()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]


def test_a_file_in_place_of_the_folder_is_refused(path):
    path.write_text("a file")
    with pytest.raises(UserError, match="`folder` must be one that can be written to"), writing(path, ()):
        pass
    assert path.read_text() == "a file"
