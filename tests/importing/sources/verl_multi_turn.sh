# Multi-turn GRPO with tools, in SGLang, from a configuration of its own.
ulimit -n 65535
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$(dirname "$0")"

function now() { date '+%d-%H-%M'; }

main() {
    local experiment="qwen3-4b-$1"
    python3 -m verl.trainer.main_ppo \
        --config-path="$CONFIG_PATH" \
        --config-name='verl_multi_turn_config' \
        algorithm.adv_estimator=grpo \
        algorithm.rollout_correction.rollout_rs=token_k1 \
        algorithm.rollout_correction.rollout_rs_threshold=0.2_4.0 \
        algorithm.rollout_correction.bypass_mode=True \
        data.train_batch_size=64 \
        actor_rollout_ref.model.path=Qwen/Qwen3-4B \
        actor_rollout_ref.actor.optim.lr=1e-6 \
        actor_rollout_ref.actor.ppo_mini_batch_size=64 \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
        actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov \
        actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/tools.yaml" \
        trainer.experiment_name="$experiment" \
        trainer.total_training_steps=${STEPS:-100} \
        "${@:2}"
}

main tool "$@"
