"""The command line. One module per command: it parses, calls the package that does the work, and prints.

Exit codes: 0 success; 1 the command failed; 2 the pipeline or the call is wrong, one line for each problem on stderr;
3 the plan does not fit. A command imports what it needs when it is called, so that `dagrl validate` starts quickly and
needs neither torch nor ray.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from dagrl.cli.agent import agent
from dagrl.cli.convert import convert
from dagrl.cli.data import data
from dagrl.cli.diff import diff
from dagrl.cli.doctor import doctor
from dagrl.cli.errors import complain
from dagrl.cli.eval import eval_
from dagrl.cli.export import export
from dagrl.cli.graph import graph
from dagrl.cli.help import help_of
from dagrl.cli.import_ import import_
from dagrl.cli.init import init
from dagrl.cli.launch import launch
from dagrl.cli.plan import plan
from dagrl.cli.replay import replay
from dagrl.cli.report import report
from dagrl.cli.run import run
from dagrl.cli.templates import templates
from dagrl.cli.ui import ui
from dagrl.cli.validate import validate
from dagrl.cli.why import why
from dagrl.config.errors import PipelineError
from dagrl.version import __version__

INTERRUPTED = 130

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, subcommand_metavar="COMMAND ...")
for command, summary in (
    (init, "Begin a project."),
    (templates, "List or print templates."),
    (data, "Write the prompt files of a data set."),
    (validate, "Check a pipeline file."),
    (graph, "Draw the DAG of a pipeline."),
    (plan, "Estimate memory and time of a run."),
    (run, "Train."),
    (launch, "Train on several machines."),
    (eval_, "Evaluate checkpoints, models and endpoints."),
    (report, "Summarize a run."),
    (ui, "Show runs in a browser."),
    (why, "Explain why steps take so long."),
    (replay, "Run a recorded node again."),
    (diff, "Find where two runs part."),
    (export, "Write the policy of a run as a Hugging Face folder."),
    (convert, "Convert weights between Hugging Face and Megatron."),
    (import_, "Translate a script of another framework into a pipeline."),
):
    # Options after the name of a data set belong to its script.
    settings = {"allow_interspersed_args": command is not data}
    app.command(command.__name__.rstrip("_"), short_help=summary, context_settings=settings, **help_of(command))(
        command
    )
app.add_typer(doctor, name="doctor", short_help="Report what this machine can run.")
app.add_typer(agent, name="agent", short_help="Try the agent of a rollout.")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"dagrl {__version__}")
        raise typer.Exit


def dagrl(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models, declared as a DAG in a pipeline file.

    Examples:
        dagrl init sums --template tiny_grpo
        dagrl validate sums/pipeline.yaml
        dagrl run tiny_grpo
        dagrl report runs/tiny-grpo
    """


app.callback(**help_of(dagrl))(dagrl)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        code = app(arguments, prog_name="dagrl", standalone_mode=False)
        sys.stdout.flush()
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 2
    except TyperException as error:
        complain(*_one_sentence(error))
        return error.exit_code
    except OSError as error:
        complain("dagrl", error)
        return 1
    if code == INTERRUPTED:
        print("dagrl: interrupted", file=sys.stderr)
    return code


def _one_sentence(error: TyperException) -> tuple[str, str]:
    """Describe a wrong call in one line: the command, then the mistake and where the usage is."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "dagrl"
    message = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    if "." in getattr(error, "option_name", ""):
        message += "; set a key without dashes, for example run.steps=10"
    return command, f"{message[:1].lower()}{message[1:]}; see `{command} --help`"
