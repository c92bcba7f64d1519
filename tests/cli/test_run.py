from dagrl.cli import main
from dagrl.orchestrator.outcome import RunOutcome


def test_a_run_begins_with_what_the_check_warns_of(pipeline, capsys, monkeypatch):
    monkeypatch.setattr(
        "dagrl.orchestrator.run.run_pipeline", lambda checked, plan, folder: RunOutcome(10, stopped=False)
    )
    assert main(["run", str(pipeline), "nodes.ref={op: logprob, engine: actor, write: ref_logprob}"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("dagrl run: warning: ") and "nodes.ref.engine" in warning
