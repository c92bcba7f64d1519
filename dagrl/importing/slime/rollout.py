"""slime's ``--rollout-*``, ``--eval-*`` and ``--sglang-*``: the generator and its node."""

from __future__ import annotations

from dagrl.importing.engines import library_field, put_generator
from dagrl.importing.parts import data_file, is_known, put_node, write_val_n
from dagrl.importing.settings import Unresolved
from dagrl.importing.slime.common import function_name, validates
from dagrl.importing.table import Translation, joint, to

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
        note = "convert it once (docs/data.md)" if data_file(path) != path else ""
        t.write(target, data_file(path), files, note=note)
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


RULES = (
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
