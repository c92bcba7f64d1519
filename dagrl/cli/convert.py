"""`dagrl convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dagrl.cli.export import print_result
from dagrl.cli.parameters import OutputFolder, parse_path


def convert(
    source: Annotated[Path, typer.Argument(parser=parse_path, metavar="SOURCE", help="the folder to read")],
    output: OutputFolder,
    to: Annotated[Literal["hf", "megatron"], typer.Option(help="the format to write")],
    model: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="FOLDER", help="with --to hf: where config and tokenizer are"),
    ] = None,
) -> int:
    """Convert a Hugging Face folder to Megatron's distributed format, or the other way round.

    Megatron's format is for `dist_checkpointing_path`, or for Megatron-LM.
    """
    from dagrl.orchestrator.export import convert_to_hf, convert_to_megatron

    if to == "megatron":
        return print_result("convert", lambda: convert_to_megatron(source, output))
    if model is None:
        raise typer.BadParameter("--to hf needs --model, a Hugging Face folder for config and tokenizer")
    return print_result("convert", lambda: convert_to_hf(source, model, output))
