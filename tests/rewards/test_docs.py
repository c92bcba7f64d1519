"""docs/rewards.md: its examples are right, and all rewards are in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.validation import check_file

DOCUMENT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
(MODULE,) = re.findall(r"^```python\n# my_rewards.py\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_pass_the_checks(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a key")
    declared = yaml.safe_load(example)
    for engine in declared.get("engines", {}).values():
        # The folders of other models do not exist here: use the pipeline's own model.
        engine["model"] = None
    for node in declared["nodes"].values():
        if "engine" in node and node["op"] == "judge":
            # That model has few positions.
            node["max_prompt_tokens"] = 8
    # The reward of the template has options of its own.
    template = Path(__file__).parents[2] / "dag_templates" / "tiny_grpo.yaml"
    whole = yaml.safe_load(template.read_text())
    whole["nodes"] = {name: node for name, node in whole["nodes"].items() if name != "reward"} | declared["nodes"]
    whole["engines"] |= declared.get("engines", {})
    whole["data"] |= {key: str(template.parent / whole["data"][key]) for key in ("train", "val")}
    if sources := declared.get("data", {}).get("train"):
        whole["data"]["train"] = {name: {"path": whole["data"]["train"]} for name in sources}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(whole))
    (tmp_path / "my_rewards.py").write_text(MODULE)
    check_file(tmp_path / "p.yaml", with_files=False)


def test_all_rewards_are_documented() -> None:
    assert [name for name in BUILT_IN_REWARDS if f"fn: {name}" not in DOCUMENT] == []
