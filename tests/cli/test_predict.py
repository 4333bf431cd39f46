"""`manyclass predict`: its output, and where it reads and writes."""

import io
import json
import math
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from manyclass import tasks
from tests.cli.command import run
from tests.tasks import problems
from tests.tasks.problems import CLASSES


def write_queries(folder, content, name="queries.txt"):
    path = folder / name
    path.write_text(content)
    return path


def answers(capsys):
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def objects(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def copied(trained, tmp_path):
    """Return a function from a kind to the folder of a model that the test may change."""
    return lambda kind: shutil.copytree(trained(kind)[1], tmp_path / "copied")


def test_columns_and_objects_say_the_same(trained, tmp_path, capsys):
    done, out, _ = trained("features")
    queries = write_queries(tmp_path, "1:1\n5:1\n", "queries.svm")
    assert run("predict", out, queries, "--top", 4) == 0
    rows = answers(capsys)
    assert run("predict", out, queries, "--top", 4, "--json") == 0
    found = objects(capsys)
    assert [row[0] for row in rows] == [each["example"] for each in found] == ["0", "1"]
    assert [row[1::2] for row in rows] == [each["classes"] for each in found]
    for row, each in zip(rows, found, strict=True):
        assert [float(chance) for chance in row[2::2]] == pytest.approx(each["probabilities"], rel=1e-5)
        assert set(each) == {"example", "classes", "probabilities"}
    with torch.no_grad():
        hidden = torch.zeros(2, 32)
        hidden[0, 0] = hidden[1, 4] = 1
        exact = done.model.head.log_prob(hidden, torch.arange(CLASSES)).exp().topk(4)
    assert [each["classes"] for each in found] == [[done.model.names[i] for i in row] for row in exact.indices.tolist()]
    assert found[1]["probabilities"] == pytest.approx(exact.values[1].tolist(), rel=1e-5)


def test_probabilities_may_be_left_out(trained, tmp_path, capsys):
    _, out, _ = trained("features")
    queries = write_queries(tmp_path, "1:1\n", "queries.svm")
    assert run("predict", out, queries, "--probabilities", "none", "--top", 3) == 0
    assert len(answers(capsys)[0]) == 1 + 3
    assert run("predict", out, queries, "--probabilities", "none", "--top", 3, "--json") == 0
    assert set(objects(capsys)[0]) == {"example", "classes"}


def test_there_are_no_more_answers_than_classes(trained, tmp_path, capsys):
    _, out, _ = trained("features")
    assert run("predict", out, write_queries(tmp_path, "1:1\n", "queries.svm"), "--top", 1000, "--json") == 0
    (found,) = objects(capsys)
    assert len(set(found["classes"])) == CLASSES
    assert sum(found["probabilities"]) == pytest.approx(1, abs=1e-5)


def test_items_of_a_user_are_predicted_only_with_seen(trained, tmp_path, capsys):
    _, out, _ = trained("sequences")
    has = [f"w{i:02}" for i in range(0, CLASSES, 2)]
    queries = write_queries(tmp_path, "".join(f"ann\t{item}\n" for item in has) + "ben\tw01\n")
    assert run("predict", out, queries, "--top", CLASSES, "--json") == 0
    ann, ben = objects(capsys)
    assert sorted(ann["classes"]) == [f"w{i:02}" for i in range(1, CLASSES, 2)]
    assert "w01" not in ben["classes"]
    assert len(ben["classes"]) == CLASSES - 1
    assert run("predict", out, queries, "--top", CLASSES, "--json", "--seen") == 0
    kept = objects(capsys)
    assert [len(each["classes"]) for each in kept] == [CLASSES, CLASSES]
    # Probabilities are over all items in both cases.
    chances = dict(zip(kept[0]["classes"], kept[0]["probabilities"], strict=True))
    assert ann["probabilities"] == pytest.approx([chances[name] for name in ann["classes"]], rel=1e-5)


@pytest.mark.parametrize("option", ["--seen", "--unseen"])
def test_seen_is_refused_for_text(trained, tmp_path, capsys, option):
    _, out, _ = trained("text")
    assert run("predict", out, write_queries(tmp_path, "w00\n"), option) == 2
    assert capsys.readouterr().err == f"manyclass: `{option}` must be left out for text\n"


def test_known_tails_are_predicted_unless_unseen_is_given(trained, tmp_path, capsys):
    _, out, data = trained("triples")
    triples = [
        line.split("\t") for part in ("train", "valid") for line in (data / f"{part}.txt").read_text().splitlines()
    ]
    known = {tail for head, relation, tail in triples if (head, relation) == ("w05", "plus 1")}
    heads = {head for head, relation, tail in triples if (relation, tail) == ("plus 1", "w05")}
    assert known
    assert heads
    queries = write_queries(tmp_path, "w05\tplus 1\n?\tplus 1\tw05\n")
    assert run("predict", out, queries, "--top", CLASSES, "--json") == 0
    assert [len(each["classes"]) for each in objects(capsys)] == [CLASSES, CLASSES]
    assert run("predict", out, queries, "--top", CLASSES, "--json", "--unseen") == 0
    tail, head = (set(each["classes"]) for each in objects(capsys))
    everything = {f"w{i:02}" for i in range(CLASSES)}
    assert tail == everything - known
    assert head == everything - heads


def test_every_user_has_a_line(trained, tmp_path, capsys):
    """There are more users than fit into a batch."""
    _, out, _ = trained("sequences")
    queries = write_queries(tmp_path, "".join(f"u{user}\tw{user % CLASSES:02}\n" for user in range(600)))
    assert run("predict", out, queries, "--top", 1, "--json") == 0
    found = objects(capsys)
    assert [each["example"] for each in found] == [f"u{user}" for user in range(600)]
    # Users of the same item get the same prediction, whatever their position.
    by_item = {}
    for user, each in enumerate(found):
        by_item.setdefault(user % CLASSES, set()).add(each["classes"][0])
    assert all(len(names) == 1 for names in by_item.values())


def test_a_question_mark_stands_for_a_head_or_a_tail(trained, tmp_path, capsys):
    _, out, _ = trained("triples")
    queries = write_queries(tmp_path, "w05\tplus 1\nw05\tplus 1\t?\n?\tplus 1\tw05\n")
    assert run("predict", out, queries, "--top", 2, "--json") == 0
    tail, same, head = objects(capsys)
    assert tail["classes"] == same["classes"]
    assert "w06" in tail["classes"]
    assert "w04" in head["classes"]


@pytest.mark.parametrize(
    ("kind", "queries"), [("text", ["w00 w01", "w05"]), ("triples", ["w05\tplus 1", "?\tplus 1\tw05"])]
)
def test_lines_of_the_standard_input_are_answered_as_they_come(trained, tmp_path, capsys, kind, queries):
    _, out, _ = trained(kind)
    assert run("predict", out, write_queries(tmp_path, "\n".join(queries) + "\n")) == 0
    expected = capsys.readouterr().out.splitlines()
    command = [sys.executable, "-m", "manyclass", "predict", str(out), "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for line, answer in zip(queries, expected, strict=True):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            # This would hang if the first line waited for the second.
            assert process.stdout.readline().split("\t")[1::2] == answer.split("\t")[1::2]
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("kind", ["text", "features"])
def test_a_dash_is_the_standard_input(trained, tmp_path, capsys, monkeypatch, kind):
    _, out, _ = trained(kind)
    content, format_ = {"text": ("w00 w01\nw05\n", []), "features": ("1:1\n2:1\n", ["--format", "svmlight"])}[kind]
    assert run("predict", out, write_queries(tmp_path, content, "queries.svm"), *format_) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert run("predict", out, "-", *format_) == 0
    assert capsys.readouterr().out == expected


def test_answers_may_go_into_a_file(trained, tmp_path, capsys):
    _, out, _ = trained("text")
    queries, file = write_queries(tmp_path, "w00 w01\nw05\n"), tmp_path / "answers.tsv"
    assert run("predict", out, queries) == 0
    expected = capsys.readouterr().out
    assert run("predict", out, queries, "--out", file) == 0
    assert capsys.readouterr().out == ""
    assert file.read_text() == expected


def test_an_old_output_file_stays_if_an_example_cannot_be_read(trained, tmp_path, capsys):
    _, out, _ = trained("triples")
    queries, file = write_queries(tmp_path, "w05\tplus 1\n" * 300 + "horse\tplus 1\n"), tmp_path / "answers.tsv"
    file.write_text("those of yesterday\n")
    assert run("predict", out, queries, "--out", file) == 2
    assert "got 'horse" in capsys.readouterr().err
    assert file.read_text() == "those of yesterday\n"
    assert problems.files(tmp_path) == ["answers.tsv", "queries.txt"]
    assert run("predict", out, queries, "--out", tmp_path / "none" / "answers.tsv") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"manyclass: cannot save {tmp_path / 'none' / 'answers.tsv'}: there is no folder")


def test_an_index_is_made_once_and_again_for_another_model(copied, tmp_path, capsys):
    pytest.importorskip("faiss")
    out = copied("text")
    queries = write_queries(tmp_path, "".join(f"w{i:02} w{(2 * i + 1) % CLASSES:02}\n" for i in range(CLASSES)))
    made, expected = [], None
    for attempt in range(2):
        assert run("predict", out, queries, "--index", "--recall", 1.0) == 0
        found, output = capsys.readouterr()
        made.append("recall@5" in output)
        expected = expected or found
        assert found == expected, attempt
    assert made == [True, False]
    # A larger k or recall than it was tuned for builds the index again.
    assert run("predict", out, queries, "--index", "--recall", 1.0, "--top", 7) == 0
    assert "recall@7" in capsys.readouterr().err
    content = tasks.open_model(out)
    with torch.no_grad():
        content.head.weight.add_(torch.randn_like(content.head.weight))
    from manyclass import storage

    storage.save(out / "best.safetensors", content.content(), content_type="model")
    assert run("predict", out, queries, "--index", "--recall", 1.0, "--top", 7) == 0
    assert "recall@7" in capsys.readouterr().err
    (out / "index.safetensors").write_bytes(b"nothing of the kind")
    assert run("predict", out, queries, "--index", "--recall", 1.0, "--top", 7) == 0
    assert "recall@7" in capsys.readouterr().err


def test_an_index_that_finds_all_gives_the_exact_answers(copied, tmp_path, capsys):
    pytest.importorskip("faiss")
    out = copied("text")
    queries = write_queries(tmp_path, "".join(f"w{i:02}\n" for i in range(CLASSES)))
    assert run("predict", out, queries, "--json") == 0
    exact = objects(capsys)
    assert run("predict", out, queries, "--json", "--index", "--recall", 1.0) == 0
    found = objects(capsys)
    assert [each["classes"] for each in found] == [each["classes"] for each in exact]
    for one, other in zip(found, exact, strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], rel=1e-4)


def test_estimated_probabilities_carry_an_error(copied, tmp_path, capsys):
    pytest.importorskip("faiss")
    out = copied("text")
    queries = write_queries(tmp_path, "".join(f"w{i:02}\n" for i in range(CLASSES)))
    assert run("predict", out, queries, "--json") == 0
    exact = objects(capsys)
    assert run("predict", out, queries, "--json", "--index", "--probabilities", "estimated", "--draws", 6) == 0
    found = objects(capsys)
    assert all(math.isfinite(each["log_error"]) and each["log_error"] >= 0 for each in found)
    # With so few classes all are summed exactly.
    for one, other in zip(found, exact, strict=True):
        assert one["probabilities"][0] == pytest.approx(other["probabilities"][0], rel=0.05)
    assert run("predict", out, queries, "--index", "--probabilities", "estimated") == 0
    assert all(len(row) == 1 + 2 * 5 for row in answers(capsys))


def test_one_example_is_too_few_to_tune_an_index_on(copied, tmp_path, capsys):
    pytest.importorskip("faiss")
    out, queries = copied("text"), write_queries(tmp_path, "w00\n")
    assert run("predict", out, queries, "--index") == 2
    error = capsys.readouterr().err
    assert error == f"manyclass: `data` must hold at least 2 examples to tune an index on, got {queries}\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm_ends_a_command_that_waits_for_lines(trained, ignored):
    """In the background of a script Ctrl-C is ignored, but SIGTERM must still end the command."""
    _, out, _ = trained("text")
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    command = [sys.executable, "-m", "manyclass", "predict", str(out), "-"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        command, **pipes, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, handler)
    ) as process:
        process.stdin.write("w00\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 2
        assert process.stderr.read().strip() == "manyclass: interrupted"


def test_a_closed_pipe_ends_predict_quietly(trained, tmp_path):
    _, out, _ = trained("text")
    queries = write_queries(tmp_path, "w00\n" * 20_000)
    command = [sys.executable, "-m", "manyclass", "predict", str(out), str(queries)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("w00\t")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


def test_data_without_labels_is_enough(trained, tmp_path, capsys):
    """The same rows get the same predictions with labels or without."""
    _, out, _ = trained("features")
    rows = (trained("features")[2]).read_text().splitlines()[:5]
    assert run("predict", out, write_queries(tmp_path, "\n".join(rows) + "\n", "labelled.svm")) == 0
    expected = capsys.readouterr().out
    bare = "\n".join(row.split(" ", 1)[1] for row in rows) + "\n"
    assert run("predict", out, write_queries(tmp_path, bare, "bare.svm")) == 0
    assert capsys.readouterr().out == expected


def write_table(folder, name="animals.csv"):
    path = folder / name
    rows = [f"{i},meow,a cat" if i % 2 else f"{i},moo,a\tcow" for i in range(60)]
    path.write_text("weight,says,label\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("animals")
    assert run("fit", write_table(folder), "--out", folder / "model", "--no-report", "--epochs", 40) == 0
    return folder / "model"


def test_labels_to_be_filled_in_may_be_missing(animals, tmp_path, capsys):
    queries = write_queries(tmp_path, "weight,says,label\n1,meow,\n2,moo,a\tcow\n", "queries.csv")
    assert run("predict", animals, queries, "--json", "--top", 1) == 0
    assert [each["classes"] for each in objects(capsys)] == [["a cat"], ["a\tcow"]]


def test_a_name_is_one_cell(animals, tmp_path, capsys):
    assert run("predict", animals, write_queries(tmp_path, "weight,says\n2,moo\n", "queries.csv"), "--top", 2) == 0
    ((_, name, chance, *others),) = answers(capsys)
    assert name == "a cow"
    assert 0 < float(chance) <= 1
    assert len(others) == 2


def test_the_standard_input_is_of_the_format_that_the_model_knows(animals, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"weight,says\n2,moo\n1,meow\n")))
    assert run("predict", animals, "-", "--top", 1, "--json") == 0
    assert [each["classes"] for each in objects(capsys)] == [["a\tcow"], ["a cat"]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"weight,says\n2,moo,3\n")))
    assert run("predict", animals, "-") == 2
    assert "in line 2 of " in (error := capsys.readouterr().err)
    assert error.endswith("standard input\n")


def test_items_and_users_that_are_left_out_are_reported(trained, tmp_path, capsys):
    _, out, _ = trained("sequences")
    queries = write_queries(tmp_path, "ann w00\nghost nosuch\nben nosuch\nben w03\n")
    assert run("predict", out, queries, "--json") == 0
    output = capsys.readouterr()
    assert [json.loads(line)["example"] for line in output.out.splitlines()] == ["ann", "ben"]
    said = "left out: 2 lines of items that the model does not know, and 1 users without other items"
    assert output.err == f"manyclass: {said}\n"


def test_lines_before_a_faulty_one_are_answered(trained, tmp_path, capsys):
    _, out, _ = trained("triples")
    assert run("predict", out, write_queries(tmp_path, "w05\tplus 1\nzzz\tplus 1\nw06\tplus 1\n"), "--top", 1) == 2
    output = capsys.readouterr()
    assert output.out.startswith("w05 plus 1\t")
    assert output.out.count("\n") == 1
    assert "that the model knows, got 'zzz\\tplus 1' in line 2 of" in output.err


FAULTY = {
    "features": ("queries.svm", "1:1\n2:1 30:0.5\n1:x\n1:1\n", ["0", "1"], "line 3 of"),
    "text": ("queries.txt", "w00 w01\nw05\n\udcff\nw01\n", ["w00 w01", "w05"], "line 3 of"),
    "sequences": ("queries.txt", "ann\tw00\nann\tw01\nben\tw05\nben\nann\tw02\n", ["ann", "ben"], "line 4 of"),
    "triples": ("queries.txt", "w00\tplus 1\n?\tplus 2\tw05\nw00\n", ["w00 plus 1", "? plus 2 w05"], "line 3 of"),
}


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("kind", FAULTY)
def test_examples_before_a_faulty_one_are_answered(copied, tmp_path, capsys, kind, indexed):
    if indexed:
        pytest.importorskip("faiss")
    name, content, shown, place = FAULTY[kind]
    queries = tmp_path / name
    queries.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert run("predict", copied(kind), queries, *(["--index"] if indexed else [])) == 2
    output, error = capsys.readouterr()
    assert [line.split("\t")[0] for line in output.splitlines()] == shown
    last = error.splitlines()[-1]
    assert last.startswith("manyclass: ")
    assert place in last


def full_output(*arguments):
    """Run a command whose standard output is a full disk; return its exit code."""
    with pytest.MonkeyPatch.context() as patch, open("/dev/full", "w") as full:
        patch.setattr(sys, "stdout", full)
        code = run(*arguments)
        # The file is closed at the end, which must not fail.
        full.flush()
        return code


@pytest.mark.parametrize("command", ["--help", "--version", "info", "evaluate", "predict", "fit"])
def test_a_full_output_is_one_line(trained, tmp_path, capsys, command):
    _, out, data = trained("features")
    arguments = {
        "info": ["info", out],
        "evaluate": ["evaluate", out, data],
        "predict": ["predict", out, data],
        "fit": ["fit", data, "--out", tmp_path / "model", "--no-report", "--epochs", 1],
    }.get(command, [command])
    assert full_output(*arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "manyclass: cannot write the output: No space left on device"


def test_nothing_is_printed_at_exit_after_a_full_output(trained):
    _, out, data = trained("features")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "manyclass", "predict", out, data]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "manyclass: cannot write the output: No space left on device\n"


def test_a_closed_output_is_no_error(trained, tmp_path, monkeypatch):
    _, out, data = trained("features")
    for arguments in (["info", out], ["predict", out, data]):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", None)
            assert run(*arguments) == 0
            sys.stdout.close()
