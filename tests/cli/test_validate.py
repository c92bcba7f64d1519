import pytest

from dagrl.cli import main


def test_says_what_the_file_declares(pipeline, capsys):
    assert main(["validate", str(pipeline)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{pipeline}: tiny is valid"
    for line in (
        "  qwen3 with random weights (hidden_size 64), a tokenizer of bytes",
        f"  train  {pipeline.parent / 'train.parquet'}  (16 prompts)",
        "  all  2 CPU slots",
        "  actor      megatron  on all: tp 1, dp 2",
        "  generator  hf        on all: 2 replicas, weights from actor",
        "  advantage  advantage on host     reward, response_mask, group_id -> advantage",
    ):
        assert line in out


def test_takes_overrides(pipeline, capsys):
    assert main(["validate", str(pipeline), "name=other", "engines.actor.parallel.tensor_model_parallel_size=2"]) == 0
    out = capsys.readouterr().out
    assert "other is valid" in out
    assert "on all: tp 2, dp 1" in out


def test_prints_every_problem_on_stderr_and_exits_with_2(pipeline, capsys):
    assert main(["validate", str(pipeline), "run.stepz=1", "groups.all.cpus_per_node=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "override run.stepz=1",
        "override groups.all.cpus_per_node=x",
    ]


@pytest.mark.parametrize("content", ["", "- a\n", "name: [\n", "a: 1\na: 2\n", "name: x\n", "data: 1\nnodes: []\n"])
def test_never_ends_in_a_traceback(tmp_path, capsys, content):
    path = tmp_path / "p.yaml"
    path.write_text(content)
    assert main(["validate", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines
    for line in lines:
        file, number, place, message = line.split(":", 3)
        assert (file, int(number) >= 1) == (str(path), True)
        assert place.strip()
        assert "; " in message
