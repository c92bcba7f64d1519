"""Run the layouts of `gpu_cases` for a number of GPUs, and write what came out: a line of JSON for each.

    python tests/helpers/gpu_layouts.py --ranks 2 --out FOLDER

All cases run in the same processes, one after the other; a case that fails or hangs costs itself and a new start. What
is reported is the distance of each case from one GPU that computes in float32 (without tensor-float rounding): of the
log-probs, of each gradient, by its norm. Beside it stands the same distance of one GPU in bfloat16: the noise that any
other order of the same arithmetic is allowed. Without GPUs the cases run on the CPU, in float32.

Where there are more ranks than GPUs, they share them: NCCL is told that they are on several hosts, and connects those
through sockets.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from gpu_cases import BUDGET, CASES, SEED, Case, model_spec, rows, spec_fields
from gpu_verdicts import HUGGING_FACE_BOUND, RESUME_BOUND, judged

Run = tuple[Case, str]
"""A case in a precision."""
CASE_TIMEOUT_S = 90.0
START_TIMEOUT_S = 240.0
RENDEZVOUS_S = 80.0


def main() -> None:
    """Run what was asked for; ends with the number of runs that failed."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"layouts_{args.ranks}.jsonl"
    results.unlink(missing_ok=True)
    gpus = _gpus()
    waiting = [
        (case, precision)
        for case in CASES[args.ranks]
        for precision in case.precisions(gpus > 0)
        if _chosen(case, precision, args)
    ]
    with tempfile.TemporaryDirectory(prefix="dagrl-layouts-") as scratch:
        while waiting:
            done = _run_until_one_fails(args.ranks, gpus, waiting, results, Path(scratch))
            waiting = waiting[done + 1 :]
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    failed = sum(line["problem"] is not None for line in lines)
    print(f"{len(lines) - failed} of {len(lines)} runs are within their bounds", flush=True)
    sys.exit(min(failed, 100))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, choices=sorted(CASES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--precision", nargs="*", choices=("fp32", "bf16"))
    return parser.parse_args()


def _chosen(case: Case, precision: str, args: argparse.Namespace) -> bool:
    return (not args.only or case.name in args.only) and (not args.precision or precision in args.precision)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


# -- the parent: starts ranks, and watches them ---------------------------------------------------------------------


def _run_until_one_fails(ranks: int, gpus: int, runs: list[Run], results: Path, scratch: Path) -> int:
    """How many of `runs`, in order, came to an end before one failed or hung; that one is written down as failed."""
    context = multiprocessing.get_context("spawn")
    counter = context.Value("i", 0)
    errors = context.Queue()
    ports = context.Array("i", 2 * len(runs))
    arguments = (ranks, runs, ports, results, scratch, counter, errors)
    hosts = [rank // gpus if 0 < gpus < ranks else None for rank in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(rank, host, *arguments), daemon=True) for rank, host in enumerate(hosts)
    ]
    for process in processes:
        process.start()
    finished, last_sign, problem = 0, time.monotonic(), None
    try:
        while problem is None and any(process.is_alive() for process in processes):
            time.sleep(0.05)
            if counter.value > finished:
                finished, last_sign = counter.value, time.monotonic()
            limit = CASE_TIMEOUT_S if finished else START_TIMEOUT_S
            if any(process.exitcode for process in processes):
                problem = "a rank ended with exit codes " + str([process.exitcode for process in processes])
            elif time.monotonic() - last_sign > limit:
                problem = f"no end within {limit:.0f} s"
        finished = counter.value
    finally:
        # The others have had a moment to say what they saw.
        said = _drain(errors) if problem else []
        for process in processes:
            process.kill()
            process.join()
    if finished < len(runs):
        case, precision = runs[finished]
        _record(results, case, precision, {"problem": "\n".join([problem or "the ranks ended early", *said])})
    return finished


def _drain(errors: Any) -> list[str]:
    said = []
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        while not errors.empty():
            said.append(errors.get())
        time.sleep(0.1)
    return said


def _record(results: Path, case: Case, precision: str, result: dict[str, Any]) -> None:
    line = {"case": case.name, "precision": precision, **result}
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    shown = {name: f"{value:.2e}" for name, value in result.items() if isinstance(value, float)}
    verdict = "ok" if result["problem"] is None else f"PROBLEM: {result['problem']}"
    print(f"{case.name:40} {precision}  {' '.join(f'{n} {v}' for n, v in shown.items())}  {verdict}", flush=True)


# -- a rank ---------------------------------------------------------------------------------------------------------


def _rank(
    rank: int,
    host: int | None,
    ranks: int,
    runs: list[Run],
    ports: Any,
    results: Path,
    scratch: Path,
    counter: Any,
    errors: Any,
) -> None:
    if host is not None:
        # NCCL refuses two ranks of one host on one GPU.
        os.environ |= {"NCCL_HOSTID": f"host{host}", "NCCL_SOCKET_IFNAME": "lo"}
    try:
        world = _World(rank, ranks, _Meetings(rank, ports), scratch)
        for number, (case, precision) in enumerate(runs):
            begun = time.monotonic()
            result = world.run(number, case, precision)
            if rank == 0:
                _record(results, case, precision, {**result, "seconds": time.monotonic() - begun})
                counter.value = number + 1
    except BaseException:
        errors.put(f"rank {rank}: {traceback.format_exc()}")
        errors.close()
        errors.join_thread()
        raise


class _Meetings:
    """Where the ranks meet, once for each engine: ports that rank 0 holds from the start, so that nobody takes them."""

    def __init__(self, rank: int, ports: Any) -> None:
        if rank == 0:
            self.sockets = [_bound() for _ in ports]
            ports[:] = [held.getsockname()[1] for held in self.sockets]
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(ports):
            assert time.monotonic() < deadline, "rank 0 has not started"
            time.sleep(0.05)
        self.rank, self.ports = rank, list(ports)

    def context(self, number: int, ranks: int) -> Any:
        """Of meeting `number`."""
        listen_fd = self.sockets[number].detach() if self.rank == 0 else None
        return _context(self.rank, ranks, self.ports[number], listen_fd)

    @staticmethod
    def alone() -> Any:
        """Of an engine of one rank."""
        own = _bound()
        return _context(0, 1, own.getsockname()[1], own.detach())


def _bound() -> socket.socket:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


def _context(rank: int, ranks: int, port: int, listen_fd: int | None) -> Any:
    from dagrl.backends.backend import RankContext

    return RankContext(rank, ranks, "127.0.0.1", port, RENDEZVOUS_S, SEED, listen_fd=listen_fd)


class _World:
    """One rank, through all cases."""

    def __init__(self, rank: int, ranks: int, meetings: _Meetings, scratch: Path) -> None:
        from squared_error import SquaredError
        from weighted_likelihood import WeightedLikelihood

        self.rank, self.ranks, self.meetings, self.scratch = rank, ranks, meetings, scratch
        self.objective, self.squared_error = WeightedLikelihood(), SquaredError("reward")
        # On a CPU the whole would take minutes; eight rows are still several micro-batches.
        self.rows = rows(24 if _gpus() else 8)
        self.alone = functools.cache(self._alone)

    def run(self, number: int, case: Case, precision: str) -> dict[str, Any]:
        """What the case showed; on rank 0."""
        match case.kind:
            case "layout":
                return self._layout(case, precision, 2 * number)
            case "resume":
                return self._resume(case, precision, 2 * number)
            case "hugging-face":
                return self._hugging_face(case, precision)
        return _zigzag()

    def _engine(self, case: Case, layout: dict[str, Any], precision: str, meeting: int | None) -> Any:
        """An engine of all ranks, or, without a number of a meeting, of this rank alone."""
        from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine
        from dagrl.backends.megatron.section import MegatronEngineSpec

        context = self.meetings.alone() if meeting is None else self.meetings.context(meeting, self.ranks)
        spec = MegatronEngineSpec.model_validate(spec_fields(case, layout, precision))
        return MegatronEngine(model_spec(case.model), spec, context, train_steps=10, trainable=True)

    def _close(self, engine: Any) -> None:
        import torch

        engine.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _mine(self, *, idle: bool = False) -> Any:
        from megatron.core import parallel_state

        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        if idle:
            return self.rows.take(np.arange(0 if replica else len(self.rows)))
        return self.rows.take(np.arange(replica, len(self.rows), replicas))

    def _measure(self, engine: Any, case: Case) -> dict[str, Any]:
        """Log-probs (or scores) by row, gradients and exported weights by name, metrics; whole on rank 0."""
        import torch.distributed as dist
        from gradients import gradients_and_sums

        from dagrl.backends.megatron.engine.loss import join_replicas

        mine = self._mine(idle=case.idle)
        if case.model == "scorer":
            objective: Any = self.squared_error
            read = engine.values(mine, tokens_per_micro_batch=BUDGET)
        else:
            objective = self.objective
            read = engine.logprobs(mine, temperature=0.8, tokens_per_micro_batch=BUDGET)
        own = {int(row): np.atleast_1d(read[i]) for i, row in enumerate(mine.rows)}
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, own)
        joined = {row: values for part in everyones for row, values in part.items()}
        agree = all(np.array_equal(values, joined[row]) for part in everyones for row, values in part.items())
        gradients, sums = gradients_and_sums(engine, mine, objective, tokens_per_micro_batch=BUDGET)
        metrics = {name: stat.mean for name, stat in join_replicas(sums).items()}
        weights = {name: tensor.cpu() for bucket in engine.export_weights(1 << 24) for name, tensor in bucket}
        return {
            "logprobs": np.concatenate([joined[int(row)] for row in self.rows.rows]),
            "ranks_agree": agree,
            "gradients": gradients,
            "metrics": metrics,
            "weights": weights,
        }

    def _alone(self, model: str, precision: str) -> dict[str, Any]:
        """What one GPU says; on rank 0, while the others wait for it in their next engine."""
        case = Case(model)
        engine = self._engine(case, {}, precision, None)
        measured = self._measure(engine, case)
        self._close(engine)
        return measured

    def _layout(self, case: Case, precision: str, meeting: int) -> dict[str, Any]:
        if self.rank == 0:
            truth = self.alone(case.model, "fp32")
            noisy = self.alone(case.model, "bf16") if precision == "bf16" else None
        engine = self._engine(case, case.layout, precision, meeting)
        measured = self._measure(engine, case)
        self._close(engine)
        return judged(measured, truth, noisy, mixture=case.model in ("mixture", "latent")) if self.rank == 0 else {}

    def _resume(self, case: Case, precision: str, meeting: int) -> dict[str, Any]:
        """Two updates, a save, and two more; the same two after a load into another layout."""
        folder = self.scratch / case.name

        def updates(engine: Any) -> list[dict[str, float]]:
            metrics = [engine.update([self._mine()], self.objective, tokens_per_micro_batch=BUDGET) for _ in range(2)]
            return [{name: stat.mean for name, stat in step.items()} for step in metrics]

        engine = self._engine(case, case.layout, precision, meeting)
        before = updates(engine)
        if self.rank == 0:
            folder.mkdir(parents=True)
        engine.save(folder)
        expected = updates(engine)
        self._close(engine)
        engine = self._engine(case, case.resumes_as, precision, meeting + 1)
        engine.load(folder)
        after = updates(engine)
        self._close(engine)
        names = ("loss", "nll", "grad_norm", "lr")
        distance = max(
            abs(a[n] - b[n]) / abs(b[n]) for a, b in zip(after, expected, strict=True) for n in names if b[n]
        )
        moved = abs(expected[1]["loss"] - before[0]["loss"]) / abs(before[0]["loss"])
        problem = None if distance <= RESUME_BOUND else f"the next steps differ by {distance:.1e}"
        return {"metrics": distance, "moved": moved, "problem": problem}

    def _hugging_face(self, case: Case, precision: str) -> dict[str, Any]:
        """The exported weights, opened by Hugging Face in float32, say the same of each token."""
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM

        from dagrl.model_files.library_model import load_hf_config

        engine = self._engine(case, {}, precision, None)
        mine = engine.logprobs(self.rows, temperature=0.8, tokens_per_micro_batch=BUDGET)
        folder = self.scratch / case.name
        load_hf_config(model_spec(case.model)).save_pretrained(folder)
        weights = {name: tensor.cpu() for bucket in engine.export_weights(1 << 24) for name, tensor in bucket}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self._close(engine)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model = model.to(device).eval()
        worst = 0.0
        for i in range(len(self.rows)):
            prompt, response = self.rows["prompt_tokens"][i], self.rows["response_tokens"][i]
            tokens = torch.from_numpy(np.concatenate([prompt, response])).to(device)
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1].double() / 0.8
            expected = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0].cpu().numpy()
            worst = max(worst, float(np.abs(expected - mine[i]).max()))
        return {"logprob": worst, "problem": None if worst <= HUGGING_FACE_BOUND else "Hugging Face says otherwise"}


def _zigzag() -> dict[str, Any]:
    """Our places of a rank's tokens, and Transformer Engine's."""
    import torch

    # Loads the extension, which is not on Python's path.
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch

    from dagrl.backends.megatron.engine.context_parallel import zigzag_index

    random = np.random.default_rng(1)
    compared = 0
    for size in (2, 4, 8):
        lengths = random.integers(1, 40, 13) * 2 * size
        bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
        for rank in range(size):
            theirs = transformer_engine_torch.thd_get_partitioned_indices(bounds, int(lengths.sum()), size, rank)
            if not np.array_equal(zigzag_index(lengths, rank, size), theirs.cpu().numpy()):
                return {"problem": f"rank {rank} of {size} holds other tokens than Transformer Engine's"}
            compared += 1
    return {"compared": compared, "problem": None}


if __name__ == "__main__":
    # CUDA and its libraries read these when they start. Without the second, float32 products round to 10 bits.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    main()
