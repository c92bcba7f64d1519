"""Measure what sleeping and offloading free on GPUs, and that everything comes back to the bit.

    python tests/helpers/gpu_memory.py --ranks 2 --out FOLDER [--only tp2 pp2] [--first-sleeps]

Each case has processes of its own, so that what the driver counts is the engine's: used memory is the driver's, less
that of a bare CUDA context. A line of JSON for each case goes to FOLDER/memory_RANKS.jsonl, with the largest figure of
all ranks for what should be small and the smallest for what should be large; seconds are the slowest rank's.

With `--first-sleeps` the line says, in a minute, how long first sleeps take with the host's memory pinned as dagrl does
it and as the driver does (`first_sleeps`).
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CASE_TIMEOUT_S = 240.0
RENDEZVOUS_S = 120.0
VOCABULARY, LAYERS = 32768, 16
ROWS, PROMPT, RESPONSE = 16, 128, 896
BUDGET = 2048
"""Small, for the deterministic attention's room on the device grows with its square."""
CYCLES = 3
UPDATES = 2
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": LAYERS,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
"""0.94 billion parameters: 16 GiB with gradients and optimizer on one GPU, beside which kernels weigh little."""
ALL = {"param": True, "grad": True, "optimizer": True}
LARGE = ("freed_share", "gib_s")
"""How the names end of what should be large."""
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class Case:
    """An engine to measure."""

    name: str
    ranks: int
    spec: dict[str, Any] = field(default_factory=dict)
    trainable: bool = True
    saves: bool = False
    """Whether it also saves, goes on, loads, and goes on again."""
    layers: int = LAYERS
    only_first_sleeps: bool = False


CASES = [
    Case("plain", 1),
    # Says whether two runs are the same to the bit at all.
    Case("plain-again", 1),
    Case("offload", 1, {"offload": ALL}, saves=True),
    Case("precision-aware", 1, {"offload": ALL, "optimizer": {"use_precision_aware_optimizer": True}}),
    Case("hybrid", 1, {"optimizer": {"optimizer_cpu_offload": True}}, saves=True),
    Case("hybrid-half", 1, {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}}),
    Case("frozen", 1, {"offload": {"param": True}}, trainable=False),
    Case("tp2", 2, {"parallel": TP2}),
    Case("tp2-kept", 2, {"parallel": TP2, "keep_communicators": True}),
    Case("pp2", 2, {"parallel": {"pipeline_model_parallel_size": 2}}),
    Case("cp2", 2, {"parallel": {"context_parallel_size": 2}}),
    Case("dp2", 2, {"ddp": OVERLAP}),
    Case("dp2-offload", 2, {"ddp": OVERLAP, "offload": ALL}),
]
FIRST_SLEEPS = [
    Case("first-sleeps", 1, layers=8, only_first_sleeps=True),
    Case("first-sleeps-tp2", 2, {"parallel": TP2}, only_first_sleeps=True),
]


def main() -> None:
    """Run the cases for a number of ranks; ends with how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, choices=sorted({case.ranks for case in CASES}))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--first-sleeps", action="store_true", help="nothing but how long first sleeps take")
    args = parser.parse_args()
    cases = FIRST_SLEEPS if args.first_sleeps else CASES
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"memory_{args.ranks}.jsonl"
    failed = 0
    with results.open("w") as file:
        for case in (case for case in cases if case.ranks == args.ranks and (not args.only or case.name in args.only)):
            line = {"case": case.name, **_run(case)}
            failed += line.get("problem") is not None
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)
    sys.exit(failed)


def _run(case: Case) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    from dagrl.workers.listener import listen

    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="dagrl-memory-") as scratch:
        ranks = [context.Process(target=_rank, args=(r, case, port, scratch, answers)) for r in range(case.ranks)]
        for rank in ranks:
            rank.start()
        found: dict[str, Any] = {}
        begun = time.monotonic()
        try:
            received = [answers.get(timeout=CASE_TIMEOUT_S) for _ in ranks]
            problems = [answer["problem"] for answer in received if "problem" in answer]
            found |= {"problem": "\n".join(problems)} if problems else _joined(received)
        except queue.Empty:
            found["problem"] = f"no answer from some rank within {CASE_TIMEOUT_S:.0f} s"
        finally:
            answered = time.monotonic()
            for rank in ranks:
                rank.kill()
                rank.join()
        return found | {
            "whole_case_s": round(answered - begun, 1),
            # The kernel takes what the rank had pinned, too.
            "killed_in_s": round(time.monotonic() - answered, 2),
        }


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of all ranks' figures."""
    joined: dict[str, Any] = {}
    for name, first in ranks[0].items():
        values = [rank[name] for rank in ranks]
        if isinstance(first, bool):
            joined[name] = all(values)
        elif isinstance(first, float):
            joined[name] = round(min(values) if name.endswith(LARGE) else max(values), 4)
        else:
            joined[name] = first
    return joined


# -- a rank ---------------------------------------------------------------------------------------------------------


def _rank(rank: int, case: Case, port: int, scratch: str, answers: Any) -> None:
    # Attention's backward pass adds up in one order, so that two runs can be compared to the bit.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    try:
        answers.put(_Measured(rank, case, port, Path(scratch)).figures())
    except BaseException:
        answers.put({"problem": f"rank {rank}: {traceback.format_exc()}"})
        raise


class _Measured:
    """One rank of the engine of a case."""

    def __init__(self, rank: int, case: Case, port: int, scratch: Path) -> None:
        import torch

        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        self.bare = 0.0
        self.bare = self.used()

        from weighted_likelihood import WeightedLikelihood

        from dagrl.backends.backend import RankContext
        from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine
        from dagrl.backends.megatron.section import MegatronEngineSpec
        from dagrl.config.schema import ModelSpec

        tokenizer = {"kind": "characters", "alphabet": "ab"}
        shape = SHAPE | {"num_hidden_layers": case.layers}
        model = ModelSpec.model_validate({"init": shape, "tokenizer": tokenizer})
        fields = {"backend": "megatron", "group": "train", "keep_communicators": False, **case.spec}
        fields["optimizer"] = {"lr": 1e-5, **case.spec.get("optimizer", {})}
        ranks = RankContext(rank, case.ranks, "127.0.0.1", port, RENDEZVOUS_S, 3)
        spec = MegatronEngineSpec.model_validate(fields)
        self.case, self.rank, self.scratch = case, rank, scratch
        self.engine = MegatronEngine(model, spec, ranks, train_steps=100, trainable=case.trainable)
        self.objective = WeightedLikelihood(needs_entropy=False)
        self.batch = _mine(_rows())

    def used(self) -> float:
        """GiB on the device, as the driver counts, less the bare context."""
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30 - self.bare

    def update(self) -> float:
        stats = self.engine.update([self.batch], self.objective, tokens_per_micro_batch=BUDGET)
        return stats["grad_norm"].mean

    def logprobs(self) -> np.ndarray:
        return self.engine.logprobs(self.batch, temperature=1.0, tokens_per_micro_batch=BUDGET).values

    def figures(self) -> dict[str, Any]:
        """Train, go to sleep and wake up some times, train again."""
        import torch

        found: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
        norms = [self.update() for _ in range(UPDATES)] if self.case.trainable else []
        if self.case.only_first_sleeps:
            from first_sleeps import first_sleeps, pinning_alone

            found |= first_sleeps(self.engine, self.logprobs) | pinning_alone()
            self.engine.close()
            return found
        self.logprobs()
        torch.cuda.empty_cache()
        found["between_tasks_gib"] = self.used()
        found["torch_reserved_gib"] = torch.cuda.memory_reserved() / 2**30
        found |= self._sleeps()
        found |= self._turn()
        found["exchange"] = self._exchange()
        if self.case.trainable:
            norms += [self.update() for _ in range(UPDATES)]
            found["norms"] = norms
            found["weights"] = self._weights()
        if self.case.saves:
            found |= self._goes_on()
        found["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        self.engine.close()
        return found

    def _sleeps(self) -> dict[str, Any]:
        before, contents = self.logprobs(), self._contents()
        held = self.used()
        found: dict[str, Any] = {"held_gib": held}
        for cycle in range(CYCLES):
            nccl, began = self._close_is_measured(), time.monotonic()
            slept = self.engine.sleep()
            found["sleep_s"] = time.monotonic() - began
            asleep = self.used()
            host = _host_gib()
            began = time.monotonic()
            self.engine.wake()
            found["wake_s"] = time.monotonic() - began
            if cycle == 0:
                found["first_sleep_s"] = found["sleep_s"]
                found["same_to_the_bit"] = contents == self._contents()
                host_first = host
            began = time.monotonic()
            after = self.logprobs()
            found["first_pass_s"] = time.monotonic() - began
            assert np.array_equal(before, after), "log-probs changed over a sleep"
            began = time.monotonic()
            self.logprobs()
            found["next_pass_s"] = time.monotonic() - began
            found |= {"asleep_gib": asleep, **nccl}
        found["awake_again_gib"] = self.used()
        found["freed_share"] = 1 - asleep / held
        found["slept_freed_gib"], found["slept_held_gib"] = slept.freed_gib, slept.held_gib
        found["host_gib"], found["host_growth_gib"] = host, host - host_first
        return found

    def _turn(self) -> dict[str, Any]:
        """Once by way of the weights alone, given out on the way down and on the way up, as at a sync in a group."""
        from dagrl.backends.megatron.engine.memory import weight_storages
        from dagrl.config.residency import Residency

        before, contents, given = self.logprobs(), self._contents(), [self._weights()]
        with self.engine._memory.weights():
            storages = weight_storages(self.engine._model.chunks).values()
            found: dict[str, Any] = {"weights_gib": sum(storage.nbytes() for storage in storages) / 2**30}
        for what, move, to in (
            ("down", self.engine.sleep, Residency.WEIGHTS),
            ("off", self.engine.sleep, Residency.ASLEEP),
            ("on", self.engine.wake, Residency.WEIGHTS),
            ("up", self.engine.wake, Residency.AWAKE),
        ):
            began = time.monotonic()
            move(to)
            found |= {f"{what}_s": time.monotonic() - began, f"{what}_gib": self.used()}
            if to is Residency.WEIGHTS:
                given.append(self._weights())
        found["given_out_alike"] = len(set(given)) == 1
        found["same_after_turn"] = contents == self._contents() and np.array_equal(before, self.logprobs())
        return found

    def _close_is_measured(self) -> dict[str, float]:
        """What closing the communicators frees, and how long it takes, in the next sleep."""
        from dagrl.backends.megatron.engine import communicators
        from dagrl.backends.megatron.engine import megatron_engine as engine

        found: dict[str, float] = {}

        def close_all(timeout_s: float) -> None:
            # What tensors left must be gone from the count first.
            engine.release_caches()
            before, began = self.used(), time.monotonic()
            communicators.close_all(timeout_s)
            found.update(nccl_close_s=time.monotonic() - began, nccl_gib=before - self.used())

        class Measured:
            open_all = staticmethod(communicators.open_all)

        Measured.close_all = staticmethod(close_all)  # type: ignore[attr-defined]
        engine.communicators = Measured  # type: ignore[assignment]
        return found

    def _contents(self) -> list[str]:
        """What stands in weights, float32 weights and moments."""
        from dagrl.backends.megatron.engine.memory import optimizer_storages, weight_storages

        training, chunks = self.engine._training, self.engine._model.chunks
        with self.engine._memory.optimizer():
            storages = weight_storages(chunks)
            if training is not None:
                storages |= optimizer_storages(chunks, training.optimizer)
            return [_digest(storage) for storage in storages.values()]

    def _weights(self) -> str:
        """A digest of what is exported."""
        whole = hashlib.blake2b(digest_size=8)
        for bucket in self.engine.export_weights(1 << 30):
            for name, tensor in bucket:
                whole.update(name.encode())
                whole.update(_digest(tensor.untyped_storage()).encode())
        return whole.hexdigest()

    def _exchange(self) -> bool:
        """Two ranks that both send first, in one batch: with NCCL that ends only if the batch is one."""
        import torch
        import torch.distributed as dist

        if self.case.ranks != 2:
            return True
        sent, received = torch.full((1 << 24,), self.rank + 5.0, device="cuda"), torch.zeros(1 << 24, device="cuda")
        operations = [dist.P2POp(dist.isend, sent, 1 - self.rank), dist.P2POp(dist.irecv, received, 1 - self.rank)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return bool((received == 6.0 - self.rank).all())

    def _goes_on(self) -> dict[str, Any]:
        self.engine.save(self.scratch / "saved")
        went_on = [self.update() for _ in range(UPDATES)]
        self.engine.load(self.scratch / "saved")
        again = [self.update() for _ in range(UPDATES)]
        return {"norms_after_save": went_on, "norms_after_load": again}


def _rows() -> Any:
    from dagrl.data.batch import Batch, Column

    random = np.random.default_rng(5)

    def ragged(length: int, dtype: str) -> Column:
        if dtype == "int64":
            return Column.ragged([random.integers(0, VOCABULARY, length) for _ in range(ROWS)], dtype)
        return Column.ragged([random.normal(size=length) for _ in range(ROWS)], dtype)

    columns = {
        "prompt_tokens": ragged(PROMPT, "int64"),
        "response_tokens": ragged(RESPONSE, "int64"),
        "advantage": ragged(RESPONSE, "float32"),
        "response_mask": Column.ragged([np.ones(RESPONSE)] * ROWS, "float32"),
        "reward": Column(random.normal(size=ROWS).astype("float32")),
    }
    return Batch(np.arange(ROWS), columns)


def _mine(batch: Any) -> Any:
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return batch.take(np.arange(len(batch))[rank::size])


def _digest(storage: Any) -> str:
    import torch

    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return hashlib.blake2b(content.to("cpu", copy=True).numpy().data, digest_size=8).hexdigest()


def _host_gib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 2**20


if __name__ == "__main__":
    main()
