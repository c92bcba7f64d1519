"""slime's data, nodes and run."""

from __future__ import annotations

from pathlib import PurePosixPath

from dagrl.importing import engines, parts
from dagrl.importing.settings import Unresolved
from dagrl.importing.slime.engines import uses_critic
from dagrl.importing.table import Translation, implied, is_known, joint, refused, refused_unless, switch, to
from dagrl.importing.teachers import ADVANTAGE, put_teachers

_MOST_PROMPT = 2048
_COLUMNS = {"--input-key": "prompt_key", "--label-key": "answer_key"}
_LOSS = "nodes.update.loss"
_OWN_CODE = "needs your own node, agent or loss (docs/your_own.md, docs/gateway.md)"


@joint("--prompt-data --input-key --label-key", always=True)
def _data(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    parts.write_files(t, "data.train", [t.get("--prompt-data")], "--prompt-data", _COLUMNS)


@joint("--rollout-max-prompt-len --rollout-max-context-len", always=True)
def _prompt_length(t: Translation) -> None:
    key, context, target = "--rollout-max-prompt-len", "--rollout-max-context-len", "data.max_prompt_tokens"
    response = t.number("--rollout-max-response-len")
    if t.number(key):
        t.copy(key, target)
    elif t.number(context) and response and t.number(context) > response:
        t.write(target, t.get(context) - response, context, note="less the response")
    else:
        packed = t.number("--max-tokens-per-gpu", 0) * t.number("--context-parallel-size", 1)
        bound = min(_MOST_PROMPT, packed - response if response and packed > response else _MOST_PROMPT)
        t.put(target, bound)
        t.note(key, target, f"prompts have no bound there; {bound} is used instead")


DATA = (
    _data,
    to("--rollout-shuffle", "data.order", convert=lambda on: "shuffled" if on else "file", write_default=True),
    to("--rollout-batch-size", "data.prompts_per_step"),
    _prompt_length,
)


def _validates(t: Translation) -> bool:
    return bool(t.number("--eval-interval")) and is_known(t.get("--eval-prompt-data"))


@joint(
    "--eval-interval --eval-prompt-data --skip-eval-before-train --eval-temperature --eval-top-p "
    "--eval-top-k --eval-max-response-len --n-samples-per-eval-prompt"
)
def _validation(t: Translation) -> None:
    """Slime validates with the rollout's sampling unless it sets another, and before the first step."""
    files, sampling = "--eval-prompt-data", "nodes.rollout.val_sampling"
    if not _validates(t):
        return
    t.copy("--eval-interval", "run.validate_every")
    if not t.flag("--skip-eval-before-train"):
        t.write("run.validate_first", True, "--skip-eval-before-train", note="unless --skip-eval-before-train is set")
    names = t.get(files) if isinstance(t.get(files), list) else ["val", t.get(files)]
    for index, (name, path) in enumerate(zip(names[::2], names[1::2], strict=False)):
        parts.write_files(t, f"data.val.{parts.val_label(str(name), index)}", [path], files, _COLUMNS)
    for name in ("temperature", "top-p", "top-k"):
        key = f"--eval-{name}" if t.given(f"--eval-{name}") else f"--rollout-{name}"
        t.copy(key, f"{sampling}.{name.replace('-', '_')}")
    for name in ("stop", "stop_token_ids"):
        if stops := t.tree.get(f"nodes.rollout.sampling.{name}"):
            t.put(f"{sampling}.{name}", stops)
    longest = "--eval-max-response-len"
    t.copy(longest if t.given(longest) else "--rollout-max-response-len", f"{sampling}.max_new_tokens")
    parts.write_val_n(t, "--n-samples-per-eval-prompt")


@joint("--rollout-num-gpus-per-engine", always=True)
def _server(t: Translation) -> None:
    parts.put_node(t, "rollout", "rollout", "generator")
    engines.put_generator(t, "sglang")
    key = "--rollout-num-gpus-per-engine"
    t.write("engines.generator.server.tp_size", t.number(key, 1) // t.number("--sglang-pp-size", 1), key)


@joint("--sglang-*")
def _server_fields(t: Translation) -> None:
    renamed = {"cuda_graph_bs": "cuda_graph_bs_decode", "cuda_graph_max_bs": "cuda_graph_max_bs_decode"}
    for key in t.current:
        field = key.removeprefix("--sglang-").replace("-", "_")
        if field == "server_concurrency":
            t.imply("requests are spread by the rollout's load balancer", key)
        elif field.startswith("speculative"):
            t.refuse("draft models are not served", key)
        else:
            engines.library_field(t, key, "generator", "server", renamed.get(field, field))


def _function_name(path: object) -> str:
    """Return ``module:function`` for a dotted path."""
    module, _, name = str(path).rpartition(".")
    return f"{module}:{name}"


@joint("--dynamic-sampling-filter-path --over-sampling-batch-size")
def _dynamic(t: Translation) -> None:
    key, over = "--dynamic-sampling-filter-path", "--over-sampling-batch-size"
    path, size = t.get(key), "nodes.rollout.over_sampling_batch_size"
    if path is not None:
        if str(path).endswith("check_reward_nonzero_std"):
            t.write("nodes.keep.op", "filter", key)
        else:
            t.put("nodes.keep.op", "filter")
            t.write("nodes.keep.fn", _function_name(path), key, note="it takes columns of a group (docs/filter.md)")
        size = size if t.flag("--partial-rollout") else "nodes.keep.prompts_per_round"
    t.copy(over, size, above=0)


@joint("train_async.py")
def _asynchronous(t: Translation) -> None:
    t.write("schedule.max_staleness", 1, "train_async.py", note="the next rollout runs while a step trains")
    t.put("engines.generator.weight_sync.pause", "in_place")


ROLLOUT = (
    to("--n-samples-per-prompt", "nodes.rollout.n", write_default=True),
    to("--rollout-max-response-len", "nodes.rollout.sampling.max_new_tokens"),
    to("--rollout-temperature", "nodes.rollout.sampling.temperature"),
    to("--rollout-top-p", "nodes.rollout.sampling.top_p"),
    to("--rollout-top-k", "nodes.rollout.sampling.top_k"),
    to("--rollout-stop-token-ids", "nodes.rollout.sampling.stop_token_ids", convert=parts.as_list),
    to("--rollout-stop", "nodes.rollout.sampling.stop", convert=parts.as_list),
    _validation,
    _server,
    _server_fields,
    _dynamic,
    switch("--partial-rollout", "nodes.rollout.partial_rollout"),
    switch("--mask-offpolicy-in-partial-rollout", "nodes.rollout.mask_offpolicy_in_partial_rollout"),
    _asynchronous,
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
    "cispo": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "ppo": "gae",
}


@joint("--advantage-estimator --disable-grpo-std-normalization --normalize-advantages --gamma --lambd", always=True)
def _estimator(t: Translation) -> None:
    key, whiten, deviation = "--advantage-estimator", "--normalize-advantages", "--disable-grpo-std-normalization"
    name = t.get(key)
    t.put("nodes.advantage.op", "advantage")
    if name not in _ESTIMATORS:
        t.put("nodes.advantage.estimator", "grpo")
        t.refuse("has no counterpart; grpo is used instead", key)
        return
    is_grpo = _ESTIMATORS[name] == "grpo"
    note = "" if is_grpo or t.flag(whiten) else "always whitened here"
    t.write("nodes.advantage.estimator", _ESTIMATORS[name], key, note=note)
    if name in ("gspo", "cispo"):
        t.write(f"{_LOSS}.policy", name, key)
    if t.flag(deviation) and is_grpo:
        t.write("nodes.advantage.normalize_by_std", False, deviation)
    if t.flag(whiten) and is_grpo:
        t.refuse("advantages of grpo are not whitened: see reinforce_plus_plus_baseline", whiten)
    for option, target in (("--gamma", "gamma"), ("--lambd", "lam")):
        if name == "ppo":
            t.copy(option, f"nodes.advantage.{target}")
        elif t.get(option) not in (None, 1):
            t.refuse("discounts alone with gae", option)


@joint("--calculate-per-token-loss --use-opsm --opsm-delta", always=True)
def _loss(t: Translation) -> None:
    parts.put_node(t, "update", "update", "actor")
    mode = "token-mean" if t.flag("--calculate-per-token-loss") else "seq-mean-token-mean"
    t.write(f"{_LOSS}.aggregation", mode, "--calculate-per-token-loss")
    if t.flag("--use-opsm"):
        t.write(f"{_LOSS}.off_policy_delta", t.get("--opsm-delta", 1e-4), "--use-opsm", "--opsm-delta")


@joint("--critic-lr --critic-load --critic-save --value-clip --num-critic-only-steps", always=True)
def _critic(t: Translation) -> None:
    if not uses_critic(t):
        return
    engines.put_critic(t)
    engines.like_the_actor(t, "critic")
    t.copy("--critic-lr" if t.given("--critic-lr") else "--lr", "engines.critic.optimizer.lr")
    if mini := t.tree.get("nodes.update.mini_batch"):
        t.put("nodes.critic.mini_batch", mini)
    t.copy("--value-clip", "nodes.critic.cliprange_value")
    t.copy("--num-critic-only-steps", "nodes.update.critic_warmup", above=0)


@joint("--use-kl-loss --kl-loss-coef --kl-loss-type --kl-coef --use-unbiased-kl --use-rollout-logprobs", always=True)
def _divergence(t: Translation) -> None:
    kind, unbiased = "--kl-loss-type", "--use-unbiased-kl"
    if t.flag("--use-kl-loss"):
        t.copy("--kl-loss-coef", f"{_LOSS}.kl_coef")
        estimator = "k3" if t.get(kind) == "low_var_kl" else t.get(kind)
        note = "bounded by 10 here, without a bound there" if t.get(kind) == "k3" else ""
        if t.flag(unbiased):
            t.write(f"{_LOSS}.kl_estimator", f"{estimator}*", kind, unbiased, note=note)
        else:
            t.write(f"{_LOSS}.kl_estimator", estimator, kind, note=note)
    t.copy("--kl-coef", "nodes.advantage.kl_in_reward.coef", above=0)
    if t.flag("--use-rollout-logprobs"):
        t.write("nodes.update.read", {"old_logprob": "rollout_logprob"}, "--use-rollout-logprobs")
    else:
        parts.put_logprob(t, "old", "actor", "old_logprob")
    parts.put_reference(t)


@joint("--use-tis --tis-clip --tis-clip-low --tis-level --custom-tis-function-path")
def correction(t: Translation) -> None:
    if not t.flag("--use-tis"):
        return
    if t.flag("--use-rollout-logprobs"):
        t.refuse("the loss has the ratio to the generator already, with `--use-rollout-logprobs`", *t.current)
        return
    target = "nodes.update.rollout_correction.rollout_is"
    level = t.get("--tis-level", "token")
    if level in ("token", "sequence"):
        t.write(target, level, "--use-tis", "--tis-level")
    else:
        t.write(target, "token", "--use-tis")
        t.refuse("weights are of tokens or of sequences; token is used instead", "--tis-level")
    t.copy("--tis-clip", f"{target}_threshold")
    if t.number("--tis-clip-low", 0):
        t.refuse("weights below a bound become 0 here, and the bound there", "--tis-clip-low")
    t.refuse("needs your own loss (docs/your_own.md)", "--custom-tis-function-path")


@joint("--eps-clip --eps-clip-high", always=True)
def _clip(t: Translation) -> None:
    low, high = "--eps-clip", "--eps-clip-high"
    if t.tree.get(f"{_LOSS}.policy") != "cispo":
        t.copy(low, f"{_LOSS}.clip_ratio")
        t.copy(high, f"{_LOSS}.clip_ratio_high")
        return
    t.copy(high if t.given(high) else low, f"{_LOSS}.clip_ratio_high")
    parts.refuse_lower_bound(t, t.number(low, 1), low, "--advantage-estimator")


ALGORITHM = (
    _estimator,
    _clip,
    to("--eps-clip-c", f"{_LOSS}.dual_clip", convert=lambda bound: bound or None),
    to("--entropy-coef", f"{_LOSS}.entropy_coef", write_default=True),
    _loss,
    _critic,
    _divergence,
)


_OWN = "slime.rollout.on_policy_distillation."
_OWN_TEACHER = f"{_OWN}reward_func"


@joint(
    "--use-opd --opd-type --opd-kl-coef --opd-teacher-load --opd-teacher-ckpt-step --rm-url "
    "--custom-reward-post-process-path"
)
def distillation(t: Translation) -> None:
    """Slime's teacher is a model of the policy's shape in Megatron, or a server whose answers are rewards."""
    post = "--custom-reward-post-process-path"
    if not str(t.get(post)).startswith(_OWN):
        t.refuse(_OWN_CODE, post)
    if not t.flag("--use-opd"):
        t.refuse("rewards are functions of a row", "--rm-url")
        return
    t.write(f"{ADVANTAGE}.coef", t.get("--opd-kl-coef"), "--opd-kl-coef", "--use-opd")
    if t.get("--opd-type") == "megatron":
        put_teachers(t, {"teacher": None}, "data_source")
        t.put("engines.teacher.group", t.tree.get("engines.actor.group"))
        engines.like_the_actor(t, "teacher")
        load, step = "--opd-teacher-load", "--opd-teacher-ckpt-step"
        note = "names the folder of one step, iter_..., in Megatron's distributed format"
        path = t.get(load) if t.number(step) is None else f"{t.get(load)}/iter_{t.number(step):07d}"
        t.write("engines.teacher.dist_checkpointing_path", path, load, step, note=note)
    else:
        _served_teacher(t)
    t.imply("is the teacher's node, whose log-probs are a column", "--opd-type", post)
    if t.get("--custom-rm-path") == _OWN_TEACHER:
        t.write("nodes.advantage.estimator", "none", "--custom-rm-path", note="the rewards there are 0")


def _served_teacher(t: Translation) -> None:
    """SGLang answers to OpenAI's protocol on the port that slime asks by SGLang's own."""
    key, target = "--rm-url", "nodes.teacher.endpoint"
    t.put("nodes.teacher.op", "logprob")
    t.put("nodes.teacher.write", "teacher_logprob")
    t.put("nodes.teacher.model", "default")
    t.put(target, "http://TEACHER:30000/v1")
    if is_known(t.get(key)):
        address = str(t.get(key)).rstrip("/").removesuffix("/generate")
        t.write(target, f"{address}/v1", key, "--opd-type", note="a server of SGLang has one model, by any name")
    else:
        t.note(key, target, "name the address of the teacher's server", t.get(key))


@joint("--rm-type --custom-rm-path", always=True)
def reward(t: Translation) -> None:
    kind, own = "--rm-type", "--custom-rm-path"
    if t.get(own) == _OWN_TEACHER:
        return
    t.put("nodes.reward.op", "reward")
    if is_known(t.get(own)):
        note = "parameters are response, answer, data_source, extra_info (docs/migration.md)"
        t.write("nodes.reward.fn", _function_name(t.get(own)), own, note=note)
    elif t.get(kind) in ("deepscaler", "math", "dapo", "boxed_deepscaler", "boxed_math", "boxed_dapo"):
        t.write("nodes.reward.fn", "math", kind, note=parts.DAPO.lstrip("; ") if "dapo" in t.get(kind) else "")
    else:
        t.put("nodes.reward.fn", "math")
        t.note(kind, "nodes.reward.fn", "set `fn`: math, code, exact, or your own; math is used instead", None)


_WANDB = {"project": "--wandb-project", "group": "--wandb-group", "entity": "--wandb-team"}


@joint("--wandb-group --tb-experiment-name", always=True)
def _name(t: Translation) -> None:
    named, folders = ("--wandb-group", "--tb-experiment-name"), ("--save", "--hf-checkpoint")
    key = next((key for key in (*named, *folders) if is_known(t.get(key)) and t.get(key) is not True), folders[-1])
    if key in named:
        t.write("name", parts.name_of(t.get(key)), key)
    else:
        t.put("name", parts.name_of(PurePosixPath(str(t.get(key))).name))


@joint("--num-rollout --num-epoch", always=True)
def steps(t: Translation) -> None:
    key = "--num-rollout"
    if t.number(key) is None and not isinstance(t.get(key), Unresolved):
        parts.write_epochs(t, "--num-epoch")
        return
    t.copy(key, "run.steps")
    if t.get(key) == 0 and _validates(t):
        t.write("run.val_only", True, key, note="slime only validates then")
    elif t.get(key) == 0:
        t.note(key, "run.steps", "nothing is trained, and there is no validation", 0)


@joint("--use-wandb --use-tensorboard --use-mlflow", *_WANDB.values())
def _track(t: Translation) -> None:
    names = [name for name in ("wandb", "tensorboard", "mlflow") if t.flag(f"--use-{name}")]
    if names:
        parts.trackers(t, names, [f"--use-{name}" for name in names], _WANDB if "wandb" in names else {})


@joint(always=True)
def _keep(t: Translation) -> None:
    if "run.save_every" in t.tree:
        t.write("run.keep", "all", "--save-interval", note="there, all checkpoints are kept")


RUN = (
    _name,
    _track,
    to("--save-interval", "run.save_every"),
    _keep,
    to("--async-save", "run.async_save"),
    to("--rollout-seed", "run.seed"),
)


REST = (
    implied("is `dagrl run --run-dir DIR`", "--save --save-debug-*"),
    implied("`sleep: auto` frees the memory while the other engine works", "--offload*"),
    implied("chats go through the tokenizer's chat template", "--apply-chat-template"),
    implied("gradients are reduced in float32, as by default", "--accumulate-allreduce-grads-in-fp32"),
    refused_unless(0, "is 0: log-probs in training must not depend on chance", "--attention-dropout --hidden-dropout"),
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
    refused(_OWN_CODE, "--custom-* --rollout-function-path"),
    refused("adapters are `engines.actor.lora` (docs/lora.md)", "--lora-* --target-modules"),
    refused("draft layers are not trained", "--mtp-* --enable-mtp-training"),
    refused("wandb reads its own environment, such as WANDB_API_KEY and WANDB_PROJECT", "--wandb-*"),
    refused("rewards are functions of a row", "--reward-key"),
    refused("advantages depend on `estimator`", "--disable-rewards-normalization"),
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
