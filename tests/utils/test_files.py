"""A file is wholly there or not there at all."""

import hashlib
import os
import stat
import subprocess
import sys

import pytest

from megascale.utils.files import atomic_writer, fsync_directory, sha256_of


def test_the_target_appears_only_when_the_block_ends(tmp_path):
    target = tmp_path / "data.bin"
    with atomic_writer(target, "wb") as file:
        file.write(b"all of it")
        assert not target.exists()
    assert target.read_bytes() == b"all of it"
    assert os.listdir(tmp_path) == ["data.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_no_other(tmp_path, error):
    target = tmp_path / "data.bin"
    target.write_bytes(b"old")

    def write_and_fail():
        with atomic_writer(target, "wb") as file:
            file.write(b"half of the n")
            raise error

    with pytest.raises(error):
        write_and_fail()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["data.bin"]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    target = tmp_path / "data.bin"
    target.write_bytes(b"old")
    program = (
        "import os, signal, sys\n"
        "from megascale.utils.files import atomic_writer\n"
        "with atomic_writer(sys.argv[1], 'wb') as file:\n"
        "    file.write(b'new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, target]).returncode == -9
    assert target.read_bytes() == b"old"


def test_the_data_is_on_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    events = []
    real_fsync, real_replace = os.fsync, os.replace

    def record_fsync(descriptor):
        events.append("fsync directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync file")
        real_fsync(descriptor)

    def record_replace(source, target):
        events.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    with atomic_writer(tmp_path / "data", "wb") as file:
        file.write(b"x")
    assert events == ["fsync file", "rename", "fsync directory"]


def test_text_is_utf8_with_plain_newlines(tmp_path):
    with atomic_writer(tmp_path / "t", "w") as file:
        file.write("é\n")
    assert (tmp_path / "t").read_bytes() == b"\xc3\xa9\n"


def test_the_finished_file_is_as_readable_as_any_other(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    with atomic_writer(tmp_path / "atomic", "w"):
        pass
    assert (tmp_path / "atomic").stat().st_mode == plain.stat().st_mode


def test_a_mode_that_is_not_for_whole_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'a'"), atomic_writer(tmp_path / "t", "a"):
        pass


def test_fsync_directory_takes_a_directory_only(tmp_path):
    fsync_directory(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        fsync_directory(tmp_path / "file")


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_sha256_over_piece_boundaries(tmp_path, size):
    data = bytes(number % 251 for number in range(size))
    (tmp_path / "f").write_bytes(data)
    assert sha256_of(tmp_path / "f") == hashlib.sha256(data).hexdigest()
