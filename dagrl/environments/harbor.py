"""Tasks of Harbor, such as those of terminal-bench: an episode is one trial with an agent of Harbor's.

The trial's own folder is temporary. Harbor stops its containers, also if the episode is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.environments.failures import EnvironmentFailedError, FailureClass

if TYPE_CHECKING:
    from harbor.models.trial.config import AgentConfig, TaskConfig
    from harbor.models.trial.result import ExceptionInfo, StepResult, TrialResult

_LOCAL = "dagrl.environments.harbor_local:LocalEnvironment"


class Harbor:
    """Runs the task that a row names."""

    requires = ("harbor",)

    def __init__(
        self,
        *,
        tasks: str | None = None,
        dataset: str | None = None,
        agent: str | Mapping[str, Any] = "terminus-2",
        environment: str | Mapping[str, Any] = "docker",
        **trial: Any,
    ) -> None:
        """`tasks` is a folder of tasks, or `dataset` one of its data sets, ``NAME@VERSION``. `agent` and `environment`
        are names of Harbor, or sections of its TrialConfig, whose other fields are `trial`.
        """
        # litellm would fetch a table of prices.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        from harbor.agents.factory import AgentFactory
        from harbor.agents.terminus_2 import Terminus2
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
        from harbor.trial.trial import Trial

        if (tasks is None) == (dataset is None):
            raise ValueError("Harbor needs either `tasks`, a folder, or `dataset`, such as terminal-bench@2.0")
        self._folder = None if tasks is None else Path(tasks).expanduser().resolve()
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"`tasks`: there is no folder {self._folder}")
        self._dataset = dataset
        # Only the reward leaves the environment: the policy may write as much as it likes into its folders of logs.
        agents = {"include_logs": ["no logs"], **({"name": agent} if isinstance(agent, str) else agent)}
        trial["verifier"] = {"include_logs": ["no logs"], **trial.get("verifier", {})}
        trial.setdefault("artifacts", [{"source": "/logs/artifacts", "exclude": ["*"]}])
        machines: dict[str, Any] = {"type": environment} if isinstance(environment, str) else {**environment}
        if machines.get("type") == "local":
            machines |= {"type": None, "import_path": _LOCAL}
        if machines.get("type") in ("docker", "podman"):
            # Containers are removed in any case: this keeps the image for the next episode.
            machines.setdefault("delete", False)
        sections: list[tuple[str, Mapping[str, Any], Any]] = [
            ("agent", agents, AgentConfig),
            ("environment", machines, EnvironmentConfig),
            ("args", trial, TrialConfig),
        ]
        for place, fields, model in sections:
            if unknown := fields.keys() - model.model_fields.keys():
                raise ValueError(f"{place}: Harbor has no field {', '.join(sorted(unknown))}")
        task = TaskConfig(path=self._folder or Path())
        self._config = TrialConfig(task=task, agent=agents, environment=machines, **trial)
        self._create = Trial.create
        agent_class = AgentFactory.get_agent_class_from_config(self._config.agent)
        self._has_url, self._is_terminus = agent_class.MODEL_CONNECTION is not None, issubclass(agent_class, Terminus2)
        try:
            EnvironmentFactory.run_preflight(
                self._config.environment.type, self._config.environment.import_path, self._config.environment.kwargs
            )
        except (ImportError, SystemExit) as error:
            raise ValueError(str(error)) from error
        self._process, self._trials = uuid.uuid4().hex[:8], dict[int, asyncio.Task[Any] | None]()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tasks of the folder or the data set, which is downloaded."""
        from harbor.models.task.task import Task
        from harbor.tasks.client import TaskClient

        tasks = self._tasks()
        downloads = asyncio.run(TaskClient().download_tasks([task.get_task_id() for task in tasks])).results
        for given, download in zip(tasks, downloads, strict=True):
            task = Task(download.path)
            instruction = task.instruction
            if task.config.steps:
                instruction = task.paths.step_instruction_path(task.config.steps[0].name).read_text()
            named = given.model_dump(
                mode="json", include={"path", "git_url", "git_commit_id", "name", "ref"}, exclude_none=True
            )
            if self._folder is not None:
                named["path"] = str(download.path.relative_to(self._folder))
            yield {
                "prompt": [{"role": "user", "content": instruction}],
                "answer": "",
                "data_source": f"harbor/{self._dataset or Path(str(self._folder)).name}",
                "extra_info": {"task": named},
            }

    async def solve(self, client: Any, row: Mapping[str, Any]) -> dict[str, float] | None:
        """Run the row's task. Returns the verifier's rewards, of which one is named ``reward``, or the only one."""
        folder = Path(tempfile.mkdtemp(prefix="dagrl-harbor-"))
        # Names are used again: loggers of Harbor have them, and are never deleted.
        number = next(number for number in range(len(self._trials) + 1) if number not in self._trials)
        self._trials[number] = asyncio.current_task()
        named = {"trials_dir": folder, "trial_name": f"dagrl-{self._process}-{number}"}
        try:
            config = self._config.model_copy(
                update={**named, "task": self._task(row), "agent": self._connected(client)}
            )
            trial = await self._create(config)
            return self._rewards(await trial.run())
        finally:
            del self._trials[number]
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def close(self) -> None:
        """Cancel the trials, which removes their containers."""
        tasks = [task for task in self._trials.values() if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _tasks(self) -> list[TaskConfig]:
        from harbor.models.job.config import DatasetConfig
        from harbor.models.trial.config import TaskConfig

        if self._folder is None:
            name, _, version = str(self._dataset).partition("@")
            return asyncio.run(DatasetConfig(name=name, version=version or None).get_task_configs())
        found = sorted(path.parent for path in self._folder.rglob("task.toml"))
        if not found:
            raise ValueError(f"`tasks`: {self._folder} has no folders with a task.toml")
        return [TaskConfig(path=folder) for folder in found]

    def _task(self, row: Mapping[str, Any]) -> TaskConfig:
        from harbor.models.trial.config import TaskConfig

        named = (row.get("extra_info") or {}).get("task")
        if not isinstance(named, Mapping):
            raise ValueError("the row names no task: write the data file with `dagrl data environment harbor`")
        named = {field: value for field, value in named.items() if value is not None}
        if self._folder is not None:
            named["path"] = self._folder / named["path"]
        return TaskConfig(**named)

    def _connected(self, client: Any) -> AgentConfig:
        """The agent, with the sample's endpoint."""
        agent, url, key = self._config.agent, str(client.base_url).rstrip("/"), str(client.api_key)
        changed: dict[str, Any] = {"model_name": agent.model_name or "openai/policy"}
        if self._is_terminus:
            # Not as variables, which it sets in the policy's terminal.
            changed["kwargs"] = {**agent.kwargs, "llm_kwargs": {**agent.kwargs.get("llm_kwargs", {}), "api_key": key}}
        else:
            changed["env"] = {**agent.env, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        if self._has_url:
            changed["base_url"] = url
        return agent.model_copy(update=changed)

    def _rewards(self, result: TrialResult) -> dict[str, float] | None:
        """The rewards of a trial. Raises EnvironmentFailedError if something else than the policy failed."""
        for part in (result, *(result.step_results or [])):
            failure = part.exception_info
            if failure is not None and not _is_of_policy(failure):
                raise EnvironmentFailedError(_class_of(failure, part), _said(failure))
        if self._config.verifier.disable:
            return None
        rewards = result.verifier_result.rewards if result.verifier_result is not None else None
        if not rewards:
            raise EnvironmentFailedError("grader", "Harbor's verifier has given no reward")
        rewards = dict(rewards)
        if len(rewards) == 1:
            rewards = {"reward": next(iter(rewards.values()))}
        if "reward" not in rewards:
            raise EnvironmentFailedError(
                "grader", f"none of the verifier's rewards is `reward`: {', '.join(rewards)[:200]}"
            )
        return rewards


def _is_of_policy(failure: ExceptionInfo) -> bool:
    """Whether the reward of the verifier counts nevertheless, such as after the agent's time has ended."""
    from harbor.models.trial.error_policy import ERROR_POLICIES

    known = failure.exception_type in ERROR_POLICIES or failure.policy_override is not None
    return known and failure.policy.has_valid_reward


def _class_of(failure: ExceptionInfo, part: TrialResult | StepResult) -> FailureClass:
    from harbor.models.trial.error_policy import ERROR_POLICIES

    if part.verifier is not None and part.verifier.started_at <= failure.occurred_at:
        return "grader"
    if part.agent_execution is None:
        return "start"
    if failure.exception_type in ERROR_POLICIES and failure.policy in (
        ERROR_POLICIES[name] for name in ("APIError", "BadRequestError", "AuthenticationError")
    ):
        return "network"
    timed_out = failure.exception_type == "TimeoutError" or "timed out" in failure.exception_message
    return "timeout" if timed_out else "exec"


def _said(failure: ExceptionInfo) -> str:
    """One line: its beginning and, of long outputs of programs, the end, which has the cause."""
    text = " ".join(failure.exception_message.split())
    text = text if len(text) <= 500 else f"{text[:150]} ... {text[-350:]}"
    return f"{failure.exception_type}: {text}"
