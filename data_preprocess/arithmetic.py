"""Additions such as ``3+4=`` as prompts: python data_preprocess/arithmetic.py --local_dir data/arithmetic.

Every pair of operands is in train.parquet or in test.parquet, never in both: the test file asks what training has not
shown. With ``--held_out 0`` both files hold all pairs, for tasks so small that each fact must be seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from dagrl.data.prepare.command import exit_on_errors
from dagrl.data.prompt_file import PromptRow, write_prompts

EXTRA_INFO = {
    "split": pa.string(),
    "left": pa.int64(),
    "right": pa.int64(),
    "wrong": pa.string(),
    "hinted": pa.string(),
}
"""``wrong`` is a result that is one too many: what `dpo` may learn to reject. ``hinted`` is the prompt behind its
result, for self-distillation.
"""


def split_pairs(largest: int, held_out: float, seed: int) -> dict[str, np.ndarray]:
    """All pairs of operands 0..largest, shuffled and split: {"train": int64 [n, 2], "test": int64 [m, 2]}.

    ``held_out`` is the share of pairs in the test file; with 0 all pairs are in both. Raises ValueError where a file
    would be empty.
    """
    operands = largest + 1
    pairs = operands * operands
    test = round(pairs * held_out)
    if largest < 1 or (held_out and not 0 < test < pairs):
        raise ValueError(
            f"operands up to {largest} with a share of {held_out} held out leave train.parquet or test.parquet empty; "
            "raise --largest, or choose --held_out between 0 and 1"
        )
    order = np.random.default_rng(seed).permutation(pairs)
    both = np.stack([order // operands, order % operands], axis=1)
    return {"train": both[test:], "test": both[:test] if held_out else both}


def prompts(pairs: np.ndarray, split: str) -> Iterator[PromptRow]:
    for left, right in pairs.tolist():
        prompt, result = f"{left}+{right}=", left + right
        numbers = {"left": left, "right": right, "wrong": str(result + 1)}
        extra_info = {"split": split, **numbers, "hinted": f"{result}={prompt}"}
        yield PromptRow("dagrl/arithmetic", prompt, str(result), extra_info)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_dir", type=Path, required=True, help="folder to write train.parquet and test.parquet to"
    )
    parser.add_argument("--largest", type=int, default=9, help="largest operand; default: %(default)s")
    parser.add_argument(
        "--held_out", type=float, default=0.2, help="share of pairs for test.parquet only; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=1, help="of order and split, 0 or above; default: %(default)s")
    options = parser.parse_args(arguments)
    with exit_on_errors(__file__):
        for split, pairs in split_pairs(options.largest, options.held_out, options.seed).items():
            path = options.local_dir / f"{split}.parquet"
            print(f"{path}: {write_prompts(path, prompts(pairs, split), EXTRA_INFO)} rows")


if __name__ == "__main__":
    main()
