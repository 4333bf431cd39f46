"""`manyclass info`."""

import shutil

import pytest

from tests.cli.command import run
from tests.tasks.problems import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_info_describes_a_model(trained, capsys, kind):
    done, out, data = trained(kind)
    assert run("info", out) == 0
    output = capsys.readouterr().out
    plain = " ".join(output.replace("│", " ").split())
    assert f"kind {kind}" in plain
    assert f"classes {len(done.model.names)}, such as {done.model.names[0]!r}" in plain
    assert f"examples {done.model.spec.counts.sum():,.0f} trained on" in plain
    number = sum(parameter.numel() for parameter in done.model.parameters())
    assert f"parameters {number:,}; class vectors {len(done.model.names)} × {done.model.head.dim}" in plain
    assert "sampler Learned" in plain
    assert "objective Likelihood" in plain
    assert f"newest step {done.history.progress.step:,}," in plain
    assert "best" in plain
    assert data.name in output.replace("\n", "")
    assert "None" not in output


def test_info_reports_a_damaged_checkpoint(trained, tmp_path, capsys):
    folder = shutil.copytree(trained("features")[1], tmp_path / "copied")
    (folder / "newest.safetensors").write_bytes(b"half of")
    assert run("info", folder) == 0
    assert "damaged" in capsys.readouterr().out


def test_info_sees_damage_within_a_tensor(trained, tmp_path, capsys):
    folder = shutil.copytree(trained("features")[1], tmp_path / "copied")
    data = bytearray((folder / "newest.safetensors").read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 20] ^= 1
    (folder / "newest.safetensors").write_bytes(data)
    assert run("info", folder) == 0
    assert "digest is another than when it was written" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_folder_without_a_model_is_one_line(tmp_path, capsys):
    assert run("info", tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_info_names_another_file_than_a_damaged_one(trained, tmp_path, capsys):
    folder = shutil.copytree(trained("features")[1], tmp_path / "copied")
    (folder / "best.safetensors").write_bytes(b"half of")
    assert run("info", folder) == 2
    assert "newest.safetensors can be read: `checkpoint` may be 'newest'" in capsys.readouterr().err
    assert run("info", folder, "--checkpoint", "newest") == 0
    assert "kind" in capsys.readouterr().out
