"""slime's advantages, loss, critic, divergence and correction."""

from __future__ import annotations

from dagrl.importing.engines import NO_CRITIC, put_critic
from dagrl.importing.parts import put_critic_nodes, put_logprob, put_node, put_reference
from dagrl.importing.slime.common import uses_critic
from dagrl.importing.table import Translation, joint

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
    if t.flag("--use-rollout-logprobs"):
        t.refuse_all("the loss has the ratio to the generator already, with `--use-rollout-logprobs`")
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


RULES = (
    joint(
        _estimator,
        "--advantage-estimator --disable-grpo-std-normalization --normalize-advantages --gamma --lambd",
        always=True,
    ),
    joint(_loss, "--eps-clip --eps-clip-high --eps-clip-c --entropy-coef --calculate-per-token-loss", always=True),
    joint(_critic, "--critic-lr --critic-load --critic-save --value-clip --num-critic-only-steps", always=True),
    joint(
        _divergence,
        "--use-kl-loss --kl-loss-coef --kl-loss-type --kl-coef --use-unbiased-kl --use-rollout-logprobs",
        always=True,
    ),
)
CORRECTION = (joint(_correction, "--use-tis --tis-clip --tis-clip-low --tis-level --custom-tis-function-path"),)
