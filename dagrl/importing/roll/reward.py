"""ROLL's ``rewards``: the reward, and the filter of queries."""

from __future__ import annotations

from dagrl.importing.table import Translation, joint

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


RULES = (joint(_reward, "rewards.* rewards", always=True),)
