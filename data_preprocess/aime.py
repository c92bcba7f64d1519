"""AIME questions, for evaluation: python data_preprocess/aime.py --local_dir data/aime.

Writes test.parquet. AIME 2024 from the hub; another year by its name there, such as --hub_name math-ai/aime25
--hub_split test. With --source, a folder with aime.json (or test/aime.json, or jsonl and parquet files): rows of
{problem, answer}.
"""

from __future__ import annotations

from functools import partial

from dagrl.data.prepare import Original, run, usual_files
from dagrl.data.prepare.dataset import contest

AIME = contest(
    "aime",
    __doc__ or "",
    "aime",
    Original(
        "HuggingFaceH4/aime_2024",
        ("aime.json", "test/aime.json", *usual_files("train"), *usual_files("test")),
        hub_split="train",
    ),
)

main = partial(run, AIME)

if __name__ == "__main__":
    main()
