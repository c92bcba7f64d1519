"""What several benchmarks are told alike: which model, and where files go."""

from __future__ import annotations

import argparse
from pathlib import Path

from workload import MODELS, write_model


def parser_of(description: str | None, model: str = "1.7b") -> argparse.ArgumentParser:
    """A parser that knows of the model and of the places for files."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default=model)
    parser.add_argument("--weights", type=Path, help="keep start weights here for later runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and their files")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and little to do: to try the script out")
    return parser


def add_load(parser: argparse.ArgumentParser, *, prompts: str | None = None) -> None:
    """Of how many prompts and tokens a step is; `prompts`: of what there are so many."""
    parser.add_argument("--prompts", type=int, default=128, help=prompts)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--rows-per-micro-batch", type=int, default=16)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Keys of pipeline files, as `dagrl run` takes them."""
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of every pipeline of dagrl")


def add_backend(parser: argparse.ArgumentParser) -> None:
    """The server that generates."""
    parser.add_argument(
        "--backend",
        choices=("sglang", "vllm"),
        default="sglang",
        help="vllm: in the environment that `make vllm` makes",
    )


def parsed(parser: argparse.ArgumentParser, **smoke: int) -> tuple[argparse.Namespace, Path]:
    """The arguments, with `out` made, and the folder of the model's start weights; `smoke` stands for little to do."""
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(smoke, model="tiny")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    return args, write_model((args.weights or args.out / "weights").resolve() / args.model, MODELS[args.model])
