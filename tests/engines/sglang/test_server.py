"""What is told of a server's process that has died."""

from __future__ import annotations

from dagrl.engines.sglang.server import telling_lines


def test_progress_bars_and_marks_do_not_hide_how_a_process_ended():
    log = (
        "[TP0] loading\n"
        "Capturing batches (bs=1):  50%|█████     | 1/2 [00:01<00:01]\r"
        "Capturing batches (bs=1): 100%|██████████| 2/2 [00:02<00:00]\n"
        "[saver] cudaError error: 2 (out of memory)\n"
        "    ^^^^^^~~~~\n"
    )
    assert telling_lines(log) == ["[TP0] loading", "[saver] cudaError error: 2 (out of memory)"]
