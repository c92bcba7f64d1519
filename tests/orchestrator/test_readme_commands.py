"""Every command of README and docs: those of README run in order in one folder, as a newcomer types them.

A command that cannot run here is in `NOT_HERE` with the reason; its arguments are parsed all the same, and a pipeline
that it names and that is there has a graph. A command that is new on a page fails here until it is in one of both.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from browser import browsing, opened, served
from safetensors.numpy import load_file
from typer.main import get_command

from dagrl.cli import app, main
from dagrl.reporting.server import Runs

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SHELL = re.compile(r"(?:\w+=\S+ )*(?:dagrl|python|make|source|hf|sbatch|nsys|docker|pip|ray|git) .*")
RUN_TIMEOUT_S = 600


def commands(page: Path) -> list[str]:
    """Shell commands of a page's blocks, in order, without comments; in transcripts, the text after ``$``."""
    text = page.read_text()
    plain = re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)
    fenced = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    blocks = [block for language, block in fenced if language in ("", "bash", "sh", "shell", "console")]
    lines = [line[4:] for line in plain.splitlines() if line.startswith("    ")]
    lines += [line for block in blocks for line in block.splitlines()]
    found = []
    for line in lines:
        line = re.sub(r"\s+#.*", "", line.removeprefix("$ ")).strip()
        if SHELL.fullmatch(line) and not line.startswith("dagrl plan: "):
            found.append(line)
    return found


# -- what each command of README must leave behind


def steps(count: int) -> Callable[[Path, str], None]:
    def check(folder: Path, out: str) -> None:
        metrics = [json.loads(line) for line in (folder / "runs/first/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in metrics if line["step"]] == list(range(1, count + 1))
        assert f"finished step {count} in " in out and "reward/mean " in out
        rewards = [line["reward/mean"] for line in metrics if "reward/mean" in line]
        assert rewards[0] < 0.05 and rewards[-1] > 0.3

    return check


def says(*fragments: str) -> Callable[[Path, str], None]:
    def check(folder: Path, out: str) -> None:
        assert [each for each in fragments if each not in out] == [], out

    return check


def is_hf_folder(name: str, step: int | None = None) -> Callable[[Path, str], None]:
    def check(folder: Path, out: str) -> None:
        assert json.loads((folder / name / "config.json").read_text())["model_type"] == "qwen3"
        assert (folder / name / "tokenizer.json").is_file()
        assert load_file(folder / name / "model.safetensors")["model.embed_tokens.weight"].shape[1] == 64
        assert step is None or f"actor after step {step} of runs/first" in out

    return check


def is_as_before_its_conversion(folder: Path, out: str) -> None:
    before, after = (load_file(folder / name / "model.safetensors") for name in ("Qwen3-8B", "Qwen3-8B-hf"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def is_a_plan_beside_a_run(folder: Path, out: str) -> None:
    assert "60 of 60 steps" in out and "planned / actual" in out and "best checkpoint: step_" in out
    assert json.loads((folder / "runs/first/timeline_planned.json").read_text())


def is_seen_in_a_browser(folder: Path, out: str) -> None:
    """The report and the live page of a real run have the figures of its metrics."""
    run = folder / "runs/first"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with browsing() as browser, served(Runs([folder / "runs"])) as port:
        for address in (run / "report.html", f"http://127.0.0.1:{port}/"):
            with opened(browser, address) as seen:
                assert seen.text(".card").split("\n\n") == ["Steps", "60 of 60", "finished"]
                reward = seen.text(".card:has-text('reward/mean')").split("\n\n")
                assert reward[0] == "reward/mean" and float(reward[1]) == pytest.approx(last["reward/mean"], rel=1e-3)
                seen.show("steps?step=60")
                seen.wait_for("[aria-label='Time by node']", "rollout")
                seen.wait_for("[aria-label='Idle time by cause']", "rollout (generator)")
                seen.show("samples?step=60")
                first = pq.read_table(run / "samples/step_60.parquet").to_pylist()[0]
                assert first["response"] in seen.text(".bubble.policy")
                seen.show("validation")
                seen.wait_for("[aria-label=Validations]", "reward/mean")
                assert seen.errors == []


def has_prompts(folder: Path, out: str) -> None:
    assert pq.read_table(folder / "data/gsm8k/train.parquet").num_rows == 38


CHECKS: dict[str, Callable[[Path, str], None]] = {
    "dagrl validate first.yaml": says("first.yaml: first is valid"),
    "dagrl graph first.yaml": says("stage 0", "update  (update on actor)"),
    "dagrl plan first.yaml": says("first.yaml: first, ", "a step: "),
    "dagrl run first.yaml --dry-run": says("runs/first: the run begins", "nothing was started or written"),
    "dagrl run first.yaml": steps(40),
    "dagrl run first.yaml run.steps=60": steps(60),
    "dagrl report runs/first --timeline": is_a_plan_beside_a_run,
    "dagrl report runs/first --html": is_seen_in_a_browser,
    "dagrl why runs/first": says("critical path", "update", "as it is"),
    "dagrl agent try tiny_agent --row 3": says("turn 1 of the policy", "reward "),
    "dagrl doctor": says("processor", "0 missing"),
    "dagrl templates": says("tiny_grpo ", "qwen3_8b_lora "),
    "dagrl init sums --template tiny_grpo": says("sums/pipeline.yaml\n", "sums/test_rewards.py\n"),
    "python data_preprocess/gsm8k.py --local_dir data/gsm8k": has_prompts,
    "dagrl run dag_templates/tiny_gsm8k.yaml": says("tiny-gsm8k is valid", "(38 prompts)"),
    "dagrl export runs/first -o first-hf": is_hf_folder("first-hf", 60),
    "dagrl export runs/first -o first-20-hf --step 20 --engine actor": is_hf_folder("first-20-hf", 20),
    "dagrl export runs/first -o first-best-hf --best": is_hf_folder("first-best-hf"),
    "dagrl convert Qwen3-8B -o Qwen3-8B-mcore --to megatron": lambda folder, out: None,
    "dagrl convert Qwen3-8B-mcore -o Qwen3-8B-hf --to hf --model Qwen3-8B": is_as_before_its_conversion,
}
"""Command of README -> what must hold after it. All exit with 0 and write nothing to stderr."""

INSTEAD = {
    # The hub cannot be reached; the comment after the command names the offline alternative.
    "python data_preprocess/gsm8k.py --local_dir data/gsm8k": (
        "python data_preprocess/gsm8k.py --local_dir data/gsm8k --source originals"
    ),
    # Takes half a minute, and tests/orchestrator/test_real_data.py runs it: here it is held against the data just made.
    "dagrl run dag_templates/tiny_gsm8k.yaml": "dagrl validate dag_templates/tiny_gsm8k.yaml",
}
"""Commands that are typed in another form here."""


@dataclass(frozen=True)
class NotHere:
    """Why a command is not run."""

    reason: str


NETWORK = NotHere("needs a network")
HUB = NotHere("tests/config/loading/test_hub.py calls the like of it")
GPUS = NotHere("needs GPUs and a model of several gigabytes")
SEVERAL = NotHere("needs several machines; tests/launcher runs it in namespaces of one")
SYNTAX = NotHere("shows the form of a call")
SETUP = NotHere("sets up or tests the repository that this test is a part of")
NOT_HERE: dict[str, NotHere] = {
    'dagrl data environment my_tasks:Tasks --python envs/tasks/bin/python --args \'{"split": "train"}\' '
    "--out data/tasks.parquet": NotHere("tests/cli/test_data.py calls it with an environment"),
    'dagrl data environment nemo_gym --args \'{"data": "tasks.jsonl"}\' --out data/tasks.parquet': NotHere(
        "tests/orchestrator/test_environment_servers.py calls it with tasks"
    ),
    'dagrl data environment verifiers --python envs/verifiers/bin/python --args \'{"taskset": {"id": "my-taskset"}}\' '
    "--out data/tasks.parquet": NotHere("tests/orchestrator/test_environments.py calls it with a taskset"),
    "dagrl data environment harbor --python envs/harbor/bin/python "
    '--args \'{"tasks": "/data/my-tasks", "environment": "local"}\' '
    "--out data/tasks.parquet": NotHere("tests/orchestrator/test_harbor.py calls it with a folder of tasks"),
    **dict.fromkeys(
        ("dagrl doctor model ~/models/Qwen3-8B", "dagrl doctor model ~/models/granite-4"),
        NotHere("tests/doctor/test_model.py calls it with other folders"),
    ),
    **dict.fromkeys(
        (
            "make demo",
            "make docs",
            "make test",
            "make setup",
            "make vllm",
            "make sglang-next",
            "make lint",
            "make format",
        ),
        SETUP,
    ),
    "dagrl templates grpo": NotHere("tests/cli/test_init.py prints templates"),
    "dagrl data gsm8k --local_dir data/gsm8k": NotHere("tests/test_wheel.py calls it"),
    "dagrl run pipeline.yaml --dry-run": NotHere("is README's with another file"),
    "dagrl run pipeline.yaml -v": NotHere("tests/tracking/test_console.py prints metrics"),
    "dagrl run pipeline.yaml -q": NotHere("tests/test_wheel.py runs the notebook so"),
    "dagrl --install-completion": SYNTAX,
    "dagrl import SCRIPT [ARGUMENT...] [-o pipeline.yaml] [--set NAME=VALUE] [--from NAME] [--json]": SYNTAX,
    **dict.fromkeys(
        ("dagrl import run_verl.sh", "dagrl import run_grpo.sh", "dagrl import run_grpo.sh -o pipeline.yaml"),
        NotHere("needs a script of another framework; tests/importing has some"),
    ),
    "dagrl plan pipeline.yaml [key=value ...] --from RUN [--search ...]": SYNTAX,
    "dagrl plan small.yaml nodes.rollout.n=64 --from runs/small": NotHere(
        "takes the times of a run; tests/reporting/test_measured_run.py has those of two"
    ),
    "pip install 'dagrl[notebook]'": NETWORK,
    "dagrl ui runs": NotHere("serves until it is stopped; `is_seen_in_a_browser` asks its server"),
    "source .venv/bin/activate": NotHere("is done: the commands run with this environment's programs"),
    "dagrl graph dag_templates/multi_agent.yaml": NotHere("its graph is drawn for all commands that are not run"),
    "dagrl run dag_templates/multi_agent.yaml": NotHere(
        "takes a minute; tests/orchestrator/test_agents.py runs agents"
    ),
    "python data_preprocess/gsm8k.py --local_dir data/gsm8k --hub modelscope": NETWORK,
    "python data_preprocess/gsm8k.py --local_dir data/gsm8k --source originals/": NotHere("is what README's runs as"),
    "PET_NNODES=2 PET_NODE_RANK=0 PET_MASTER_ADDR=10.0.0.1 dagrl launch pipeline.yaml run.steps=100": SEVERAL,
    "PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=10.0.0.1 dagrl launch pipeline.yaml run.steps=100": SEVERAL,
    "PET_NNODES=2:9 PET_NODE_RANK=5 PET_MASTER_ADDR=10.0.0.1 dagrl launch pipeline.yaml": SEVERAL,
    "dagrl launch pipeline.yaml groups.train.nodes=$PET_NNODES": SEVERAL,
    "dagrl plan pipeline.yaml [key=value ...] [--gpu NAME] [--prompt-tokens N] [--response-tokens N] [--json]": SYNTAX,
    "dagrl plan pipeline.yaml --search [--gpus N | --nodes N --gpus-per-node M] [--gpu NAME] [--top 5]": SYNTAX,
    "dagrl plan dag_templates/qwen3_8b_megatron.yaml --gpu A100-40GB": NotHere(
        "needs the model's config; tests/planner"
    ),
    "dagrl plan dag_templates/qwen3_8b_megatron.yaml --gpu H200": NotHere("needs the model's config; tests/planner"),
    "dagrl plan dag_templates/qwen3_8b_megatron.yaml --search --gpus 16 --gpu H200": NotHere("as above"),
    "nsys profile --trace-fork-before-exec=true --capture-range=cudaProfilerApi --capture-range-end=repeat "
    "dagrl run FILE": GPUS,
    "dagrl validate try.yaml": NotHere("tests/test_docs.py draws the graph of what the page shows"),
    "dagrl run try.yaml run.steps=60": NotHere(
        "takes a minute; tests/orchestrator/test_recipes.py runs the recipe on `tiny`"
    ),
    "dagrl plan grpo model.path=Qwen/Qwen3-30B-A3B --gpu H200": HUB,
    "dagrl run grpo model.path=Qwen/Qwen3-8B": GPUS,
    "dagrl plan dag_templates/grpo.yaml model.path=Qwen/Qwen3-1.7B groups.devices.gpus_per_node=1 --gpu H100": HUB,
    "dagrl run dag_templates/grpo.yaml model.path=Qwen/Qwen3-1.7B groups.devices.gpus_per_node=1 run.steps=5": GPUS,
    "dagrl run dag_templates/tiny_vllm.yaml": NotHere("tests/orchestrator/test_vllm.py runs it, and kills its server"),
    "dagrl run dag_templates/grpo.yaml": GPUS,
    "dagrl run dag_templates/tiny_images.yaml": NotHere(
        "takes a minute; tests/orchestrator/test_images.py runs the recipe for some steps"
    ),
    'python data_preprocess/games.py --game FrozenLake-v1 --options \'{"render_mode": "ansi"}\' --local_dir data/lake '
    '--rules "Answer with a number: 0 left, 1 down, 2 right, 3 up."': NotHere("tests/data_preprocess/test_games.py"),
    "sbatch --nodes=8 --gpus-per-node=8 launch/slurm.sh eight.yaml": SEVERAL,
    "dagrl export RUN -o DIR --best": SYNTAX,
    "dagrl report RUN --html": SYNTAX,
    "dagrl ui [RUN ...]": SYNTAX,
    "dagrl agent try pipeline.yaml --row 3": SYNTAX,
    "dagrl why RUN [--step N] [--json]": SYNTAX,
    "dagrl replay RUN --step 12 --node update": NotHere("tests/orchestrator/test_offline.py replays"),
    "dagrl replay RUN --step 12": NotHere("tests/orchestrator/test_ppo.py replays"),
    "dagrl diff RUN1 RUN2": NotHere("tests/orchestrator/test_offline.py compares runs"),
    "dagrl why runs/slow": NotHere("tests/reporting/why explains such a run"),
    "dagrl data word_problems --local_dir data/word_problems": NotHere(
        "tests/data_preprocess/test_word_problems.py writes the questions"
    ),
    "dagrl run smollm2_sft && dagrl run smollm2_grpo": GPUS,
    "dagrl run pipeline.yaml run.stop_after=3h45m || { [ $? = 4 ] && sbatch --dependency=singleton job.sh; }": NotHere(
        "needs Slurm; tests/orchestrator/test_sampling_only.py reads the exit code"
    ),
    **dict.fromkeys(
        (
            "dagrl run pipeline.yaml run.val_only=true",
            "dagrl run pipeline.yaml run.val_only=20",
            "dagrl run pipeline.yaml run.val_only=true --run-dir runs/base",
            "dagrl run pipeline.yaml run.val_only=true --run-dir runs/first-hf model.path=first-hf",
        ),
        NotHere("tests/orchestrator/test_validation_alone.py validates checkpoints, models and exports"),
    ),
    **dict.fromkeys(
        (
            "dagrl eval runs/first",
            "dagrl eval runs/first --steps 10,20",
            "dagrl eval runs/first --steps 10,20,best",
            "dagrl eval pipeline.yaml --data data/aime/test.parquet --n 16",
            "dagrl eval Qwen/Qwen3-0.6B runs/first --data data/gsm8k/test.parquet",
            "dagrl eval runs/first --env my_tasks:Tasks --python envs/tasks/bin/python",
            "dagrl eval --endpoint http://127.0.0.1:8000/v1 --model qwen --data data/aime/test.parquet",
        ),
        NotHere("tests/orchestrator/test_validation.py evaluates a checkpoint and a model"),
    ),
    "dagrl data stats FILE ... --val FILE": SYNTAX,
    "dagrl data stats data/gsm8k/train.parquet --val data/gsm8k/test.parquet": NotHere(
        "tests/cli/test_data.py calls it"
    ),
    **dict.fromkeys(
        (
            "dagrl run pipeline.yaml --only rollout,reward",
            "dagrl run pipeline.yaml --only rollout,reward --explorer 1/2",
            "dagrl run pipeline.yaml --only rollout,reward --explorer 1/3",
            "dagrl run pipeline.yaml --only rollout,reward --explorer 2/3",
            "dagrl run pipeline.yaml --only rollout,reward --explorer 3/3",
            "dagrl run pipeline.yaml --only advantage,update",
            "dagrl run later.yaml --only advantage,update --experience runs/first/experience schedule.weights_every=0",
        ),
        NotHere("tests/orchestrator/test_explore_train.py runs the parts of a pipeline"),
    ),
    "dagrl graph pipeline.yaml --only advantage,update": NotHere("tests/graph/test_cut.py draws parts"),
    "dagrl validate experience.yaml": NotHere("tests/test_experience.py validates it"),
    "dagrl graph experience.yaml": NotHere("tests/test_experience.py validates it"),
    "dagrl validate own.yaml": NotHere("tests/test_your_own.py validates it"),
    "dagrl run own.yaml": NotHere("tests/orchestrator/test_your_own.py runs code of every kind"),
}


def test_every_command_of_every_page_is_run_here_or_says_why_not() -> None:
    found = [(page.name, command) for page in PAGES for command in commands(page)]
    assert [each for each in found if each[1] not in CHECKS and each[1] not in NOT_HERE] == []
    shown = {command for _, command in found}
    assert [command for command in (*CHECKS, *NOT_HERE) if command not in shown] == [], "no page shows these any more"
    first = dict.fromkeys(command for command in commands(REPOSITORY / "README.md") if command not in NOT_HERE)
    assert list(first) == list(CHECKS), "README's commands run in README's order"


PARSED = [command for command, why in NOT_HERE.items() if "dagrl " in command and why is not SYNTAX]


@pytest.mark.parametrize("command", PARSED)
def test_commands_that_are_not_run_have_known_arguments(command: str, capsys) -> None:
    words = shlex.split(re.split(r" (?:&&|\|\|) ", command)[0])
    name, *arguments = words[words.index("dagrl") + 1 :]
    options = get_command(app).commands[name].make_context(name, arguments).params
    pipeline = REPOSITORY / str(options.get("pipeline", ""))
    if pipeline.is_file():
        assert main(["graph", str(pipeline), *(options["overrides"] or [])]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [command for command in NOT_HERE if command.startswith("make ")])
def test_makes_targets_exist(command: str) -> None:
    done = subprocess.run([*command.split(), "--dry-run"], cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [command for command in NOT_HERE if command.startswith("python ")])
def test_scripts_know_the_options_that_pages_give_them(command: str) -> None:
    _, script, *words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert [word for word in words if word.startswith("--") and word not in done.stdout] == []


# -- README's, in order


class Newcomer:
    """Types README's commands in a folder with the repository's files and the files that README asks to save there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ahead = list(CHECKS)
        for name in ("dag_templates", "data_preprocess"):
            shutil.copytree(REPOSITORY / name, folder / name)
        for name, text in re.findall(r"`([\w.]+)`[^`]*?:\n\n```(?:yaml|python)\n(.*?)```", README, re.DOTALL):
            (folder / name).write_text(text)
        rows = [
            {"question": f"Ann has {n} apples and buys {n} more. How many has she?", "answer": f"She has\n#### {2 * n}"}
            for n in range(2, 40)
        ]
        (folder / "originals").mkdir()
        for name in ("train.jsonl", "test.jsonl"):
            (folder / "originals" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def come_to(self, command: str) -> str:
        """Output of a command, after all earlier ones; it exits with 0 and an empty stderr."""
        out = ""
        while command in self._ahead:
            out = self._play(self._ahead.pop(0))
        return out

    def _play(self, command: str) -> str:
        if command.startswith("dagrl convert Qwen3-8B "):
            # As a stand-in for eight billion parameters: what was exported before is a Qwen3, too.
            shutil.copytree(self.folder / "first-hf", self.folder / "Qwen3-8B")
        done = self.call(INSTEAD.get(command, command))
        assert (done.returncode, done.stderr) == (0, ""), f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def call(self, command: str) -> subprocess.CompletedProcess[str]:
        """Type a command into a shell that finds this environment's programs first."""
        variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        return subprocess.run(
            ["/bin/sh", "-c", command], cwd=self.folder, env=variables, capture_output=True, text=True,
            timeout=RUN_TIMEOUT_S,
        )  # fmt: skip


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    return Newcomer(tmp_path_factory.mktemp("newcomer"))


@pytest.mark.parametrize("command", CHECKS)
def test_readme_works_in_order_in_one_folder(newcomer: Newcomer, command: str) -> None:
    out = newcomer.come_to(command)
    CHECKS[command](newcomer.folder, out)
    if written := re.search(r" -o (\S+)", command):
        assert any((newcomer.folder / written[1]).iterdir())


def test_readme_names_the_files_that_it_shows(newcomer: Newcomer) -> None:
    assert (newcomer.folder / "first.yaml").is_file() and (newcomer.folder / "my_rewards.py").is_file()


@pytest.mark.parametrize("name", ["dag.svg", "dag.png", "dag.mmd"])
def test_a_graph_is_drawn_as_readme_says(newcomer: Newcomer, name: str) -> None:
    assert newcomer.call(f"dagrl graph first.yaml -o {name}").returncode == 0
    assert (newcomer.folder / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("data/gsm8k/train.parquet", True),
        ("runs/first/metrics.jsonl", True),
        ("evals/first/evaluation.json", True),
        *((f"{name}/config.json", True) for name in ("first-hf", "first-20-hf", "Qwen3-8B-mcore", "Qwen3-8B-hf")),
        ("data_preprocess/gsm8k.py", False),
        ("dagrl/data/batch.py", False),
        ("tests/data/test_batch.py", False),
        ("dag_templates/data/addition/train.parquet", False),
        ("dagrl/backends/hf/engine.py", False),
    ],
)
def test_git_ignores_what_commands_write_and_nothing_else(path: str, ignored: bool) -> None:
    asked = ["git", "check-ignore", "--quiet", "--no-index", path]
    assert (subprocess.run(asked, cwd=REPOSITORY).returncode == 0) is ignored
