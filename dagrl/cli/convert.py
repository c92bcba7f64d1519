"""`dagrl convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dagrl.cli.export import print_result
from dagrl.cli.parameters import AsJson, OutputFolder, parse_path


def convert(
    source: Annotated[Path, typer.Argument(parser=parse_path, metavar="SOURCE", help="the folder to read")],
    output: OutputFolder,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="hf, or the backend whose own format to write")],
    model: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="FOLDER", help="with --to hf: where config and tokenizer are"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Convert a Hugging Face folder to a backend's own format, or the other way round.

    `--to megatron` writes Megatron's distributed format, for `dist_checkpointing_path` or for Megatron-LM.

    Examples:
        dagrl convert Qwen3-8B -o Qwen3-8B-mcore --to megatron
        dagrl convert Qwen3-8B-mcore -o Qwen3-8B-hf --to hf --model Qwen3-8B
    """
    from dagrl.config.schema.backends import backend_packages
    from dagrl.orchestrator import export

    if to != "hf" and to not in backend_packages():
        raise typer.BadParameter(f"--to takes hf or a backend ({', '.join(backend_packages())}), got {to!r}")
    if to == "hf" and model is None:
        raise typer.BadParameter("--to hf needs --model, a Hugging Face folder for config and tokenizer")
    return print_result("convert", output, lambda: export.convert(source, output, to, model), as_json=as_json)
