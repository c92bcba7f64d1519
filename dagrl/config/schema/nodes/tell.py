"""`tell`: prompts that give a teacher more information than the policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract, Scope
from dagrl.config.schema.section import Reward, Tokens

EXTRA_INFO = "extra_info."
TEMPLATE = """\
{{ prompt }}
{%- if demonstration %}

A good response to this is, for example:

{{ demonstration }}
{%- endif %}
{%- if response %}

A right response to this is, for example:

{{ response }}
{%- endif %}
{%- if feedback %}

An earlier response has got this feedback:

{{ feedback }}
{%- endif %}
{%- if demonstration or response or feedback %}

Now give a response of your own to the same task.
{%- endif %}"""


class TellNode(NodeBase):
    """Writes a prompt for the policy as its own teacher, for self-distillation: the row's prompt with a demonstration,
    a right response to it, or feedback.

    The teacher reads it with ``read: {prompt_tokens: teacher_prompt_tokens}``, before the same response tokens. Rows
    without such information get 0 in ``teacher_mask``.
    """

    op: Literal["tell"]
    demonstration: Annotated[str, Field(pattern=r"^(answer|demonstration|extra_info\..+)$")] | None = None
    """Column with the demonstration: ``answer``, ``demonstration`` (``data.responses``), or a field such as
    ``extra_info.solution``. Rows may lack it."""
    peer_reward: Reward | None = None
    """Include another response of the row's group with this reward or more: the next one of the group."""
    feedback: str | None = None
    """Include the text or number that a reward function returned under this name (``reward_info``)."""
    template: str = TEMPLATE
    """The template of the text, in Jinja: ``prompt`` is the user's last message, and ``demonstration``, ``response``
    (of a peer) and ``feedback`` are empty if the row has none."""
    message: Literal["user", "system"] = "user"
    """Place of the text: ``user`` replaces the last message of the user, ``system`` adds a system message before the
    others, after an existing one."""
    max_prompt_tokens: Tokens
    """Tokens of the longest teacher's prompt. A row with a longer one gets 0 in ``teacher_mask``."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads = ["prompt_tokens", "messages", "extra_info"]
        if self.demonstration is not None and not self.demonstration.startswith(EXTRA_INFO):
            reads.append(self.demonstration)
        if self.peer_reward is not None:
            reads += ["group_id", "reward", "response_tokens"]
        if self.feedback is not None:
            reads.append("reward_info")
        return OpContract(
            tuple(reads),
            ("teacher_prompt_tokens", "teacher_mask"),
            scope=Scope.ROW if self.peer_reward is None else Scope.GROUP,
            reads_if_written=() if self.peer_reward is None else ("token_turn", "excluded"),
        )
