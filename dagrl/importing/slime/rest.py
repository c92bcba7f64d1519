"""slime's arguments that have no counterpart, or need none."""

from __future__ import annotations

from dagrl.importing.table import implied, refused, refused_unless

RULES = (
    implied("is `dagrl run --run-dir DIR`", "--save", "--save-hf", "--dump-details", "--save-debug-*"),
    implied("chats go through the tokenizer's chat template", "--apply-chat-template"),
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
    refused(
        "fp8 training is `transformer.fp8` of the engine, and other formats are not built in (docs/fp8.md)",
        "--fp8-*",
        "--transformer-impl",
        "--fp4-*",
    ),
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
