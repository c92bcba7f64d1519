"""ROLL's data, nodes and run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from dagrl.importing.engines import generator_of, library_field, server_key
from dagrl.importing.parts import (
    has_val_data,
    keep,
    named,
    parquet_file,
    put_logprob,
    put_node,
    put_reference,
    tracked,
    val_label,
    write_files,
    write_val_n,
)
from dagrl.importing.roll.common import INFER, STRATEGY, TRAIN, is_pure_opd
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under


def _lengths(t: Translation) -> None:
    t.write("data.max_prompt_tokens", t.get("prompt_length"), "prompt_length")
    response, sequence = t.number("response_length"), t.number("sequence_length")
    if response:
        t.write("nodes.rollout.sampling.max_new_tokens", response, "response_length")
        t.imply("follows from prompt and response", "sequence_length")
    elif sequence:
        target, rest = "nodes.rollout.sampling.max_new_tokens", sequence - t.number("prompt_length")
        if rest > 0:
            t.write(target, rest, "sequence_length", note="less the prompt")
        else:
            t.note("sequence_length", target, "less the prompt it leaves no token for the response; choose both")
    t.imply(
        "has no effect: the response's length follows from `sequence_length`", f"{INFER}.generating_args.max_new_tokens"
    )


_CONVERT = "convert them once (docs/data.md)"


def _train(t: Translation, key: str, files: Sequence[Any]) -> None:
    """Files of domains become sources, if the name of each says its domain; or else one source."""
    probs = f"{TRAIN}.data_args.domain_interleave_probs"
    weights = {each.rpartition(".")[2]: t.get(each) for each in t.below(probs)}
    by_domain = {name: [file for file in files if _is_of(file, name)] for name in weights}
    if len(weights) > 1 and all(by_domain.values()) and sum(map(len, by_domain.values())) == len(files):
        for name, mine in by_domain.items():
            paths = [parquet_file(file) for file in mine]
            t.write(f"data.train.{name}.path", paths if len(paths) > 1 else paths[0], key, note=_CONVERT)
            t.write(f"data.train.{name}.weight", weights[name], f"{probs}.{name}")
        return
    write_files(t, "data.train", [parquet_file(file) for file in files], key, note=_CONVERT)
    if len(weights) == 1:
        t.imply("there is one domain", *t.below(probs))
    else:
        reason = "files hold several domains: write one for each, and name them in `data.train` with these weights"
        t.refuse(reason, *t.below(probs))


def _is_of(file: Any, domain: str) -> bool:
    """Whether the name of a file begins as that of a domain: ``math_deepmath.jsonl`` and ``math_rule``."""
    return PurePosixPath(str(file)).stem.lower().split("_")[0] == domain.lower().split("_")[0]


def _data(t: Translation) -> None:
    for key, target in ((f"{TRAIN}.data_args.file_name", "data.train"), ("validation.data_args.file_name", "data.val")):
        value = t.get(key)
        files = value if isinstance(value, list) else [value] if value is not None else []
        if target == "data.train":
            if files:
                _train(t, key, files)
        elif len(files) == 1:
            t.write(target, parquet_file(files[0]), key, note=_CONVERT)
        elif files:
            for index, file in enumerate(files):
                label = val_label(PurePosixPath(str(file)).stem, index)
                t.write(f"data.val.{label}", parquet_file(file), key, note=_CONVERT)


DATA = (
    joint(
        _lengths,
        "prompt_length response_length sequence_length",
        under(INFER, "generating_args.max_new_tokens"),
        always=True,
    ),
    joint(
        _data,
        under(TRAIN, "data_args.file_name data_args.domain_interleave_probs.*"),
        "validation.data_args.file_name",
        always=True,
    ),
    to("rollout_batch_size", "data.prompts_per_step", write_default=True),
)


_SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
"""Defaults of ROLL's ``generating_args``."""


def _sampling(t: Translation, prefix: str, target: str) -> None:
    for name, default in _SAMPLING.items():
        key = f"{prefix}.{name}"
        t.write(f"{target}.{name}", t.get(key, default), key)
    stops = f"{prefix}.stop_strings"
    texts = t.get(stops)
    if isinstance(texts, str | list | Unresolved):
        t.write(f"{target}.stop", [texts] if isinstance(texts, str) else texts, stops)


def _rollout(t: Translation) -> None:
    put_node(t, "rollout", "rollout", "generator")
    prefix = f"{INFER}.generating_args"
    _sampling(t, prefix, "nodes.rollout.sampling")
    t.imply("is `num_return_sequences_in_group`", f"{prefix}.num_return_sequences")
    over = "max_additional_running_prompts"
    if t.flag("is_use_additional_prompts") and t.number(over):
        prompts = t.get("rollout_batch_size") + t.get(over)
        t.write(
            "nodes.rollout.over_sampling_batch_size",
            prompts,
            "rollout_batch_size",
            over,
            note="prompts and those beyond",
        )
        t.imply("`over_sampling_batch_size` switches it on", "is_use_additional_prompts")
    else:
        t.imply("no more prompts are begun than a step needs", "is_use_additional_prompts", over)


def _validation(t: Translation) -> None:
    """ROLL validates every ``eval_steps``, and before the first step."""
    if not has_val_data(t):
        t.imply_all("there is no validation without a file")
        return
    t.write("run.validate_every", t.get("eval_steps"), "eval_steps")
    t.write("run.validate_first", True, "validation", note="ROLL validates before the first step")
    prefix = "validation.generating_args"
    if any(key.startswith(f"{prefix}.") for key in t.current):
        _sampling(t, prefix, "nodes.rollout.val_sampling")
        t.put("nodes.rollout.val_sampling.max_new_tokens", t.tree["nodes.rollout.sampling.max_new_tokens"])
        write_val_n(t, f"{prefix}.num_return_sequences")
    t.imply("follows from the rollout", f"{prefix}.max_new_tokens", f"{prefix}.num_beams")


def _server(t: Translation) -> None:
    generator_of(t, f"{INFER}.strategy_args.strategy_name")
    workers = f"{INFER}.num_gpus_per_worker"
    if t.number(workers, 1) > 1:
        t.write(server_key(t, "tensor_parallel"), t.get(workers), workers)
    else:
        t.imply("one GPU a server, or as the server's own size says", workers)
    for each in t.current:
        field = each.removeprefix(f"{INFER}.{STRATEGY}").lstrip(".")
        if each.startswith(f"{INFER}.{STRATEGY}"):
            if field in ("load_format", ""):
                t.imply("weights come from the weight sync", each)
            else:
                library_field(t, each, "generator", "server", field)


ROLLOUT = (
    joint(
        _rollout,
        "is_use_additional_prompts max_additional_running_prompts",
        *(f"{INFER}.generating_args.{name}" for name in (*_SAMPLING, "stop_strings", "num_return_sequences")),
        always=True,
    ),
    to("num_return_sequences_in_group", "nodes.rollout.n", write_default=True),
    joint(_validation, "eval_steps validation.generating_args.*"),
    joint(
        _server, under(INFER, "strategy_args.strategy_name num_gpus_per_worker"), f"{INFER}.{STRATEGY}*", always=True
    ),
)


_KL = {"kl": "k1", "abs": "abs", "mse": "k2"}


def _estimator(t: Translation) -> None:
    """``reinforce`` with whitening is REINFORCE++; with means of groups it is its baseline form, or Dr. GRPO."""
    key, whiten, mean, std = "adv_estimator", "whiten_advantages", "norm_mean_type", "norm_std_type"
    name, whitened, grouped = t.get(key), t.flag(whiten), t.get(mean) == "group"
    t.put("nodes.advantage.op", "advantage")
    target = "nodes.advantage.estimator"
    if is_pure_opd(t):
        t.put(target, "none")
        if whitened:
            t.refuse("advantages of a teacher alone are not whitened", whiten)
        t.imply_all("a teacher is all that is learned from")
        return
    if name == "gae":
        t.write(target, "gae", key)
        for option, field in (("gamma", "gamma"), ("lambd", "lam")):
            t.write(f"nodes.advantage.{field}", t.get(option), option)
        t.imply("advantages of gae are always whitened", whiten)
    elif name == "grpo":
        t.write(target, "grpo", key)
        if whitened:
            t.refuse("advantages of grpo are not whitened: an estimator of your own (docs/your_own.md)", whiten)
        t.imply("is grpo's own", mean, std)
    elif name == "reinforce" and (whitened or grouped) and t.get(std) in (None, "null"):
        form = ("reinforce_plus_plus_baseline" if grouped else "reinforce_plus_plus") if whitened else "dr_grpo"
        t.write(
            target, form, *(option for option in (key, whiten, mean) if t.given(option) and t.get(option) is not None)
        )
        t.imply("nothing is divided by a deviation of rewards", std)
    elif name == "reinforce" and grouped and t.get(std) in ("group", "batch") and not whitened:
        t.write(target, "grpo", key, mean)
        t.write("nodes.advantage.normalize_by_std", t.get(std), std)
    elif name == "agentic_reinforce" and whitened and t.get(mean) is None and t.get(std) is None:
        t.write(target, name, key, whiten)
        t.write("nodes.advantage.gamma", t.get("gamma"), "gamma")
    else:
        t.put(target, "reinforce_plus_plus")
        t.refuse("has no counterpart: an estimator of your own (docs/your_own.md); reinforce_plus_plus stands in", key)
        t.refuse(
            "has no counterpart with this estimator", *(option for option in (mean, std) if t.get(option) is not None)
        )
    t.imply(
        "is null or off, as by default", *(option for option in (whiten, mean, std) if t.get(option) in (None, False))
    )
    rest = [option for option in ("gamma", "lambd", whiten, mean, std) if t.given(option) and not t.is_recorded(option)]
    t.imply("has no effect on this estimator", *rest)


def _loss(t: Translation) -> None:
    put_node(t, "update", "update", "actor")
    clip = "pg_clip"
    if t.flag("use_pg_clip_range"):
        t.write("nodes.update.loss.clip_ratio", t.get("pg_clip_low"), "pg_clip_low", "use_pg_clip_range")
        t.write("nodes.update.loss.clip_ratio_high", t.get("pg_clip_high"), "pg_clip_high")
    else:
        t.write("nodes.update.loss.clip_ratio", t.get(clip), clip)
    if t.flag("dual_clip_loss"):
        bound = float(f"{1 + 2 * t.number(clip, 0.2):.12g}")
        t.write("nodes.update.loss.dual_clip", bound, "dual_clip_loss", note="1 + 2 pg_clip")
    if t.get("importance_sampling") == "seq":
        t.write("nodes.update.loss.policy", "gspo", "importance_sampling")
    variant = f"{TRAIN}.pg_variant"
    policies = {"ppo": "ppo_clip", "vanilla": "reinforce", "topr": "topr", "cispo": "cispo", "kimi15": "dro"}
    if t.get(variant) in policies:
        t.write("nodes.update.loss.policy", policies[t.get(variant)], variant)
    else:
        t.refuse("losses with a counterpart are ppo, vanilla, topr, cispo and kimi15", variant)
    tau = f"{TRAIN}.kimi15_tau"
    if t.get(variant) == "kimi15":
        t.write("nodes.update.loss.tau", t.get(tau, 0.1), tau)
    else:
        t.imply("has no effect on this loss", tau)
    t.write("nodes.update.loss.entropy_coef", t.get("entropy_loss_coef"), "entropy_loss_coef")
    mode = t.get("loss_agg_mode")
    t.write("nodes.update.loss.aggregation", mode, "loss_agg_mode")


def _divergence(t: Translation) -> None:
    put_logprob(t, "old", "actor", "old_logprob")
    if is_pure_opd(t):
        t.imply_all("is off where a teacher is all that is learned from")
        return
    if t.flag("use_kl_loss"):
        t.write("nodes.update.loss.kl_coef", t.get("kl_loss_coef"), "kl_loss_coef", "use_kl_loss")
        t.write("nodes.update.loss.kl_estimator", "k3", "use_kl_loss")
    else:
        t.imply("there is no divergence in the loss", "use_kl_loss", "kl_loss_coef")
    keys = ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon")
    if t.flag("add_token_level_kl"):
        target = "nodes.advantage.kl_in_reward"
        t.write(f"{target}.coef", t.get("init_kl_coef"), "init_kl_coef", "add_token_level_kl")
        if t.get("kl_penalty") in _KL:
            t.write(f"{target}.estimator", _KL[t.get("kl_penalty")], "kl_penalty")
        else:
            t.refuse("estimators in the reward are k1, k2, k3 and abs", "kl_penalty")
        if t.number("target_kl"):
            t.write(f"{target}.target_kl", t.get("target_kl"), "target_kl")
            t.write(f"{target}.horizon", t.get("kl_horizon"), "kl_horizon")
    else:
        t.imply("there is no divergence in the reward", "add_token_level_kl", *keys)
    put_reference(t)


def _correction(t: Translation) -> None:
    prefix = "train_infer_correction"
    weight = f"{prefix}.is_weight"
    target = "nodes.update.rollout_correction"
    if t.flag(f"{weight}.enabled"):
        kind = f"{weight}.weight_type"
        if t.get(kind) in ("token", "sequence"):
            t.write(f"{target}.rollout_is", t.get(kind), kind, f"{weight}.enabled")
            t.write(f"{target}.rollout_is_threshold", t.get(f"{weight}.upper_bound"), f"{weight}.upper_bound")
        else:
            t.refuse("weights are of tokens or of sequences", kind, f"{weight}.enabled")
    found = (re.match(rf"{prefix}\.filters\.\d+", key) for key in t.current)
    filters = dict.fromkeys(match[0] for match in found if match)
    kept = []
    for each in filters:
        if not t.flag(f"{each}.enabled"):
            continue
        by_ratio = t.get(f"{each}.agg_type", "token") in ("token", "sequence", "geometric")
        if by_ratio and not t.flag(f"{each}.diff_enabled") and t.get(f"{each}.ratio_enabled", True) is True:
            kept.append(each)
        else:
            reason = "responses are rejected by ratio alone, of tokens or responses"
            t.refuse(reason, *(key for key in t.current if key.startswith(f"{each}.")))
    for option, name, default in (
        ("rollout_rs", "agg_type", "token"),
        ("rollout_rs_threshold", "ratio_high", 1.2),
        ("rollout_rs_threshold_lower", "ratio_low", 0.8),
    ):
        if kept:
            values = [t.get(f"{option}.{name}", default) for option in kept]
            unknown = next((value for value in values if isinstance(value, Unresolved)), None)
            keys = [f"{each}.{key}" for each in kept for key in (name, "enabled")]
            t.write(f"{target}.{option}", unknown or (values if len(kept) > 1 else values[0]), *keys)
    t.imply("is off, or has no effect", *(key for key in t.current if not t.is_recorded(key)))


ALGORITHM = (
    joint(_estimator, "adv_estimator whiten_advantages norm_mean_type norm_std_type gamma lambd", always=True),
    joint(
        _loss,
        "pg_clip use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss importance_sampling "
        "entropy_loss_coef loss_agg_mode",
        under(TRAIN, "pg_variant kimi15_tau"),
        always=True,
    ),
    joint(
        _divergence,
        "use_kl_loss kl_loss_coef add_token_level_kl init_kl_coef kl_penalty target_kl kl_horizon",
        always=True,
    ),
)
ALGORITHM_CORRECTION = (joint(_correction, "train_infer_correction.*"),)


_REWARDS = {"MathRuleRewardWorker": "math", "CodeSandboxRewardWorker": "code"}


def _reward(t: Translation) -> None:
    names = list(dict.fromkeys(key.split(".")[1] for key in t.current if key.startswith("rewards.")))
    t.put("nodes.reward.op", "reward")
    workers = {name: str(t.get(f"rewards.{name}.worker_cls", "")).rpartition(".")[2] for name in names}
    known = [name for name in names if workers[name] in _REWARDS]
    chosen = known[0] if known else None
    if chosen:
        t.write("nodes.reward.fn", _REWARDS[workers[chosen]], f"rewards.{chosen}.worker_cls")
    else:
        t.put("nodes.reward.fn", "math")
        key = f"rewards.{names[0]}.worker_cls" if names else "rewards"
        t.note(key, "nodes.reward.fn", "set `fn`, or a node {op: judge} (docs/rewards.md); math stands in")
    for name in names:
        own = [key for key in t.current if key.startswith(f"rewards.{name}.") and not t.is_recorded(key)]
        if name == chosen:
            _query_filter(t, f"rewards.{name}.query_filter_config")
            t.imply("rewards are computed on the host, of all rows", *(key for key in own if not t.is_recorded(key)))
        else:
            several = "rewards of several domains are one function of your own, by `data_source` (docs/rewards.md)"
            t.refuse(several if len(names) > 1 else "a judge is a node {op: judge} (docs/rewards.md)", *own)


def _query_filter(t: Translation, prefix: str) -> None:
    kind = f"{prefix}.type"
    if t.get(kind) == "mean_filter":
        t.write("nodes.keep.op", "filter", kind)
        for name, target in (("threshold_down", "lower"), ("threshold_up", "upper")):
            key = f"{prefix}.filter_args.{name}"
            if t.given(key):
                t.write(f"nodes.keep.{target}", t.get(key), key)
    elif t.get(kind) == "std_filter":
        t.write("nodes.keep.op", "filter", kind)
        key = f"{prefix}.filter_args.std_threshold"
        t.copy(key, "nodes.keep.min_std")


REWARD = (joint(_reward, "rewards.* rewards", always=True),)


def _ahead(t: Translation) -> None:
    ratio = t.number("async_generation_ratio", 0)
    if ratio:
        t.write("schedule.max_staleness", math.ceil(ratio), "async_generation_ratio", note="whole steps")
        t.put("engines.generator.weight_sync.pause", "in_place")
    else:
        t.imply("steps do not overlap, as by default", "async_generation_ratio")


RUN = (
    named("exp_name"),
    joint(_ahead, "async_generation_ratio"),
    to("seed", "run.seed"),
    to("max_steps", "run.steps", write_default=True),
    to("save_steps", "run.save_every", write_default=True),
    joint(lambda t: keep(t, "max_ckpt_to_keep"), "max_ckpt_to_keep", always=True),
    tracked(
        "track_with",
        project="tracker_kwargs.project",
        name="tracker_kwargs.name",
        entity="tracker_kwargs.workspace",
    ),
    to("rpc_timeout", "run.node_timeout_s", convert=float),
)


REST = (
    refused(
        "rewards and advantages are not clipped: an estimator of your own (docs/your_own.md)",
        "reward_clip advantage_clip",
    ),
    refused_unless(False, "a mask of your own leaves them out (docs/migration.md)", "max_len_mask error_max_len_clip"),
    refused_unless(
        False, "groups are replaced, never masked: `nodes.keep` with `lower` and `upper`", "difficulty_mask"
    ),
    refused_unless(
        (False, 0, 0.0, 1, 1.0, None),
        "has no counterpart in the loss",
        "difficulty_loss_weight length_loss_weight use_topr_neg_loss_coef rl_loss_coef reward_shift reward_scale",
    ),
    refused("is the `weight` of a source in `data.train`", "*.domain_interleave_probs* *.interleave_probs"),
    refused_unless(1, "samples are drawn, without beams", "*.num_beams"),
    refused(
        "environments and agents are classes of your own (docs/multi_turn.md)",
        "custom_envs* *env_manager* *_env_* env_* max_tokens_per_step max_actions_per_traj "
        "reward_normalization* *.max_env_num_per_worker",
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", "profiler_* *profiler*"),
    implied(
        "follows from the pipeline and the model",
        "*.model_args.* *.data_args.* *.training_args.* *.world_size *.worker_cls *.use_remove_padding "
        "*.offload_nccl *.generating_args.* *.system_envs* *.name global_template "
        "difficulty_low_threshold difficulty_high_threshold val_* *old_logprobs_recompute "
        "model_download_type reward_model*",
    ),
    implied("`sleep: auto` offloads while another engine of the group works", "offload_*"),
    implied(
        "is `dagrl run --run-dir DIR`",
        "output_dir logging_dir checkpoint_config* rollout_dump_dir resume_from_checkpoint",
    ),
    refused("trackers read their own environment", "tracker_kwargs*"),
    implied(
        "belongs to the launch",
        "hydra* defaults* logging_steps system_envs* generate_opt_level is_num_return_sequences_expand "
        "max_running_requests rollout_mock*",
    ),
)
