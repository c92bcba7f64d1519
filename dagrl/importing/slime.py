"""slime: arguments of ``train.py`` and ``train_async.py``, Megatron-LM's and SGLang's among them."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from dagrl.importing.parts import (
    data_file,
    is_known,
    library_field,
    name_of,
    put_generator,
    put_groups,
    put_logprob,
    put_reference,
    steps_of_epochs,
    trackers,
)
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Framework, Translation, implied, joint, refused, refused_unless, to

_DEFAULTS: dict[str, Any] = {
    "--actor-num-nodes": 1,
    "--actor-num-gpus-per-node": 8,
    "--num-gpus-per-node": 8,
    "--rollout-num-gpus-per-engine": 1,
    "--n-samples-per-prompt": 1,
    "--advantage-estimator": "grpo",
    "--eps-clip": 0.2,
    "--kl-loss-type": "k1",
    "--kl-loss-coef": 0.0,
    "--kl-coef": 0.0,
    "--entropy-coef": 0.0,
    "--value-clip": 0.2,
    "--tis-clip": 2.0,
    "--lr": 1.0e-6,
    "--lr-decay-style": "linear",
    "--weight-decay": 0.01,
    "--rollout-shuffle": False,
    "--calculate-per-token-loss": False,
}
_MODEL = """
    spec disable-bias-linear add-qkv-bias qk-layernorm group-query-attention num-attention-heads num-query-groups
    kv-channels num-layers hidden-size ffn-hidden-size use-gated-attention normalization apply-layernorm-1p
    position-embedding-type norm-epsilon rotary-percent rotary-base swiglu untie-embeddings-and-output-weights
    vocab-size
    moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-score-function moe-router-topk moe-layer-freq
    num-experts moe-token-drop-policy attention-output-gate moe-shared-expert-gate linear-attention-freq
    linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads
    moe-router-pre-softmax moe-router-enable-expert-bias moe-router-topk-scaling-factor moe-router-num-groups
    moe-router-group-topk multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
    rotary-scaling-factor mscale mscale-all-dim use-rotary-position-embeddings rope-type max-position-embeddings
    seq-length no-position-embedding make-vocab-size-divisible-by post-self-attn-layernorm post-mlp-layernorm
    use-rope-scaling rope-scaling-factor no-rope-fusion moe-shared-expert-overlap window-size window-attn-skip-freq
    padded-vocab-size bf16 model-name megatron-to-hf-mode tokenizer-type tokenizer-model attention-softmax-in-fp32
    rotary-interleaved no-rope-freq moe-latent-size experimental-attention-variant
""".split()  # noqa: SIM905 (a list would take a line for each)
"""Arguments that say what the model is: dagrl reads its config.json. bfloat16 softmax is computed in float32."""
_PARALLEL = {
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--sequence-parallel": "sequence_parallel",
}
_TRANSFORMER = {
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    **{
        f"--{name.replace('_', '-')}": name
        for name in (
            *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
            *("attention_backend", "moe_grouped_gemm", "moe_permute_fusion", "moe_token_dispatcher_type"),
            *("moe_router_dtype", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
            *("moe_layer_recompute", "moe_enable_deepep", "moe_flex_dispatcher_backend", "cross_entropy_loss_fusion"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            *("pipeline_model_parallel_layout", "microbatch_group_size_per_virtual_pipeline_stage"),
        )
    },
}
_OPTIMIZER = {
    f"--{name.replace('_', '-')}": name
    for name in (
        *("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "optimizer_cpu_offload", "optimizer_offload_fraction"),
        *("use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d", "main_grads_dtype", "main_params_dtype"),
        *("exp_avg_dtype", "exp_avg_sq_dtype", "use_distributed_optimizer"),
    )
}
_DDP = {
    "--overlap-grad-reduce": "overlap_grad_reduce",
    "--overlap-param-gather": "overlap_param_gather",
    "--ddp-bucket-size": "bucket_size",
}
_SERVER = {"cuda_graph_bs": "cuda_graph_bs_decode", "cuda_graph_max_bs": "cuda_graph_max_bs_decode"}
_ESTIMATORS = {
    "grpo": "grpo",
    "gspo": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "ppo": "gae",
}
_MATH = ("deepscaler", "math", "dapo", "boxed_deepscaler", "boxed_math", "boxed_dapo")
_MOST_PROMPT = 2048


def _uses_critic(t: Translation) -> bool:
    return t.get("--advantage-estimator") == "ppo"


def _groups(t: Translation) -> None:
    nodes, gpus, rollout = "--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus"
    shared = t.flag("--colocate")
    home = "gpus" if shared else "train"
    put_groups(t, {home: (1, 8)})
    if t.get(nodes) != 1:
        t.write(f"groups.{home}.nodes", t.get(nodes), nodes)
    else:
        t.imply("one machine, as by default", nodes)
    t.write(f"groups.{home}.gpus_per_node", t.get(gpus), gpus)
    t.put("engines.actor.group", home)
    t.put("engines.generator.group", home if shared else "rollout")
    if shared:
        t.imply("one group for both engines", "--colocate")
        t.imply("generators share the trainer's GPUs", rollout)
    else:
        size, machine = t.number(rollout, 8), t.number("--num-gpus-per-node", 8)
        if size > machine:
            t.put("groups.rollout.nodes", -(-size // machine))
        t.write("groups.rollout.gpus_per_node", min(size, machine), rollout)
    t.imply("machines of a group have the GPUs that it says", "--num-gpus-per-node")
    if _uses_critic(t):
        t.put("engines.critic.group", home)
    keys = ("--critic-num-nodes", "--critic-num-gpus-per-node")
    t.refuse("the critic shares the actor's group; `engines.critic.group` names another", *keys)


def _asynchronous(t: Translation) -> None:
    t.write("schedule.max_staleness", 1, "train_async.py", note="the next rollout runs while a step trains")
    t.put("engines.generator.weight_sync.pause", "in_place")


def _data(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    path = t.get("--prompt-data")
    note = "convert it once (docs/data.md)" if data_file(path) != path else ""
    t.write("data.train", data_file(path), "--prompt-data", note=note)
    for key, column in (("--input-key", "prompt"), ("--label-key", "reward_model.ground_truth")):
        t.imply(f"is the column `{column}`", key)


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


def _mini_batch(t: Translation) -> None:
    """Slime counts samples: ``global_batch_size = rollout_batch_size x n / num_steps_per_rollout``."""
    size, steps = "--global-batch-size", "--num-steps-per-rollout"
    prompts, n = t.tree.get("data.prompts_per_step"), t.tree.get("nodes.rollout.n")
    if not isinstance(prompts, int) or not isinstance(n, int):
        return
    key, samples = (size, t.number(size)) if t.number(size) else (steps, None)
    if samples is None and t.number(steps):
        samples = prompts * n // t.number(steps)
    if samples is None:
        t.imply("one optimizer step a rollout", size, steps)
    elif samples % n:
        t.refuse(f"a mini-batch has whole groups: {samples} samples are no multiple of {n}", key)
    else:
        t.write("nodes.update.mini_batch", samples // n, key, note=f"{samples} samples / {n} of each prompt")
    t.imply("`--global-batch-size` takes its place", steps)


def _steps_per_rollout(t: Translation) -> int:
    prompts, mini = t.tree.get("data.prompts_per_step"), t.tree.get("nodes.update.mini_batch")
    return -(-prompts // mini) if isinstance(prompts, int) and isinstance(mini, int) else 1


def _tokens(t: Translation) -> None:
    parallel = t.number("--context-parallel-size", 1)
    train, score = "--max-tokens-per-gpu", "--log-probs-max-tokens-per-gpu"
    if not t.flag("--use-dynamic-batch-size"):
        rows = t.number("--micro-batch-size", 1)
        t.imply("rows are always packed by `tokens_per_micro_batch`", "--micro-batch-size", train, score)
        prompt, response = t.tree.get("data.max_prompt_tokens"), t.tree.get("nodes.rollout.sampling.max_new_tokens")
        if isinstance(prompt, int) and isinstance(response, int):
            note = f"{rows} rows of up to {prompt} + {response} tokens"
            t.write("nodes.update.tokens_per_micro_batch", rows * (prompt + response), "--micro-batch-size", note=note)
        return
    t.imply("rows are always packed by `tokens_per_micro_batch`", "--use-dynamic-batch-size", "--micro-batch-size")
    for key, nodes in ((train, ("update", "old", "ref")), (score, ("old", "ref"))):
        if t.number(key):
            for node in nodes:
                if node == "update" or f"nodes.{node}.op" in t.tree:
                    note = f"x {parallel} that share each sequence" if parallel > 1 else ""
                    t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key) * parallel, key, note=note)


def _steps(t: Translation) -> None:
    key = "--num-rollout"
    if t.number(key):
        t.write("run.steps", t.get(key), key)
        t.imply("`--num-rollout` takes its place", "--num-epoch")
    else:
        steps_of_epochs(t, "--num-epoch")


def _sampling(t: Translation) -> None:
    for name in ("temperature", "top_p", "top_k"):
        key = f"--rollout-{name.replace('_', '-')}"
        if t.given(key):
            t.write(f"nodes.rollout.sampling.{name}", t.get(key), key)
    stops = "--rollout-stop-token-ids"
    if t.given(stops):
        value = t.get(stops)
        t.write("nodes.rollout.sampling.stop_token_ids", value if isinstance(value, list) else [value], stops)
    t.put("nodes.rollout.op", "rollout")
    t.put("nodes.rollout.engine", "generator")


def _validation(t: Translation) -> None:
    """Slime validates with the rollout's sampling where it sets no other, and before the first step."""
    interval, files = "--eval-interval", "--eval-prompt-data"
    value = t.get(files)
    if not t.number(interval) or not is_known(value):
        t.imply_all("there is no validation without `--eval-interval` and `--eval-prompt-data`")
        return
    t.write("run.validate_every", t.get(interval), interval)
    if not t.flag("--skip-eval-before-train"):
        t.write("run.validate_first", True, "--skip-eval-before-train", note="unless --skip-eval-before-train is set")
    names = value if isinstance(value, list) else ["val", value]
    for name, path in zip(names[::2], names[1::2], strict=False):
        label = "".join(c if c.isalnum() else "_" for c in str(name).lower())
        target = f"data.val.{label if label[:1].isalpha() else f'set_{label}'}"
        note = "convert it once (docs/data.md)" if data_file(path) != path else ""
        t.write(target, data_file(path), files, note=note)
    for name in ("temperature", "top_p", "top_k"):
        own, rollout = (f"--{kind}-{name.replace('_', '-')}" for kind in ("eval", "rollout"))
        key = own if t.given(own) else rollout
        if t.given(key):
            t.write(f"nodes.rollout.val_sampling.{name}", t.get(key), key)
    longest = "--eval-max-response-len"
    key = longest if t.given(longest) else "--rollout-max-response-len"
    t.write("nodes.rollout.val_sampling.max_new_tokens", t.get(key), key)
    count = "--n-samples-per-eval-prompt"
    if t.number(count, 1) > 1:
        t.write("nodes.rollout.val_n", t.get(count), count)
    else:
        t.imply("one response, as by default", count)


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


def _megatron(t: Translation) -> None:
    for key in t.current:
        if key in _PARALLEL:
            t.write(f"engines.actor.parallel.{_PARALLEL[key]}", t.get(key), key)
        for table, names in (("transformer", _TRANSFORMER), ("optimizer", _OPTIMIZER), ("ddp", _DDP)):
            if key in names:
                library_field(t, key, "actor", table, names[key])
    layers, virtual = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    if t.number(virtual):
        t.write("engines.actor.parallel.virtual_pipeline_model_parallel_size", t.get(virtual), virtual)
    t.refuse("is `parallel.virtual_pipeline_model_parallel_size`: layers / stages / this", layers)


def _balancing(t: Translation) -> None:
    key = "--moe-router-load-balancing-type"
    if t.get(key) in ("aux_loss", "global_aux_loss", "none"):
        t.write("engines.actor.transformer.moe_router_load_balancing_type", t.get(key), key)
    else:
        t.refuse("routes a token by its neighbours in the pack; see `moe_router_load_balancing_type`", key)


def _learning_rate(t: Translation) -> None:
    t.write("engines.actor.optimizer.lr", t.get("--lr"), "--lr")
    t.write("engines.actor.optimizer.weight_decay", t.get("--weight-decay"), "--weight-decay")
    if t.get("--optimizer", "adam") == "adam":
        t.imply("as by default", "--optimizer")
    else:
        t.write("engines.actor.optimizer.optimizer", t.get("--optimizer"), "--optimizer")
    style = t.get("--lr-decay-style")
    schedule = "engines.actor.lr_schedule"
    if style in ("constant", "linear", "cosine", "inverse-square-root"):
        t.write(f"{schedule}.lr_decay_style", style, "--lr-decay-style")
    else:
        t.refuse("shapes are constant, linear, cosine and inverse-square-root", "--lr-decay-style")
    if t.number("--min-lr"):
        t.write(f"{schedule}.min_lr", t.get("--min-lr"), "--min-lr")
    each = _steps_per_rollout(t)
    for key, target in (("--lr-warmup-iters", "lr_warmup_steps"), ("--lr-decay-iters", "lr_decay_steps")):
        if t.number(key):
            note = f"optimizer steps there, {each} a step" if each > 1 else ""
            t.write(f"{schedule}.{target}", -(-t.get(key) // each), key, note=note)
    fraction, steps = "--lr-warmup-fraction", t.tree.get("run.steps")
    if t.number(fraction) and isinstance(steps, int):
        t.write(f"{schedule}.lr_warmup_steps", int(t.get(fraction) * steps), fraction, note=f"of {steps} steps")


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


def _critic(t: Translation) -> None:
    if not _uses_critic(t):
        t.imply_all("there is no critic with this estimator")
        return
    t.put("engines.critic.backend", "megatron")
    t.put("engines.critic.head", "value")
    for name in ("parallel", "transformer"):
        for target, value in list(t.tree.items()):
            if target.startswith(f"engines.actor.{name}."):
                t.put(target.replace("engines.actor.", "engines.critic.", 1), value)
    lr = "--critic-lr" if t.given("--critic-lr") else "--lr"
    t.write("engines.critic.optimizer.lr", t.get(lr), lr)
    t.put("nodes.values.op", "values")
    t.put("nodes.values.engine", "critic")
    t.put("nodes.critic.op", "critic")
    t.put("nodes.critic.engine", "critic")
    if mini := t.tree.get("nodes.update.mini_batch"):
        t.put("nodes.critic.mini_batch", mini)
    t.write("nodes.critic.cliprange_value", t.get("--value-clip"), "--value-clip")
    if t.number("--num-critic-only-steps"):
        t.write("nodes.update.critic_warmup", t.get("--num-critic-only-steps"), "--num-critic-only-steps")
    t.imply("weights come from the model's folder", "--critic-load", "--critic-save")


def _loss(t: Translation) -> None:
    t.put("nodes.update.op", "update")
    t.put("nodes.update.engine", "actor")
    t.write("nodes.update.loss.clip_ratio", t.get("--eps-clip"), "--eps-clip")
    if t.given("--eps-clip-high"):
        t.write("nodes.update.loss.clip_ratio_high", t.get("--eps-clip-high"), "--eps-clip-high")
    if t.number("--eps-clip-c"):
        t.write("nodes.update.loss.dual_clip", t.get("--eps-clip-c"), "--eps-clip-c")
    t.write("nodes.update.loss.entropy_coef", t.get("--entropy-coef"), "--entropy-coef")
    mode = "token-mean" if t.flag("--calculate-per-token-loss") else "seq-mean-token-mean"
    t.write("nodes.update.loss.aggregation", mode, "--calculate-per-token-loss")


def _divergence(t: Translation) -> None:
    use, coef, kind, reward = "--use-kl-loss", "--kl-loss-coef", "--kl-loss-type", "--kl-coef"
    if t.flag(use):
        t.write("nodes.update.loss.kl_coef", t.get(coef), coef)
        t.imply("`kl_coef` above 0 switches it on", use)
        estimator = "k3" if t.get(kind) == "low_var_kl" else t.get(kind)
        note = "bounded by 10 here, without a bound there" if t.get(kind) == "k3" else ""
        t.write("nodes.update.loss.kl_estimator", estimator, kind, note=note)
    else:
        t.imply("there is no divergence in the loss", coef, kind)
    if t.number(reward, 0):
        t.write("nodes.advantage.kl_in_reward.coef", t.get(reward), reward)
    else:
        t.imply("there is no divergence in the reward", reward)
    t.refuse("the divergence has no weights of importance", "--use-unbiased-kl")
    if t.flag("--use-rollout-logprobs"):
        t.write("nodes.update.read", {"old_logprob": "rollout_logprob"}, "--use-rollout-logprobs")
    else:
        put_logprob(t, "old", "actor", "old_logprob")
    put_reference(t)


def _correction(t: Translation) -> None:
    if not t.flag("--use-tis"):
        t.imply_all("there is no correction without `--use-tis`")
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


def _dynamic(t: Translation) -> None:
    key, over = "--dynamic-sampling-filter-path", "--over-sampling-batch-size"
    path = t.get(key)
    if is_known(path) or isinstance(path, Unresolved):
        if str(path).endswith("check_reward_nonzero_std"):
            t.write("nodes.keep.op", "filter", key)
        else:
            t.put("nodes.keep.op", "filter")
            t.write("nodes.keep.fn", _function(path), key, note="it takes columns of a group (docs/filter.md)")
        if t.number(over) and not t.flag("--partial-rollout"):
            t.write("nodes.keep.prompts_per_round", t.get(over), over)
        elif t.number(over):
            t.write("nodes.rollout.over_sampling_batch_size", t.get(over), over)
    elif t.number(over) and t.get(over) != t.tree.get("data.prompts_per_step"):
        t.write("nodes.rollout.over_sampling_batch_size", t.get(over), over)
    for name in ("partial_rollout", "mask_offpolicy_in_partial_rollout"):
        if t.flag(f"--{name.replace('_', '-')}"):
            t.write(f"nodes.rollout.{name}", True, f"--{name.replace('_', '-')}")


def _function(path: Any) -> str:
    module, _, name = str(path).rpartition(".")
    return f"{module}:{name}"


def _reward(t: Translation) -> None:
    t.put("nodes.reward.op", "reward")
    kind, own = "--rm-type", "--custom-rm-path"
    if is_known(t.get(own)):
        note = "parameters are response, answer, data_source, extra_info (docs/migration.md)"
        t.write("nodes.reward.fn", _function(t.get(own)), own, note=note)
        t.imply("`--custom-rm-path` takes its place", kind)
    elif t.get(kind) in _MATH:
        t.write("nodes.reward.fn", "math", kind)
    else:
        t.put("nodes.reward.fn", "math")
        t.note(kind, "nodes.reward.fn", "set `fn`: math, code, exact, or your own; math stands in", None)


def _name(t: Translation) -> None:
    keys = ("--wandb-group", "--tb-experiment-name", "--save", "--hf-checkpoint")
    key = next((key for key in keys if is_known(t.get(key)) and t.get(key) is not True), keys[-1])
    value = PurePosixPath(str(t.get(key))).name if key in keys[2:] else t.get(key)
    if key in keys[:2]:
        t.write("name", name_of(value), key)
    else:
        t.put("name", name_of(value))
        t.origins.pop("name", None)


def _track(t: Translation) -> None:
    used = {"wandb": "--use-wandb", "tensorboard": "--use-tensorboard", "mlflow": "--use-mlflow"}
    for name, key in used.items():
        if t.flag(key):
            trackers(t, [*t.tree.get("track", ["console"]), name], key)


def _lora(t: Translation) -> None:
    if not t.number("--lora-rank", 0):
        t.imply_all("there are no adapters")
        return
    t.write("engines.actor.lora.rank", t.get("--lora-rank"), "--lora-rank")
    t.write("engines.actor.lora.alpha", t.get("--lora-alpha", 16), "--lora-alpha")
    if t.number("--lora-dropout"):
        t.write("engines.actor.lora.dropout", t.get("--lora-dropout"), "--lora-dropout")
    if t.get("--target-modules") in (None, "all-linear"):
        t.imply("all linear layers, as by default", "--target-modules")
    else:
        t.refuse("names layers in Megatron's names: `lora.target_modules`", "--target-modules")


_RULES = (
    joint(_name, "--wandb-group", "--tb-experiment-name", targets=("name",), always=True),
    joint(
        _groups,
        "--actor-num-nodes",
        "--actor-num-gpus-per-node",
        "--critic-num-nodes",
        "--critic-num-gpus-per-node",
        "--rollout-num-gpus",
        "--num-gpus-per-node",
        "--colocate",
        targets=("groups",),
        always=True,
    ),
    to("--hf-checkpoint", "model.path"),
    joint(_data, "--prompt-data", "--input-key", "--label-key", targets=("data.train",), always=True),
    to("--rollout-shuffle", "data.shuffle", write_default=True),
    to("--rollout-batch-size", "data.prompts_per_step"),
    to("--n-samples-per-prompt", "nodes.rollout.n", write_default=True),
    to("--rollout-max-response-len", "nodes.rollout.sampling.max_new_tokens"),
    joint(
        _prompt_length,
        "--rollout-max-prompt-len",
        "--rollout-max-context-len",
        targets=("data.max_prompt_tokens",),
        always=True,
    ),
    joint(_mini_batch, "--global-batch-size", "--num-steps-per-rollout", targets=("nodes.update.mini_batch",)),
    joint(_steps, "--num-rollout", "--num-epoch", targets=("run.steps",), always=True),
    joint(
        _sampling,
        *("--rollout-temperature", "--rollout-top-p", "--rollout-top-k", "--rollout-stop-token-ids"),
        targets=("nodes.rollout.sampling",),
        always=True,
    ),
    joint(
        _validation,
        "--eval-interval",
        "--eval-prompt-data",
        "--skip-eval-before-train",
        *("--eval-temperature", "--eval-top-p", "--eval-top-k", "--eval-max-response-len"),
        "--n-samples-per-eval-prompt",
        targets=(
            "data.val",
            "run.validate_every",
            "run.validate_first",
            "nodes.rollout.val_sampling",
            "nodes.rollout.val_n",
        ),
    ),
    joint(
        _server,
        "--rollout-num-gpus-per-engine",
        targets=("engines.generator.backend", "engines.generator.server.tp_size"),
        always=True,
    ),
    joint(_server_fields, "--sglang-*", targets=("engines.generator.server", "engines.generator.extra.server")),
    joint(
        _megatron,
        *_PARALLEL,
        *_TRANSFORMER,
        *_OPTIMIZER,
        *_DDP,
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        targets=("engines.actor.parallel", "engines.actor.transformer", "engines.actor.optimizer", "engines.actor.ddp"),
    ),
    joint(_balancing, "--moe-router-load-balancing-type", targets=("engines.actor.transformer",)),
    joint(
        _learning_rate,
        *("--lr", "--weight-decay", "--optimizer", "--lr-decay-style", "--min-lr", "--lr-warmup-iters"),
        *("--lr-decay-iters", "--lr-warmup-fraction"),
        targets=("engines.actor.optimizer", "engines.actor.lr_schedule"),
        always=True,
    ),
    joint(
        _estimator,
        "--advantage-estimator",
        "--disable-grpo-std-normalization",
        "--normalize-advantages",
        "--gamma",
        "--lambd",
        targets=("nodes.advantage.estimator", "nodes.advantage.normalize_by_std"),
        always=True,
    ),
    joint(
        _loss,
        *("--eps-clip", "--eps-clip-high", "--eps-clip-c", "--entropy-coef", "--calculate-per-token-loss"),
        targets=(
            *("nodes.update.loss.clip_ratio", "nodes.update.loss.clip_ratio_high", "nodes.update.loss.dual_clip"),
            "nodes.update.loss.aggregation",
        ),
        always=True,
    ),
    joint(
        _critic,
        *("--critic-lr", "--critic-load", "--critic-save", "--value-clip", "--num-critic-only-steps"),
        targets=("engines.critic", "nodes.critic", "nodes.values"),
        always=True,
    ),
    joint(
        _divergence,
        *("--use-kl-loss", "--kl-loss-coef", "--kl-loss-type", "--kl-coef", "--use-unbiased-kl"),
        "--use-rollout-logprobs",
        targets=("nodes.update.loss.kl_coef", "nodes.update.loss.kl_estimator", "nodes.advantage.kl_in_reward"),
        always=True,
    ),
    joint(
        _tokens,
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "--log-probs-max-tokens-per-gpu", "--micro-batch-size"),
        targets=("nodes.update.tokens_per_micro_batch",),
    ),
    joint(
        _correction,
        *("--use-tis", "--tis-clip", "--tis-clip-low", "--tis-level", "--custom-tis-function-path"),
        targets=("nodes.update.rollout_correction.rollout_is",),
    ),
    to("--use-rollout-routing-replay", "engines.actor.router_replay"),
    joint(
        _dynamic,
        *("--dynamic-sampling-filter-path", "--over-sampling-batch-size", "--partial-rollout"),
        "--mask-offpolicy-in-partial-rollout",
        targets=("nodes.keep", "nodes.rollout.over_sampling_batch_size", "nodes.rollout.partial_rollout"),
    ),
    joint(_reward, "--rm-type", "--custom-rm-path", targets=("nodes.reward.fn",), always=True),
    joint(_asynchronous, "train_async.py", targets=("schedule.max_staleness",)),
    joint(_track, "--use-wandb", "--use-tensorboard", "--use-mlflow", targets=("track",)),
    joint(_lora, "--lora-*", "--target-modules", targets=("engines.actor.lora",)),
    to("--save-interval", "run.save_every"),
    to("--async-save", "run.async_save"),
    to("--rollout-seed", "run.seed"),
    to(
        "--update-weight-buffer-size",
        "engines.generator.weight_sync.bucket_mib",
        convert=lambda size: max(1, size // 2**20),
        note="bytes there",
    ),
    implied(
        "the model's folder has weights and tokenizer; Megatron's are `dist_checkpointing_path`", "--ref-load", "--load"
    ),
    implied("is `dagrl run --run-dir DIR`", "--save", "--save-hf", "--dump-details", "--save-debug-*"),
    implied("chats go through the tokenizer's chat template", "--apply-chat-template"),
    implied("follows from the model's config.json", *(f"--{name}" for name in _MODEL)),
    implied("`sleep: auto` frees the memory while the other engine works", "--offload*"),
    implied("gradients are reduced in float32, as by default", "--accumulate-allreduce-grads-in-fp32"),
    refused_unless(
        (0, 0.0), "is 0: log-probs in training must not depend on chance", "--attention-dropout", "--hidden-dropout"
    ),
    implied(
        "is done by itself",
        "--balance-data",
        "--balance-by-flops",
        "--use-fault-tolerance",
        "--rollout-health-check-*",
        "--distributed-*",
        "--use-slime-router",
        "--use-miles-router",
        "--slime-router-*",
        "--router-*",
        "--no-save-optim",
        "--no-load-*",
        "--no-save-rng",
        "--ckpt-*",
        "--log-*",
        "--metadata-key",
        "--seed",
        "--train-memory-margin-bytes",
        "--recompute-loss-function",
        "--disable-rollout-global-dataset",
        "--qkv-format",
        "--get-mismatch-metrics",
        "--data-pad-size-multiplier",
        "--custom-model-provider-path",
        "--train-env-vars",
        "--num-workers",
        "--no-check-for-nan-in-loss-and-grad",
        "--no-gradient-accumulation-fusion",
        "--disable-weights-backuper",
        "--rollout-skip-special-tokens",
        "--eval-input-key",
        "--eval-label-key",
        "--eval-min-new-tokens",
    ),
    refused_unless("megatron", "trainers are Megatron-core", "--train-backend"),
    refused_unless(
        "policy_loss", "losses are `update` with a policy, or nodes sft and dpo (docs/offline.md)", "--loss-type"
    ),
    refused(
        "is a node, an agent or a loss of your own (docs/your_own.md, docs/gateway.md)",
        "--custom-*",
        "--rollout-function-path",
        "--eval-function-path",
        "--data-source-path",
        "--buffer-filter-path",
        "--rollout-sample-*",
        "--rollout-data-postprocess-path",
    ),
    refused("routes are those of the generator: --use-rollout-routing-replay", "--use-routing-replay"),
    refused("draft layers are not trained", "--mtp-*", "--enable-mtp-training"),
    refused(
        "wandb reads its own environment, such as WANDB_API_KEY and WANDB_PROJECT",
        "--wandb-*",
        "--disable-wandb-random-suffix",
    ),
    refused("trackers read their own environment", "--tb-*", "--mlflow-*", "--use-prometheus", "--prometheus-*"),
    refused("generation ends at token ids: `stop_token_ids`", "--rollout-stop"),
    refused("the chat template is called without arguments", "--apply-chat-template-kwargs", "--chat-template-path"),
    refused(
        "tools are functions: `nodes.rollout.tools` (docs/multi_turn.md)", "--tool-key", "--generate-multi-samples"
    ),
    refused("rewards are functions of a row", "--group-rm", "--rm-url", "--reward-key", "--eval-reward-key"),
    refused("advantages are those of `estimator`", "--disable-rewards-normalization", "--use-opsm", "--opsm-delta"),
    refused("images are `data.image_key` (docs/images.md)", "--multimodal-keys"),
    refused(
        "validation sets are parquet files: `data.val`",
        "--eval-config",
        "--eval-max-prompt-len",
        "--eval-max-context-len",
    ),
    refused("the reference stays as it is", "--ref-update-interval", "--ref-ckpt-step"),
    refused("is for tests of slime", "--ci-*", "--debug-*", "--check-weight-update-equal"),
    refused("fp8 training and quantized weights are not built in", "--fp8-*", "--transformer-impl", "--fp4-*"),
    refused(
        "is `profile` of the pipeline (docs/profiling.md)",
        "--use-pytorch-profiler",
        "--profile*",
        "--record-memory-history",
        "--memory-*",
    ),
    refused("weights go over with every step", "--update-weights-interval", "--keep-old-actor"),
    refused("prefill and decoding share a server", "--prefill-num-servers", "--rollout-external*"),
)

SLIME = Framework("slime", "slime", _RULES, _DEFAULTS)
