"""Show where a decoding step of an SGLang server goes, kernel by kernel, in bfloat16 and in fp8.

    python benchmarks/decode_profile.py --out FOLDER --model 8b [--only bf16 channel_cache] [--server page_size=128]

The script starts one server for each variant, one after the other, with dagrl's arguments and random weights. A server
decodes all responses in one batch, and SGLang's profiler records some steps. Prints the seconds of a whole rollout, and
milliseconds: of a step, of the time in which a kernel runs, and of each kernel. FOLDER keeps the traces, which Perfetto
opens. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from bare_sglang import BareServer
from fp8 import VARIANTS
from options import add_load, parsed, parser_of
from pipelines import Load, prompt_texts, server_arguments
from ranks import apart
from reports import tell

from dagrl.backends.serving.model_folder import model_folder
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema import ModelSpec

STEPS = 16
_COMPILED = 4
"""Tokens of responses with which a server has compiled all that a rollout needs."""
_SHOWN = 24
_SERVED = ("bf16", "rollout", "cache", "channel", "channel_cache")
_TEMPLATE = re.compile(r"<.*|\(.*")
_SHORT = 70
_GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def main() -> None:
    """Profile the variants, print what they spend their time on."""
    parser = parser_of(__doc__, "8b")
    add_load(parser)
    parser.add_argument("--only", nargs="+", choices=_SERVED, default=list(_SERVED))
    parser.add_argument("--server", nargs="+", default=[], metavar="FIELD=VALUE", help="further fields of ServerArgs")
    args, model = parsed(parser, prompts=4, n=2, prompt_tokens=16, response_tokens=256)
    if args.smoke:
        # CPUs have no fp8.
        args.only = ["bf16"]
    load = Load(args.prompts, args.n, args.prompt_tokens, args.response_tokens)
    given = {name: yaml.safe_load(value) for name, value in (field.split("=", 1) for field in args.server)}
    rows = {}
    for name in args.only:
        rows[name] = apart(partial(_profiled, name, model, load, given, args.out / f"decode_{name}"))
        # What is known stays known if a later variant is ended.
        _report(args, rows)


def _profiled(name: str, model: Path, load: Load, given: dict[str, Any], traces: Path) -> dict[str, Any]:
    """Milliseconds of a step, in all and of each kernel."""
    section = VARIANTS[name][0]
    server = server_arguments(load) | section.get("server", {})
    with tempfile.TemporaryDirectory() as scratch:
        weights = {}
        spec = SglangEngineSpec(backend="sglang", group="bare", **section | {"server": server | given})
        server["page_size"] = spec.page_size
        fp8 = spec.taken_fp8
        if fp8 is not None:
            weights = {"load_format": "dummy"}
            model = model_folder(ModelSpec(path=model), Path(scratch), seed=0, with_weights=False, fp8=fp8)
        bare = BareServer(model, server, **weights, **given)
        first, second, third, last = itertools.batched(prompt_texts(load, 4), load.prompts)
        # The first call compiles what is left to compile, the second tells when all rows decode.
        bare.generate(list(first), replace(load, response_tokens=_COMPILED))
        prefill_s = bare.generate(list(second), replace(load, response_tokens=1))
        rollout_s = bare.generate(list(third), load)
        bare.profile(list(last), load, traces, after_s=2 * prefill_s, steps=STEPS)
        bare.close()
    # An earlier call may have left others.
    trace = max(traces.glob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(trace) as file:
        return {"rollout_s": rollout_s, **kernel_times(json.load(file)["traceEvents"], STEPS)}


def kernel_times(events: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Milliseconds of one of `steps`: ``step_ms``, ``busy_ms`` in which a kernel runs, and ``kernels`` by name.

    `events` are those of a Chrome trace. Where no GPU worked they are the operators of a CPU.
    """
    on_gpu = [each for each in events if each.get("cat") in _GPU_KINDS]
    found = sorted(on_gpu or [each for each in events if each.get("cat") == "cpu_op"], key=lambda each: each["ts"])
    busy, end = 0.0, found[0]["ts"]
    times: Counter[str] = Counter()
    for each in found:
        over = each["ts"] + each["dur"]
        busy += max(0.0, over - max(end, each["ts"]))
        end = max(end, over)
        times[_short(each["name"])] += each["dur"]
    scale = 1e-3 / steps
    kernels = {name: taken * scale for name, taken in times.most_common()}
    return {"step_ms": (end - found[0]["ts"]) * scale, "busy_ms": busy * scale, "kernels": kernels}


def _short(name: str) -> str:
    """A kernel's name without what its template and its arguments are."""
    return _TEMPLATE.sub("", name.removeprefix("void "))[:_SHORT]


def _report(args: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{args.model}, {args.prompts} x {args.n} responses behind {args.prompt_tokens} tokens, milliseconds")
    print(f"{'':{_SHORT}}{''.join(f'{name:>10}' for name in rows)}")
    of_row = (("a rollout, seconds", "rollout_s"), ("a step", "step_ms"), ("of it, a kernel runs", "busy_ms"))
    for title, field in of_row:
        print(f"{title:{_SHORT}}{''.join(f'{row[field]:10.3f}' for row in rows.values())}")
    most: Counter[str] = Counter()
    for row in rows.values():
        for kernel, taken in row["kernels"].items():
            most[kernel] = max(most[kernel], taken)
    for kernel, _ in most.most_common(_SHOWN):
        print(f"{kernel:{_SHORT}}{''.join(f'{row["kernels"].get(kernel, 0):10.3f}' for row in rows.values())}")
    tell({"model": args.model, "server": args.server, "measured": rows}, [], args.json)


if __name__ == "__main__":
    main()
