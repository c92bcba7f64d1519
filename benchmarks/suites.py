"""Lists the commands that `h200.py` runs on GPUs, with their time limits, by suite and number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HELPERS = "tests/helpers"
SUITES = ("rollout", "trainer", "plan", "lora", "models", "agents", "fp8", "speed", "why")


@dataclass(frozen=True, slots=True)
class Part:
    """One command."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    tail: int = 12
    """Lines at the end of its output that are shown."""
    gpus: int = 1
    at_once: int = 1
    """Parts of this kind that a GPU can hold at once: above 1 for those that hardly use it."""


def parts(suite: str, gpus: int, out: Path, weights: Path) -> list[Part]:
    """Return the parts of a suite for a host with that many GPUs, the most important first."""
    of_suite = {
        "rollout": rollout_parts,
        "trainer": trainer_parts,
        "plan": plan_parts,
        "lora": lora_parts,
        "models": model_parts,
        "agents": agent_parts,
        "fp8": fp8_parts,
        "speed": speed_parts,
        "why": why_parts,
    }
    found = of_suite[suite](gpus, out, weights)
    if not found:
        raise SystemExit(f"the suite {suite} has nothing for {gpus} GPUs; give --gpus as one of 1, 2, 4, 8")
    return found


def rollout_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """SGLang's rollouts, weights on their way to it, whole steps, and pipelines that learn."""

    def measured(name: str, limit_s: int, *command: str, needs: int = 1, keeps: bool = True) -> Part:
        kept = ("--weights", str(weights)) if keeps else ()
        files = ("--out", str(out), "--json", str(out / f"{name}.json"))
        return Part(name, (f"benchmarks/{command[0]}", *command[1:], *kept, *files), limit_s, tail=25, gpus=needs)

    def large(name: str, limit_s: int) -> Part:
        template = f"dag_templates/{name}.yaml"
        return measured(name, limit_s, "large.py", template, needs=8, keeps=False)

    full_cache = ("--cache-tokens", "3000000")
    vllm = [
        measured("rollout_vllm", 300, "rollout.py", "--backend", "vllm"),
        measured("sync_vllm_together", 240, "weight_sync.py", "--backend", "vllm"),
        measured("sync_vllm_turns", 240, "weight_sync.py", "--backend", "vllm", "--mode", "turns"),
        measured("sync_vllm_apart", 240, "weight_sync.py", "--backend", "vllm", "--apart", needs=2),
        measured("sleep_cycles_vllm", 420, "sleep_cycles.py", "--backend", "vllm", *full_cache, "--limit", "380"),
    ]
    found = [
        large("qwen3_8b_megatron", 560),
        large("qwen3_30b_a3b_8gpu", 560),
        measured("step_turns", 560, "step.py", "--mode", "turns"),
        measured("sync_1.7b_apart", 240, "weight_sync.py", "--apart", needs=2),
        measured("sync_1.7b_together", 240, "weight_sync.py"),
        measured("rollout", 300, "rollout.py"),
        *vllm,
        measured("async_2", 560, "async_step.py", needs=2),
        measured("async_4", 590, "async_step.py", "--gpus", "4", needs=4),
        measured("async_2_in_flight", 560, "async_step.py", "--in-flight", "--together", needs=2),
        measured("step_together", 560, "step.py", "--mode", "together"),
        measured("sync_8b_apart", 420, "weight_sync.py", "--model", "8b", "--apart", needs=2),
        *learning_parts(out),
        measured("sleep_cycles", 420, "sleep_cycles.py", "--limit", "380"),
        measured("sync_1.7b_turns", 240, "weight_sync.py", "--mode", "turns"),
        measured("sync_8b_together", 420, "weight_sync.py", "--model", "8b"),
    ]
    return [part for part in found if part.gpus <= gpus]


def learning_parts(out: Path) -> list[Part]:
    """One for each layout; small models, so that several fit on a GPU."""
    from learning import CASES

    from dagrl.backends.environments import made_environments

    return [
        Part(
            f"learning_{name}",
            ("benchmarks/learning.py", "--case", name, "--out", str(out)),
            420,
            gpus=case.gpus,
            at_once=2,
        )
        for name, case in CASES.items()
        if case.backend != "vllm" or "vllm" in made_environments()
    ]


def lora_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """Low-rank adapters: speed and memory, agreement with merged weights, adapters alone to servers, learning."""

    def measured(name: str, limit_s: int, *command: str) -> Part:
        files = ("--weights", str(weights), "--json", str(out / f"{name}.json"))
        return Part(name, (f"benchmarks/{command[0]}", *command[1:], *files), limit_s, tail=25)

    sync = ("weight_sync.py", "--out", str(out), "--model", "8b", "--adapters", "32", "--backend")
    return [
        measured("lora_step_8b", 400, "lora_step.py", "--model", "8b", "--without-all", "--rows", "4"),
        measured("sync_adapters_sglang", 240, *sync, "sglang"),
        measured("sync_adapters_vllm", 300, *sync, "vllm"),
        *(part for part in learning_parts(out) if "lora" in part.name),
        measured("lora_agreement", 200, "lora_step.py", "--agree", "--model", "small", "small_moe"),
        measured("checkpoint_1.7b", 240, "checkpoint.py", "--out", str(out), "--model", "1.7b"),
    ]


def model_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """Families that megatron-bridge builds, and models that read images."""
    bridged = gpu_tests("bridged", 420, "tests/backends/families/test_gpu_bridged.py")
    learning = [
        part for part in learning_parts(out) if part.name.endswith(("glm4_moe", "gemma3")) or "images" in part.name
    ]
    return [part for part in (bridged, *learning) if part.gpus <= gpus]


def agent_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """Agents behind an endpoint, turns, rollouts that go on in a later step."""

    def rollouts(name: str, limit_s: int, *arguments: str) -> Part:
        files = ("--out", str(out), "--weights", str(weights), "--json", str(out / f"{name}.json"))
        return Part(name, ("benchmarks/agent_rollouts.py", *arguments, *files), limit_s, tail=25)

    found = [
        rollouts("agent_rollouts", 400),
        rollouts("agent_rollouts_vllm", 460, "--backend", "vllm"),
        gpu_tests("turns", 300, "tests/orchestrator/test_gpu_turns.py"),
        gpu_tests("in_flight", 300, "tests/orchestrator/test_in_flight.py", gpus=2),
    ]
    return [part for part in found if part.gpus <= gpus]


def fp8_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """Rollouts and training in fp8: the tests, and steps beside those in bfloat16. Training 8B takes two GPUs."""

    def measured(name: str, *options: str, needs: int = 1) -> Part:
        return _in_a_folder(name, 590, "fp8.py", *options, out=out, weights=weights, gpus=needs)

    # Adapters in the trainer, for which one GPU has room.
    adapters = ("--rows-per-micro-batch", "4", "--set", "engines.actor.lora.rank=32")
    on_one = ("--model", "8b", "--only", "bf16", "channel_cache", "--rounds", "2", *adapters)
    small = ("--model", "1.7b", "--only", "bf16")
    # The sleeps of the first two steps pin the host's memory. More than two variants would take more than ten minutes.
    on_two = ("--model", "8b", "--gpus", "2", "--warmup", "2", "--rounds", "2", "--only", "bf16")
    split = (*on_two, "all_channel", "--tensor-parallel", "2", "--set")
    whole = (
        *on_two,
        "all_channel",
        "--set",
        "engines.actor.prefix_sharing=true",
        "nodes.update.tokens_per_micro_batch=6144",
    )
    stays = ("engines.actor.sleep=false", "engines.actor.offload.grad=true")
    found = [
        gpu_tests("fp8", 590, "tests/orchestrator/test_gpu_fp8.py"),
        *(part for part in learning_parts(out) if "fp8" in part.name),
        measured("fp8_8b_whole", *whole, needs=2),
        measured("fp8_8b_stays", *whole, *stays, "engines.generator.server.mem_fraction_static=0.35", needs=2),
        measured("fp8_8b_long_micro_batches", *split, "nodes.old.tokens_per_micro_batch=49152", needs=2),
        measured("fp8_8b_block", *on_two, "all", "--tensor-parallel", "2", needs=2),
        measured("fp8_8b_vllm", "--backend", "vllm", *on_two, "channel_cache", "--tensor-parallel", "2", needs=2),
        measured("fp8_8b_512_rows", *on_one),
        measured("fp8_8b_64_rows", *on_one, "--prompts", "16"),
        measured("fp8_1.7b_rollout", *small, "cache", "channel_cache"),
        measured("fp8_1.7b_train", *small, "train", "train_tensorwise", "train_delayed"),
        measured("fp8_1.7b_vllm", "--backend", "vllm", *small, "cache", "channel_cache"),
    ]
    return [part for part in found if part.gpus <= gpus]


def speed_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """Whole steps: their saves, settings that make them faster, longer responses, and the same beside verl."""

    def measured(name: str, limit_s: int, *command: str, needs: int = 1) -> Part:
        return _in_a_folder(name, limit_s, *command, out=out, weights=weights, gpus=needs)

    def step(name: str, *options: str) -> Part:
        return measured(f"step_{name}", 400, "step.py", "--mode", "together", *options)

    def of_length(response_tokens: int) -> Part:
        """As many tokens a step for each length."""
        rows = 16 * 768 // (256 + response_tokens)
        load = ("--prompts", str(128 * 512 // response_tokens), "--response-tokens", str(response_tokens))
        # A step takes a minute with 8192 tokens and two with 16384.
        rounds = ("--rounds", "3" if response_tokens < 8192 else "1")
        return step(
            f"of_{response_tokens}", "--without-bare", *load, *rounds, "--rows-per-micro-batch", str(max(1, rows))
        )

    def decoding(name: str, *options: str) -> Part:
        return measured(f"decode_{name}", 300, "decode_profile.py", "--model", "8b", *options)

    def beside_verl(case: str) -> list[Part]:
        """A part for each framework, as both together take more than ten minutes."""
        command = ("peers/verl/compare.py", "--case", case, "--only")
        return [measured(f"{name}_{case}", 590, *command, name, needs=2) for name in ("verl", "dagrl")]

    kernels = str(out / "prefix_kernels")
    found = [
        # What needs two GPUs would never find both free behind what needs one.
        *beside_verl("one_step_off"),
        *beside_verl("8b_tp2"),
        measured("checkpoint_1.7b", 240, "checkpoint.py", "--model", "1.7b"),
        step("shared", "--set", "engines.actor.prefix_sharing=true"),
        step("saves", "--without-bare", "--set", "run.save_every=2", "run.async_save=true"),
        decoding("1.7b", "--model", "1.7b", "--only", "bf16"),
        decoding("512_rows", "--only", "bf16", "channel", "channel_cache"),
        decoding("512_rows_blocks", "--only", "cache"),
        decoding("128_rows", "--only", "bf16", "channel_cache", "--prompts", "32"),
        measured(
            "prefix_kernels", 200, "prefix_sharing.py", "--prompt-tokens", "256", "--n", "4", "--profile", kernels
        ),
        step("16_responses", "--without-bare", "--prompts", "32", "--n", "16"),
        *(of_length(response_tokens) for response_tokens in (512, 2048, 8192, 16384)),
    ]
    return [part for part in found if part.gpus <= gpus]


def _in_a_folder(name: str, limit_s: int, *command: str, out: Path, weights: Path, gpus: int) -> Part:
    """Return a part that runs a script of benchmarks/ and writes to a subfolder of `out`."""
    files = ("--out", str(out / name), "--weights", str(weights), "--json", str(out / f"{name}.json"))
    return Part(name, (f"benchmarks/{command[0]}", *command[1:], *files), limit_s, tail=25, gpus=gpus)


def gpu_tests(name: str, limit_s: int, *arguments: str, gpus: int = 1) -> Part:
    """Tests that need a GPU."""
    command = ("-m", "pytest", "-m", "gpu", "-rA", "-q", "-p", "no:cacheprovider", *arguments)
    return Part(name, command, limit_s, tail=30, gpus=gpus)


def why_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """Advice of `dagrl why` followed, and a recorded update replayed."""
    files = ("--out", str(out / "why"), "--json", str(out / "why.json"))
    advice = Part("why_turns", ("benchmarks/why.py", "--case", "turns", *files), 400, tail=6)
    replay = gpu_tests("replayed", 300, "tests/orchestrator/test_gpu.py", "-k", "replayed", gpus=min(gpus, 2))
    return [advice, replay]


def plan_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """Compare plans with runs, a part for each layout. On 4 GPUs they are two calls of up to 10 minutes:
    ``--only plan_1.7b plan_8b4`` and ``--only plan_8b_``, with one folder.
    """
    from plan_accuracy import CASES

    command = ("benchmarks/plan_accuracy.py", "--out", str(out), "--weights", str(weights))
    found = [
        Part(
            f"plan_{name}",
            (*command, "--case", name, *(() if case.model == "1.7b" else ("--rounds", "2"))),
            300 if case.model == "1.7b" else 400,
            tail=20,
            gpus=case.all_gpus,
        )
        for name, case in CASES.items()
    ]
    return [part for part in found if part.gpus <= gpus]


def trainer_parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """The Megatron engine: layouts, memory, speed, the pipeline with the embedded generator. Each takes all GPUs."""

    def speed(name: str, limit_s: int, *arguments: str) -> Part:
        command = ("benchmarks/train_step.py", *arguments, "--weights", str(weights))
        return Part(name, (*command, "--json", str(out / f"{name}.json")), limit_s, gpus=gpus)

    def layouts(limit_s: int) -> Part:
        command = (f"{HELPERS}/gpu_layouts.py", "--ranks", str(gpus), "--out", str(out))
        return Part(f"layouts_{gpus}", command, limit_s, tail=80, gpus=gpus)

    def sharing(model: str, *arguments: str) -> Part:
        loads = ("--prompts", "8", "--n", "8", "--prompt-tokens", "4096", "--response-tokens", "512", "--rounds", "3")
        files = ("--out", str(out), "--weights", str(weights), "--json", str(out / f"prefix_sharing_{model}.json"))
        command = ("benchmarks/prefix_sharing.py", "--model", model, *loads, *arguments, *files)
        return Part(f"prefix_sharing_{model}", command, 300, tail=20, gpus=gpus)

    memory_command = (f"{HELPERS}/gpu_memory.py", "--ranks", str(gpus), "--out", str(out))
    memory = Part("memory", memory_command, 300, tail=30, gpus=gpus)
    profile = ("--profile", str(out / "kernels"))
    mixture = ("--model", "a3b_6_layers", "--rounds", "6")
    eight_billion = ("--model", "8b", "--rounds", "8", "--warmup", "2")
    by_gpus: dict[int, list[Part]] = {
        1: [
            speed("train_1.7b", 240, "--model", "1.7b", *profile),
            layouts(300),
            memory,
            sharing("1.7b"),
            gpu_tests("recipes", 480, "tests/orchestrator/test_gpu_recipes.py"),
            Part("output_layer", ("benchmarks/output_layer.py", "--json", str(out / "output_layer.json")), 150, tail=6),
            speed("train_1.7b_fused", 240, "--model", "1.7b", "--fused-linear-cross-entropy", "--rounds", "5"),
        ],
        2: [
            layouts(420),
            speed("train_8b_tp2", 360, *eight_billion, "--ranks", "2", "--tensor-parallel", "2"),
            speed("train_a3b_ep2", 300, *mixture, "--ranks", "2", "--expert-parallel", "2", *profile),
            memory,
            sharing("8b", "--ranks", "2", "--tensor-parallel", "2"),
            gpu_tests("pipeline", 300, "tests/orchestrator/test_gpu.py", gpus=2),
        ],
        4: [layouts(420), speed("train_1.7b_dp4", 200, "--model", "1.7b", "--ranks", "4", "--rounds", "6")],
        8: [layouts(420)],
    }
    return by_gpus.get(gpus, [])
