from dagrl.cli import main


def test_on_one_machine_it_is_run(pipeline, capsys, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "1")
    assert main(["run", str(pipeline), "run.steps=x"]) == 2
    told = capsys.readouterr()
    assert main(["launch", str(pipeline), "run.steps=x"]) == 2
    assert capsys.readouterr() == told


def test_a_wrong_variable_is_one_line(pipeline, capsys, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    assert main(["launch", str(pipeline)]) == 2
    assert capsys.readouterr().err == (
        "dagrl launch: PET_NNODES is 2 and PET_NODE_RANK is not set; number the machines from 0\n"
    )
