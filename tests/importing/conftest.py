from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "sources"


@pytest.fixture
def sources() -> Path:
    return SOURCES


@pytest.fixture
def translated():
    """Translate settings of a framework; returns the keys of the pipeline."""
    from dagrl.importing.registry import FRAMEWORKS
    from dagrl.importing.settings import Setting, Settings
    from dagrl.importing.table import translate

    def run(framework: str, given: dict) -> dict:
        settings = Settings()
        for line, (key, value) in enumerate(given.items(), start=1):
            settings.add(Setting(key, value, "source", line))
        return translate(FRAMEWORKS[framework], settings).tree

    return run
