"""slime's data, nodes and run."""

from __future__ import annotations

from pathlib import PurePosixPath

from dagrl.importing.engines import NO_CRITIC, library_field, put_critic, put_generator
from dagrl.importing.parts import (
    DAPO,
    is_known,
    name_of,
    put_critic_nodes,
    put_logprob,
    put_node,
    put_reference,
    trackers,
    write_epochs,
    write_files,
    write_val_n,
)
from dagrl.importing.settings import Unresolved
from dagrl.importing.slime.common import function_name, uses_critic, validates
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to
from dagrl.importing.teachers import ADVANTAGE, put_teachers

_MOST_PROMPT = 2048
_COLUMNS = {"--input-key": "prompt_key", "--label-key": "answer_key"}


def _data(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    write_files(t, "data.train", [t.get("--prompt-data")], "--prompt-data", _COLUMNS)


def _prompt_length(t: Translation) -> None:
    key, context = "--rollout-max-prompt-len", "--rollout-max-context-len"
    response = t.number("--rollout-max-response-len")
    if t.number(key):
        t.write("data.max_prompt_tokens", t.get(key), key)
        t.imply("follows from prompt and response", context)
    elif t.number(context) and response and t.number(context) > response:
        t.write("data.max_prompt_tokens", t.get(context) - response, context, note="less the response")
    else:
        packed = t.number("--max-tokens-per-gpu", 0) * t.number("--context-parallel-size", 1)
        room = packed - response if response and packed > response else _MOST_PROMPT
        bound = min(_MOST_PROMPT, room)
        t.put("data.max_prompt_tokens", bound)
        t.note(key, "data.max_prompt_tokens", f"prompts have no bound there; {bound} stands in")


DATA = (
    joint(_data, "--prompt-data --input-key --label-key", always=True),
    to(
        "--rollout-shuffle",
        "data.order",
        convert=lambda shuffled: "shuffled" if shuffled else "file",
        write_default=True,
    ),
    to("--rollout-batch-size", "data.prompts_per_step"),
    joint(_prompt_length, "--rollout-max-prompt-len --rollout-max-context-len", always=True),
)


_SERVER = {"cuda_graph_bs": "cuda_graph_bs_decode", "cuda_graph_max_bs": "cuda_graph_max_bs_decode"}


def _sampling(t: Translation) -> None:
    for name in ("temperature", "top_p", "top_k"):
        key = f"--rollout-{name.replace('_', '-')}"
        t.copy(key, f"nodes.rollout.sampling.{name}")
    stops = "--rollout-stop-token-ids"
    if t.given(stops):
        value = t.get(stops)
        value = value if isinstance(value, list | Unresolved) else [value]
        t.write("nodes.rollout.sampling.stop_token_ids", value, stops)
    texts = "--rollout-stop"
    if t.given(texts):
        value = t.get(texts)
        t.write("nodes.rollout.sampling.stop", value if isinstance(value, list | Unresolved) else [value], texts)
    put_node(t, "rollout", "rollout", "generator")


def _validation(t: Translation) -> None:
    """Slime validates with the rollout's sampling where it sets no other, and before the first step."""
    interval, files = "--eval-interval", "--eval-prompt-data"
    value = t.get(files)
    if not validates(t):
        t.imply_all("there is no validation without `--eval-interval` and `--eval-prompt-data`")
        return
    t.write("run.validate_every", t.get(interval), interval)
    if not t.flag("--skip-eval-before-train"):
        t.write("run.validate_first", True, "--skip-eval-before-train", note="unless --skip-eval-before-train is set")
    names = value if isinstance(value, list) else ["val", value]
    for name, path in zip(names[::2], names[1::2], strict=False):
        label = "".join(c if c.isalnum() else "_" for c in str(name).lower())
        target = f"data.val.{label if label[:1].isalpha() else f'set_{label}'}"
        write_files(t, target, [path], files, _COLUMNS)
    for name in ("temperature", "top_p", "top_k"):
        own, rollout = (f"--{kind}-{name.replace('_', '-')}" for kind in ("eval", "rollout"))
        key = own if t.given(own) else rollout
        t.copy(key, f"nodes.rollout.val_sampling.{name}")
    for name in ("stop", "stop_token_ids"):
        if stops := t.tree.get(f"nodes.rollout.sampling.{name}"):
            t.put(f"nodes.rollout.val_sampling.{name}", stops)
    longest = "--eval-max-response-len"
    key = longest if t.given(longest) else "--rollout-max-response-len"
    t.write("nodes.rollout.val_sampling.max_new_tokens", t.get(key), key)
    write_val_n(t, "--n-samples-per-eval-prompt")


def _server(t: Translation) -> None:
    put_generator(t, "sglang")
    key = "--rollout-num-gpus-per-engine"
    stages = t.number("--sglang-pp-size", 1)
    t.write("engines.generator.server.tp_size", t.number(key, 1) // stages, key)


def _server_fields(t: Translation) -> None:
    for key in t.current:
        field = key.removeprefix("--sglang-").replace("-", "_")
        if field == "server_concurrency":
            t.imply("requests are spread by the rollout's load balancer", key)
        elif field.startswith("speculative"):
            t.refuse("draft models are not served", key)
        else:
            library_field(t, key, "generator", "server", _SERVER.get(field, field))


def _dynamic(t: Translation) -> None:
    key, over = "--dynamic-sampling-filter-path", "--over-sampling-batch-size"
    path = t.get(key)
    if is_known(path) or isinstance(path, Unresolved):
        if str(path).endswith("check_reward_nonzero_std"):
            t.write("nodes.keep.op", "filter", key)
        else:
            t.put("nodes.keep.op", "filter")
            t.write("nodes.keep.fn", function_name(path), key, note="it takes columns of a group (docs/filter.md)")
        if t.number(over) and not t.flag("--partial-rollout"):
            t.write("nodes.keep.prompts_per_round", t.get(over), over)
        elif t.number(over):
            t.write("nodes.rollout.over_sampling_batch_size", t.get(over), over)
    elif t.number(over) and t.get(over) != t.tree.get("data.prompts_per_step"):
        t.write("nodes.rollout.over_sampling_batch_size", t.get(over), over)
    for name in ("partial_rollout", "mask_offpolicy_in_partial_rollout"):
        if t.flag(f"--{name.replace('_', '-')}"):
            t.write(f"nodes.rollout.{name}", True, f"--{name.replace('_', '-')}")


def _asynchronous(t: Translation) -> None:
    t.write("schedule.max_staleness", 1, "train_async.py", note="the next rollout runs while a step trains")
    t.put("engines.generator.weight_sync.pause", "in_place")


ROLLOUT = (
    to("--n-samples-per-prompt", "nodes.rollout.n", write_default=True),
    to("--rollout-max-response-len", "nodes.rollout.sampling.max_new_tokens"),
    joint(
        _sampling,
        "--rollout-temperature --rollout-top-p --rollout-top-k --rollout-stop --rollout-stop-token-ids",
        always=True,
    ),
    joint(
        _validation,
        "--eval-interval --eval-prompt-data --skip-eval-before-train --eval-temperature --eval-top-p "
        "--eval-top-k --eval-max-response-len --n-samples-per-eval-prompt",
    ),
    joint(_server, "--rollout-num-gpus-per-engine", always=True),
    joint(_server_fields, "--sglang-*"),
    joint(
        _dynamic,
        "--dynamic-sampling-filter-path --over-sampling-batch-size --partial-rollout "
        "--mask-offpolicy-in-partial-rollout",
    ),
    joint(_asynchronous, "train_async.py"),
    to(
        "--update-weight-buffer-size",
        "engines.generator.weight_sync.bucket_mib",
        convert=lambda size: max(1, size // 2**20),
        note="bytes there",
    ),
)


_ESTIMATORS = {
    "grpo": "grpo",
    "gspo": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "ppo": "gae",
}


def _estimator(t: Translation) -> None:
    key = "--advantage-estimator"
    name = t.get(key)
    t.put("nodes.advantage.op", "advantage")
    if name not in _ESTIMATORS:
        t.put("nodes.advantage.estimator", "grpo")
        t.refuse("has no counterpart; grpo stands in", key)
        return
    t.write("nodes.advantage.estimator", _ESTIMATORS[name], key)
    if name == "gspo":
        t.write("nodes.update.loss.policy", "gspo", key)
    if t.flag("--disable-grpo-std-normalization") and name in ("grpo", "gspo"):
        t.write("nodes.advantage.normalize_by_std", False, "--disable-grpo-std-normalization")
    if t.flag("--normalize-advantages"):
        if name in ("grpo", "gspo"):
            t.refuse("advantages of grpo are not whitened: see reinforce_plus_plus_baseline", "--normalize-advantages")
        else:
            t.imply("advantages of this estimator are whitened", "--normalize-advantages")
    elif name not in ("grpo", "gspo"):
        t.write("nodes.advantage.estimator", _ESTIMATORS[name], key, note="always whitened here")
    for option, target in (("--gamma", "gamma"), ("--lambd", "lam")):
        if t.given(option) and name == "ppo":
            t.write(f"nodes.advantage.{target}", t.get(option), option)
        elif t.get(option) in (None, 1, 1.0):
            t.imply("is 1, as by default", option)
        else:
            t.refuse("discounts alone with gae", option)


def _loss(t: Translation) -> None:
    put_node(t, "update", "update", "actor")
    t.write("nodes.update.loss.clip_ratio", t.get("--eps-clip"), "--eps-clip")
    t.copy("--eps-clip-high", "nodes.update.loss.clip_ratio_high")
    if t.number("--eps-clip-c"):
        t.write("nodes.update.loss.dual_clip", t.get("--eps-clip-c"), "--eps-clip-c")
    t.write("nodes.update.loss.entropy_coef", t.get("--entropy-coef"), "--entropy-coef")
    mode = "token-mean" if t.flag("--calculate-per-token-loss") else "seq-mean-token-mean"
    t.write("nodes.update.loss.aggregation", mode, "--calculate-per-token-loss")
    masks, delta = "--use-opsm", "--opsm-delta"
    if t.flag(masks):
        t.write("nodes.update.loss.off_policy_delta", t.get(delta, 1e-4), masks, delta)
    else:
        t.imply("there is no mask without `--use-opsm`", masks, delta)


def _critic(t: Translation) -> None:
    if not uses_critic(t):
        t.imply_all(NO_CRITIC)
        return
    put_critic(t)
    for name in ("parallel", "transformer"):
        for target, value in list(t.tree.items()):
            if target.startswith(f"engines.actor.{name}."):
                t.put(target.replace("engines.actor.", "engines.critic.", 1), value)
    lr = "--critic-lr" if t.given("--critic-lr") else "--lr"
    t.write("engines.critic.optimizer.lr", t.get(lr), lr)
    put_critic_nodes(t)
    if mini := t.tree.get("nodes.update.mini_batch"):
        t.put("nodes.critic.mini_batch", mini)
    t.write("nodes.critic.cliprange_value", t.get("--value-clip"), "--value-clip")
    if t.number("--num-critic-only-steps"):
        t.write("nodes.update.critic_warmup", t.get("--num-critic-only-steps"), "--num-critic-only-steps")
    t.imply("weights come from the model's folder", "--critic-load", "--critic-save")


def _divergence(t: Translation) -> None:
    use, coef, kind, reward = "--use-kl-loss", "--kl-loss-coef", "--kl-loss-type", "--kl-coef"
    unbiased = "--use-unbiased-kl"
    if t.flag(use):
        t.write("nodes.update.loss.kl_coef", t.get(coef), coef)
        t.imply("`kl_coef` above 0 switches it on", use)
        estimator = "k3" if t.get(kind) == "low_var_kl" else t.get(kind)
        note = "bounded by 10 here, without a bound there" if t.get(kind) == "k3" else ""
        if t.flag(unbiased):
            t.write("nodes.update.loss.kl_estimator", f"{estimator}*", kind, unbiased, note=note)
        else:
            t.write("nodes.update.loss.kl_estimator", estimator, kind, note=note)
    else:
        t.imply("there is no divergence in the loss", coef, kind)
    t.imply("is off, or there is no divergence in the loss", unbiased)
    if t.number(reward, 0):
        t.write("nodes.advantage.kl_in_reward.coef", t.get(reward), reward)
    else:
        t.imply("there is no divergence in the reward", reward)
    if t.flag("--use-rollout-logprobs"):
        t.write("nodes.update.read", {"old_logprob": "rollout_logprob"}, "--use-rollout-logprobs")
    else:
        put_logprob(t, "old", "actor", "old_logprob")
    put_reference(t)


def _correction(t: Translation) -> None:
    if not t.flag("--use-tis"):
        t.imply_all("there is no correction without `--use-tis`")
        return
    if t.flag("--use-rollout-logprobs"):
        t.refuse("the loss has the ratio to the generator already, with `--use-rollout-logprobs`", *t.current)
        return
    target = "nodes.update.rollout_correction"
    level = t.get("--tis-level", "token")
    if level in ("token", "sequence"):
        t.write(f"{target}.rollout_is", level, "--use-tis", "--tis-level")
    else:
        t.write(f"{target}.rollout_is", "token", "--use-tis")
        t.refuse("weights are of tokens or of sequences; token stands in", "--tis-level")
    t.write(f"{target}.rollout_is_threshold", t.get("--tis-clip"), "--tis-clip")
    if t.number("--tis-clip-low", 0):
        t.refuse("weights below a bound become 0 here, and the bound there", "--tis-clip-low")
    t.refuse("is a loss of your own (docs/your_own.md)", "--custom-tis-function-path")


ALGORITHM = (
    joint(
        _estimator,
        "--advantage-estimator --disable-grpo-std-normalization --normalize-advantages --gamma --lambd",
        always=True,
    ),
    joint(
        _loss,
        "--eps-clip --eps-clip-high --eps-clip-c --entropy-coef --calculate-per-token-loss --use-opsm --opsm-delta",
        always=True,
    ),
    joint(_critic, "--critic-lr --critic-load --critic-save --value-clip --num-critic-only-steps", always=True),
    joint(
        _divergence,
        "--use-kl-loss --kl-loss-coef --kl-loss-type --kl-coef --use-unbiased-kl --use-rollout-logprobs",
        always=True,
    ),
)
CORRECTION = joint(_correction, "--use-tis --tis-clip --tis-clip-low --tis-level --custom-tis-function-path")


_OWN_TEACHER = "slime.rollout.on_policy_distillation.reward_func"
_STEP = "names the folder of one step, iter_..., in Megatron's distributed format"


def _distillation(t: Translation) -> None:
    """Slime's teacher is a model of the policy's shape in Megatron, or a server whose answers are rewards."""
    kind, load = "--opd-type", "--opd-teacher-load"
    if not t.flag("--use-opd"):
        t.imply_all("there is no distillation without `--use-opd`")
        return
    t.write(f"{ADVANTAGE}.coef", t.get("--opd-kl-coef"), "--opd-kl-coef", "--use-opd")
    put_teachers(t, {"teacher": None}, "data_source")
    t.put("engines.teacher.group", t.tree.get("engines.actor.group"))
    if t.get(kind) == "megatron":
        for target, value in list(t.tree.items()):
            if target.startswith(("engines.actor.parallel.", "engines.actor.transformer.")):
                t.put(target.replace("engines.actor.", "engines.teacher.", 1), value)
        t.write("engines.teacher.dist_checkpointing_path", t.get(load), load, note=_STEP)
        t.imply("is part of `dist_checkpointing_path`", "--opd-teacher-ckpt-step")
    else:
        t.note(kind, "engines.teacher.model.path", "name the folder of the model that the server at --rm-url has")
        t.put("engines.teacher.model.path", "TEACHER")
    t.imply("an engine computes the teacher's log-probs", kind)
    if t.get("--custom-rm-path") == _OWN_TEACHER:
        t.write("nodes.advantage.estimator", "none", "--custom-rm-path", note="the rewards there are 0")


_MATH = ("deepscaler", "math", "dapo", "boxed_deepscaler", "boxed_math", "boxed_dapo")


def _reward(t: Translation) -> None:
    kind, own = "--rm-type", "--custom-rm-path"
    if t.get(own) == _OWN_TEACHER:
        t.imply("nothing is learned from rewards", kind)
        return
    t.put("nodes.reward.op", "reward")
    if is_known(t.get(own)):
        note = "parameters are response, answer, data_source, extra_info (docs/migration.md)"
        t.write("nodes.reward.fn", function_name(t.get(own)), own, note=note)
        t.imply("`--custom-rm-path` takes its place", kind)
    elif t.get(kind) in _MATH:
        t.write("nodes.reward.fn", "math", kind, note=DAPO.lstrip("; ") if "dapo" in t.get(kind) else "")
    else:
        t.put("nodes.reward.fn", "math")
        t.note(kind, "nodes.reward.fn", "set `fn`: math, code, exact, or your own; math stands in", None)


REWARD = (
    joint(_distillation, "--use-opd --opd-type --opd-kl-coef --opd-teacher-load --opd-teacher-ckpt-step"),
    joint(_reward, "--rm-type --custom-rm-path", always=True),
)


_WANDB = {"project": "--wandb-project", "group": "--wandb-group", "entity": "--wandb-team"}


def _name(t: Translation) -> None:
    keys = ("--wandb-group", "--tb-experiment-name", "--save", "--hf-checkpoint")
    key = next((key for key in keys if is_known(t.get(key)) and t.get(key) is not True), keys[-1])
    value = PurePosixPath(str(t.get(key))).name if key in keys[2:] else t.get(key)
    if key in keys[:2]:
        t.write("name", name_of(value), key)
    else:
        t.put("name", name_of(value))
        t.origins.pop("name", None)


def _steps(t: Translation) -> None:
    key, epochs = "--num-rollout", "--num-epoch"
    if t.number(key) is None and not isinstance(t.get(key), Unresolved):
        write_epochs(t, epochs)
        return
    t.write("run.steps", t.get(key), key)
    if t.get(key) == 0 and validates(t):
        t.write("run.val_only", True, key, note="slime only validates then")
    elif t.get(key) == 0:
        t.note(key, "run.steps", "nothing is trained, and there is no validation", 0)
    t.imply("`--num-rollout` takes its place", epochs)


def _track(t: Translation) -> None:
    used = {"wandb": "--use-wandb", "tensorboard": "--use-tensorboard", "mlflow": "--use-mlflow"}
    names = [name for name, key in used.items() if t.flag(key)]
    if names:
        settings = _WANDB if "wandb" in names else {}
        trackers(t, names, [used[name] for name in names], settings)
    t.imply("has no effect without `--use-wandb`", *_WANDB.values())


def _keep(t: Translation) -> None:
    if "run.save_every" in t.tree:
        t.write("run.keep", "all", "--save-interval", note="there, all checkpoints are kept")


RUN_STEPS = (joint(_steps, "--num-rollout --num-epoch", always=True),)
RUN = (
    joint(_name, "--wandb-group --tb-experiment-name", always=True),
    joint(_track, "--use-wandb --use-tensorboard --use-mlflow", *_WANDB.values()),
    to("--save-interval", "run.save_every"),
    joint(_keep, always=True),
    to("--async-save", "run.async_save"),
    to("--rollout-seed", "run.seed"),
)


REST = (
    implied("is `dagrl run --run-dir DIR`", "--save --save-debug-*"),
    implied("`sleep: auto` frees the memory while the other engine works", "--offload*"),
    implied("chats go through the tokenizer's chat template", "--apply-chat-template"),
    implied("gradients are reduced in float32, as by default", "--accumulate-allreduce-grads-in-fp32"),
    refused_unless(
        (0, 0.0), "is 0: log-probs in training must not depend on chance", "--attention-dropout --hidden-dropout"
    ),
    implied(
        "is done by itself",
        "--balance-data --balance-by-flops --log-* --metadata-key --data-pad-size-multiplier --seed --num-workers "
        "--use-fault-tolerance --rollout-health-check-* --router-* --slime-router-* --no-save-* --no-load-* --ckpt-* "
        "--no-check-for-nan-in-loss-and-grad --no-gradient-accumulation-fusion",
    ),
    refused_unless("megatron", "trainers are Megatron-core", "--train-backend"),
    refused_unless(
        "policy_loss", "losses are `update` with a policy, or nodes sft and dpo (docs/offline.md)", "--loss-type"
    ),
    refused(
        "is a node, an agent or a loss of your own (docs/your_own.md, docs/gateway.md)",
        "--custom-* --rollout-function-path",
    ),
    refused("adapters are `engines.actor.lora` (docs/lora.md)", "--lora-* --target-modules"),
    refused("draft layers are not trained", "--mtp-* --enable-mtp-training"),
    refused("wandb reads its own environment, such as WANDB_API_KEY and WANDB_PROJECT", "--wandb-*"),
    refused("rewards are functions of a row", "--rm-url --reward-key"),
    refused("advantages are those of `estimator`", "--disable-rewards-normalization"),
    refused("images are `data.image_key` (docs/images.md)", "--multimodal-keys"),
    refused("validation sets are parquet files: `data.val`", "--eval-config"),
    refused("is for tests of slime", "--debug-*"),
    refused(
        "fp8 training is `transformer.fp8` of the engine, and other formats are not built in (docs/fp8.md)",
        "--fp8-* --transformer-impl",
    ),
    refused("weights go over with every step", "--keep-old-actor"),
    refused("prefill and decoding share a server", "--prefill-num-servers"),
)
