"""What a machine does before it meets the others."""

from __future__ import annotations

import pytest

from dagrl.config.loading.hub import HubError
from dagrl.config.loading.loader import load_pipeline
from dagrl.launcher import command
from dagrl.launcher.errors import LaunchError


def test_weights_that_cannot_be_fetched_end_the_launch_with_a_sentence(project, monkeypatch) -> None:
    def fail(pipeline: object) -> bool:
        raise HubError("the Hub cannot be reached")

    monkeypatch.setattr(command, "download", fail)
    with pytest.raises(LaunchError, match="the Hub cannot be reached") as caught:
        command.fetch_models(load_pipeline(project.pipeline()).pipeline)
    assert caught.value.code == 2
