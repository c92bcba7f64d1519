"""Endpoint, program and chat template of an agent rollout, made once for a worker."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.backends.tool_calls import Parser
from dagrl.config.schema import AgentSpec, RewardNode
from dagrl.data.batch import Batch
from dagrl.ops.agents.context_writer import ContextWriter
from dagrl.ops.agents.function_processes import FunctionProcesses
from dagrl.ops.agents.gateway import Gateway
from dagrl.ops.agents.messages import ImageReader, RowImages
from dagrl.ops.agents.programs import CommandProgram, Program, SandboxedProgram, ServiceProgram
from dagrl.ops.agents.rows import ScoreGroup
from dagrl.ops.base import Context
from dagrl.ops.turns.settings import parser_of, policy_images
from dagrl.plugins.agent import NamedAgent

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """State shared by the trajectories of a node."""

    spec: AgentSpec
    gateway: Gateway
    program: Program
    writer: ContextWriter
    reader: ImageReader
    parser: Callable[[Sequence[dict[str, object]]], Parser]
    """From the tools of a request to the parser of calls."""
    needs_reward: bool
    score: ScoreGroup | None
    """Scores a group, if its trajectories are scored together."""
    slots: asyncio.Semaphore
    """One slot for each program that may run; used only on the endpoint's loop."""


def load_program(spec: AgentSpec, folder: Path | None, label: str | None = None) -> Program:
    """The program of a node. `label` is that of its sandboxes."""
    if spec.function is not None or spec.environment is not None:
        return FunctionProcesses(NamedAgent.of(spec, folder), spec.python, label)
    if spec.command is not None and spec.sandbox:
        return SandboxedProgram(spec, folder or Path.cwd())
    if spec.command is not None:
        return CommandProgram(spec.command, spec.env, folder or Path.cwd())
    assert spec.url is not None, "one of the four is set"
    return ServiceProgram(spec.url)


def agent_setup(context: Context) -> AgentSetup:
    """The setup of the context's rollout. Raises ValueError if its agent cannot be loaded."""
    node, resources = context.rollout, context.resources
    spec = node.agent_spec
    assert spec is not None
    vision = policy_images(context)
    host = _LOOPBACK if spec.listen == "loopback" else _node_address()

    def make() -> AgentSetup:
        label = None
        if spec.sandbox_spec is not None:
            label = _label(resources.run_dir / "sandboxes" / f"{node.engine}-{context.sampled_by}-{resources.rank}")
        program = load_program(spec, resources.folder, label)
        score = None
        if isinstance(program, FunctionProcesses):
            resources.at_close.append(program.close)
            program.start()
            score = program.score if program.scores_groups else None
        rewards = [other for other in context.pipeline.nodes.values() if isinstance(other, RewardNode)]
        return AgentSetup(
            spec,
            resources.once(f"gateway on {host}", lambda: Gateway(host)),
            program,
            ContextWriter(resources.tokenizer, vision),
            ImageReader(vision),
            lambda tools: parser_of(node.tool_format, tools, resources.folder),
            any(function.fn == "agent" for reward in rewards for function in reward.functions.values()),
            score,
            asyncio.Semaphore(spec.max_running),
        )

    return resources.once(f"agent of {context.sampled_by}", make)


def row_of(batch: Batch, row: int, seed: int, images: RowImages) -> dict[str, Any]:
    return {
        "messages": images.messages(json.loads(batch["messages"].string(row))),
        "answer": batch["answer"].string(row),
        "data_source": batch["data_source"].string(row),
        "extra_info": json.loads(batch["extra_info"].string(row)),
        # Half of the seed's bits, which integers of every language hold exactly.
        "seed": seed % 2**32,
        "sample_id": int(batch.rows[row]),
        "group_id": int(batch["group_id"][row]),
    }


def _label(file: Path) -> str:
    """The label of a worker's sandboxes, kept in a file of the run: a worker that starts again removes those with it.

    It is random, because paths of run folders are not unique in a cluster.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(8))
    return file.read_text().strip()


def _node_address() -> str:
    """The machine's address for other machines."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # This sends nothing, but chooses a route.
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
