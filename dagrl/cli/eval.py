"""`dagrl eval`."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dagrl.cli import completion
from dagrl.cli.errors import complain, exit_on
from dagrl.cli.parameters import AsJson, Quiet, parse_path, parse_pipeline, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagrl.orchestrator.evaluation import Evaluation, Target

_INTERRUPTED = 130


def eval_(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET... [KEY=VALUE...]",
            help="pipeline files, run folders, Hugging Face folders or models of a hub; and keys of their pipelines",
            show_default=False,
            autocompletion=completion.pipelines,
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(parser=parse_path, metavar="FILE", help="prompts in place of data.val; several times for several"),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="an environment, as `agent.environment`; its tasks, without --data"),
    ] = None,
    args: Annotated[str, typer.Option(metavar="JSON", help="with --env: as `agent.args`")] = "{}",
    python: Annotated[
        Path | None, typer.Option(parser=parse_path, metavar="PYTHON", help="with --env: as `agent.python`")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="responses to each prompt")] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", "--step", metavar="N,...", help="checkpoints of a run folder, or best; the newest"),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="an OpenAI endpoint as a target: the part before /chat/completions"),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="with --endpoint: its model")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="with --endpoint: the environment variable with its key")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path, metavar="FILE", help="the results as JSON, beside a page (default: DIR/evaluation.json)"
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", parser=parse_path, metavar="DIR", help="a new folder (default: evals/NAME-TIME)"),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Evaluate checkpoints and models by validations alone, each in its own folder: pass@k with intervals by source.

    Several targets are compared with the first, prompt by prompt. Writes JSON and a page with all samples.

    Examples:
        dagrl eval runs/first --steps 10,20,best
        dagrl eval pipeline.yaml --data data/aime/test.parquet --n 16
        dagrl eval runs/first --env my_tasks:Tasks --python envs/tasks/bin/python
        dagrl eval --endpoint http://127.0.0.1:8000/v1 --model qwen --data data/aime/test.parquet
        dagrl eval Qwen/Qwen3-0.6B runs/first --data data/gsm8k/test.parquet nodes.reward.fn=math
    """
    from dagrl.config.loading.hub import HubError
    from dagrl.orchestrator.evaluation import Question, prepared

    named = [text for text in targets or [] if "=" not in text or Path(text).exists()]
    overrides = [text for text in targets or [] if text not in named]
    with ExitStack() as stack:
        made = Path(stack.enter_context(TemporaryDirectory(prefix="dagrl-eval-")))
        with exit_on("eval", HubError, ValueError):
            agent, tasks = _environment(env, args, python, None if data else made / "tasks.parquet")
            question = Question(tuple(data or tasks), n, agent, tuple(overrides))
            found = [*_targets(named, steps, made), *_endpoint(endpoint, model, api_key_env, made)]
            if not found:
                raise ValueError("name a pipeline file, a run folder, a model or an --endpoint")
            if len({target.name for target in found}) < len(found):
                raise ValueError("two targets have the same name; name each once")
            evaluations = [prepared(target, question) for target in found]
            folder = run_dir or Path("evals") / f"{evaluations[0].target.name}-{time.strftime('%Y%m%d-%H%M%S')}"
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"{folder} is not empty; name a new folder, or remove it")
        for warning in dict.fromkeys(warning for each in evaluations for warning in each.prepared.warnings):
            print(f"dagrl eval: warning: {warning}", file=sys.stderr)
        code = _run(evaluations, folder, quiet=quiet or as_json)
        if code:
            return code
    return _report(evaluations, folder, out or folder / "evaluation.json", as_json=as_json)


def _environment(
    name: str | None, args: str, python: Path | None, tasks: Path | None
) -> tuple[dict[str, Any] | None, list[Path]]:
    """The agent that an environment is, and the file with its tasks, written to `tasks` unless that is None."""
    if name is None:
        if python is not None or args != "{}":
            raise ValueError("--args and --python are for --env; add that, or leave them out")
        return None, []
    from dagrl.cli.data_environment import arguments_of, write_tasks

    agent: dict[str, Any] = {"environment": name, "args": arguments_of(args)}
    if tasks is not None:
        write_tasks(name, tasks, python, agent["args"])
    if python is not None:
        agent["python"] = str(python.absolute())
    return agent, [tasks] if tasks else []


def _targets(named: Sequence[str], steps: str | None, made: Path) -> list[Target]:
    from dagrl.doctor.hardware import list_gpus
    from dagrl.orchestrator.evaluation import targets_of

    wanted = [step.strip() for step in steps.split(",")] if steps else []
    gpus = len(list_gpus()) if named else 0
    return [target for text in named for target in targets_of(parse_pipeline(text), wanted, made, gpus)]


def _endpoint(url: str | None, model: str | None, key: str | None, made: Path) -> list[Target]:
    from dagrl.orchestrator.evaluation import target_of_endpoint

    if url is None or model is None:
        if url or model or key:
            raise ValueError("an endpoint is --endpoint URL and --model NAME; add the other, or leave it out")
        return []
    if key is not None and not os.environ.get(key):
        raise ValueError(f"the environment variable {key} is not set; set it to the endpoint's key")
    return [target_of_endpoint(url, model, key, made)]


def _run(evaluations: Sequence[Evaluation], folder: Path, *, quiet: bool) -> int:
    from dagrl.orchestrator.evaluation import evaluate
    from dagrl.tracking.console import Verbosity
    from dagrl.workers.errors import InterruptedRunError, RefusedFolderError, RunError

    for evaluation in evaluations:
        name = evaluation.target.name
        if not quiet:
            print(f"evaluating {name}", flush=True)
        try:
            evaluate(evaluation, folder / name, Verbosity.QUIET if quiet else Verbosity.NORMAL)
        except RefusedFolderError as error:
            complain("dagrl eval", error)
            return 2
        except RunError as error:
            print(
                f"dagrl eval: {name} failed; its folder is {folder / name}", *error.lines(), sep="\n", file=sys.stderr
            )
            return 1
        except (InterruptedRunError, KeyboardInterrupt):
            print(f"dagrl eval: stopped; {folder} has what was evaluated", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            # As `dagrl run`: libraries of Ray can crash at exit.
            os._exit(_INTERRUPTED)
    return 0


def _report(evaluations: Sequence[Evaluation], folder: Path, out: Path, *, as_json: bool) -> int:
    from dagrl.reporting.evaluation import compare, in_words, read_prompts, results_of
    from dagrl.reporting.html_report import write_html
    from dagrl.tables import render

    names = [evaluation.target.name for evaluation in evaluations]
    with exit_on("eval", OSError, ValueError, code=1):
        read = [
            read_prompts(folder / each.target.name, each.step, each.prepared.loaded.pipeline) for each in evaluations
        ]
        results = [
            results_of(each.target.name, folder / each.target.name, each.step, sets)
            for each, sets in zip(evaluations, read, strict=True)
        ]
        comparisons: list[dict[str, Any]] = [
            {"first": names[0], "second": name, "sets": compare(read[0], sets)}
            for name, sets in zip(names[1:], read[1:], strict=True)
        ]
        document = {"results": results, "comparisons": comparisons}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        page = write_html([folder / name for name in names], out.with_suffix(".html"), evaluation=document)
    if as_json:
        print_json(document)
        return 0
    print(render(in_words(results, comparisons)), end="")
    print(out, page, sep="\n")
    return 0
