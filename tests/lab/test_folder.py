"""A run never writes into a folder that holds files of another program."""

import os

import pytest

from manyclass.errors import UserError
from manyclass.lab.folder import claim_folder


def test_a_new_folder_and_that_of_an_earlier_run_are_accepted(tmp_path):
    claim_folder(tmp_path / "a" / "b", "paper")
    (tmp_path / "a" / "b" / "results.json").write_text("{}")
    claim_folder(tmp_path / "a" / "b", "paper")


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="which has other files"):
        claim_folder(tmp_path, "paper")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_folder_of_another_command_is_refused(tmp_path):
    claim_folder(tmp_path, "study")
    with pytest.raises(UserError, match="which has other files"):
        claim_folder(tmp_path, "paper")


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="which is a file"):
        claim_folder(tmp_path / "file", "paper")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="can be written to"):
        claim_folder(tmp_path / "new", "paper")
