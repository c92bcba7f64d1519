"""`dagrl agent`."""

from __future__ import annotations

from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.help import help_of
from dagrl.cli.parameters import Overrides, Pipeline

agent = typer.Typer(rich_markup_mode=None, subcommand_metavar="COMMAND ...")


def _agent() -> None:
    """Look at the agent of a pipeline's rollout.

    Examples:
        dagrl agent try tiny_agent
    """


def try_once(
    pipeline: Pipeline,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option(metavar="N", help="row of the training file, from 0")] = 0,
) -> int:
    """Run the agent once on a row of the training file, against the model's initial weights.

    Starts the generator only, in this process or in its engine's environment, and prints the conversation with its
    turns, reward and output.

    Examples:
        dagrl agent try tiny_agent
        dagrl agent try pipeline.yaml --row 3
    """
    from dagrl.config.loading.hub import HubError
    from dagrl.validation.prepare import prepare

    with exit_on("agent try", HubError):
        prepared = prepare(pipeline, overrides or [], with_weights=True)
    print(f"starting the generator of {prepared.loaded.pipeline.name}", flush=True)
    from dagrl.orchestrator.agent_trial import try_agent

    with exit_on("agent try", ValueError, OSError):
        try_agent(prepared, row)
    return 0


agent.callback(**help_of(_agent))(_agent)
agent.command("try", short_help="Run it once, and print the conversation.", **help_of(try_once))(try_once)
