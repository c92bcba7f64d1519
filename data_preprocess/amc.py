"""AMC 12 questions of 2022 and 2023, for evaluation: python data_preprocess/amc.py --local_dir data/amc.

Writes test.parquet. From the hub, or with --source from a folder with amc.json (or test/amc.json, or jsonl and parquet
files): rows of {problem, answer}. Answers that are whole numbers are written without a point.
"""

from __future__ import annotations

from functools import partial

from dagrl.data.prepare import Original, run, usual_files
from dagrl.data.prepare.dataset import contest

AMC = contest(
    "amc",
    __doc__ or "",
    "amc",
    Original(
        "AI-MO/aimo-validation-amc",
        ("amc.json", "test/amc.json", *usual_files("train"), *usual_files("test")),
        hub_split="train",
    ),
)

main = partial(run, AMC)

if __name__ == "__main__":
    main()
