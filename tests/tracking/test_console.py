"""What a user sees: a table and bars on a terminal, plain lines elsewhere."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time

from rich.console import Console as Terminal

from dagrl.tracking.base import Progress
from dagrl.tracking.console import STEPS_PER_HEADING, Console, Verbosity

METRICS = {
    "reward/mean": 0.25,
    "loss/policy": -0.0125,
    "kl/ref": 0.00042,
    "entropy": 1.5,
    "response_tokens/mean": 12.25,
    "grad_norm": 0.75,
    "throughput/tokens_per_s": 12345.6,
    "time/step_s": 2.5,
    "lr": 0.001,
}
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def plain_console(total_steps: int = 3) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(total_steps, Terminal(file=stream, force_terminal=False, width=40)), stream


def shown_at_the_end(output: str) -> list[str]:
    """The lines that a terminal of unlimited height shows after this output, which moves up and erases lines."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b"):
            row -= int(part[2:-1] or 1) if part.endswith("A") else 0
            lines[row] = "" if part == "\x1b[2K" else lines[row]
        elif part != "\r":
            lines[row] += part
    return lines


def live_console(total_steps: int = 30) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    terminal = Terminal(file=stream, force_terminal=True, width=110, height=40, _environ={"TERM": "xterm"})
    return Console(total_steps, terminal), stream


def test_elsewhere_a_step_is_one_line(tmp_path):
    console, stream = plain_console()
    console.start(tmp_path, {}, None)
    console.log(1, METRICS)
    assert stream.getvalue() == (
        "step 1/3  reward 0.250  loss -0.0125  kl 0.00042  entropy 1.500  tokens 12.2  grad norm 0.750"
        "  tokens/s 12,346  seconds 2.50\n"
    )
    console.close(ok=True)


def test_training_on_given_responses_is_reported_by_its_losses(tmp_path):
    console, stream = plain_console()
    console.start(tmp_path, {}, None)
    console.log(1, {"loss/sft": 0.5, "demonstration_tokens/mean": 3.0, "val/loss/sft": 0.25})
    console.log(2, {"loss/dpo": 0.625, "loss/sft": 0.5, "dpo/margin": 0.125, "val/dpo/accuracy": 1.0})
    assert stream.getvalue().splitlines() == [
        "step 1/3  loss 0.5000  tokens 3.0",
        "step 1/3 validation  loss of sft 0.25",
        "step 2/3  margin 0.125  loss 0.6250",
        "step 2/3 validation  accuracy of dpo 1",
    ]
    console.close(ok=True)


def test_distillation_is_reported_by_the_divergence_from_the_teacher(tmp_path):
    console, stream = plain_console()
    console.start(tmp_path, {}, None)
    console.log(1, {"reward/mean": 0.5, "distillation/loss": 1.25, "distillation/kl": 2.0})
    console.log(2, {"loss/policy": 0.5, "distillation/kl": -0.5})
    assert stream.getvalue().splitlines() == [
        "step 1/3  reward 0.500  teacher 1.2500",
        "step 2/3  loss 0.5000  teacher -0.5000",
    ]
    console.close(ok=True)


def test_the_table_has_no_empty_columns(tmp_path):
    console, stream = live_console()
    console.start(tmp_path, {}, None)
    console.log(1, METRICS)
    assert "reward" in stream.getvalue()
    assert "margin" not in stream.getvalue()
    console.close(ok=True)


def test_validation_sets_are_reported_beside_the_total(tmp_path):
    console, stream = plain_console()
    console.start(tmp_path, {}, None)
    metrics = {"val/reward/mean": 0.5, "val/aime/mean@4": 0.25, "val/aime/pass@4": 0.5, "val/math/mean@4": 0.75}
    console.log(0, metrics)
    assert stream.getvalue() == "step 0/3 validation  reward 0.5  aime/mean@4 0.25  math/mean@4 0.75\n"
    console.close(ok=True)


def test_validation_has_its_own_line(tmp_path):
    console, stream = plain_console()
    console.start(tmp_path, {}, None)
    console.log(0, {"val/reward/mean": 0.125, "val/response_tokens/mean": 7.0})
    console.log(1, {"reward/mean": 0.5, "val/reward/mean": 0.75})
    assert stream.getvalue().splitlines() == [
        "step 0/3 validation  reward 0.125  tokens 7",
        "step 1/3  reward 0.500",
        "step 1/3 validation  reward 0.75",
    ]


def test_notes_are_printed_unchanged(tmp_path):
    console, stream = plain_console()
    console.note("dropped [3] prompts [bold]longer[/bold] than 16 tokens")
    console.start(tmp_path, {}, 4)
    console.close(ok=True)
    console.note("done")
    assert stream.getvalue().splitlines() == [
        "dropped [3] prompts [bold]longer[/bold] than 16 tokens",
        "done",
    ]


def test_on_a_terminal_every_step_stays_above_the_progress(tmp_path):
    console, stream = live_console()
    console.start(tmp_path, {}, None)
    console.note("a note")
    for step in range(1, 26):
        console.log(step, {**METRICS, "reward/mean": 100 + step})
        console.progress(rollout_at(5, 2.0))
    console.close(ok=True)
    output = stream.getvalue()
    lines = shown_at_the_end(output)
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[:2] for row in rows] == [[str(step), f"{100 + step}.000"] for step in range(1, 26)]
    headings = [place for place, line in enumerate(lines) if line.startswith("step ") and "reward" in line]
    assert lines[0] == "a note" and [place - headings[0] for place in headings] == [0, STEPS_PER_HEADING + 1]
    # A number stands below the end of its heading.
    first = lines[headings[0] + 1]
    assert first[: lines[headings[0]].index("reward") + len("reward")].endswith("101.000")
    assert "25/30" in "".join(lines[-4:])
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
    # What is erased and drawn again is the bars, however many steps there are.
    assert max(len(run) for run in re.findall(r"(?:\x1b\[2K\x1b\[1A|\x1b\[1A\x1b\[2K)+", output)) <= 4 * 8


TWO_POLICIES = {
    "reward/mean": 0.25,
    "reward/std": 0.5,
    "reward/overlong": -0.1,
    "reward/verdict": 0.75,
    "loss/policy": 0.5,
    "update_verifier/loss/policy": -0.25,
    "critic/loss/value": 9.0,
    "val/reward/mean": 0.1,
    "val/reward/verdict": 0.2,
}


def test_every_policy_has_its_reward_and_its_loss(tmp_path):
    console, stream = plain_console()
    console.start(tmp_path, {}, None)
    console.log(1, TWO_POLICIES)
    assert stream.getvalue().splitlines() == [
        "step 1/3  reward 0.250  reward verdict 0.750  loss 0.5000  loss update_verifier -0.2500",
        "step 1/3 validation  reward 0.1  reward verdict 0.2",
    ]
    console, stream = live_console()
    console.start(tmp_path, {}, None)
    console.log(1, {"reward/mean": 0.5, "entropy": 1.0})
    console.log(2, TWO_POLICIES)
    console.close(ok=True)
    lines = shown_at_the_end(stream.getvalue())
    assert "step   reward  reward verdict     loss  loss update_verifier  entropy" in lines
    assert "   2    0.250           0.750   0.5000               -0.2500        -" in lines


def test_staleness_is_shown_from_where_there_is_some(tmp_path):
    console, stream = plain_console()
    console.start(tmp_path, {}, None)
    for step, behind in enumerate((0.0, 0.5, 0.0), start=1):
        console.log(step, {"reward/mean": 0.5, "staleness/mean": behind, "staleness/max": 2 * behind})
    assert stream.getvalue().splitlines() == [
        "step 1/3  reward 0.500",
        "step 2/3  reward 0.500  staleness 0.50",
        "step 3/3  reward 0.500  staleness 0.00",
    ]


def rollout_at(done: int, seconds: float, total: int = 8) -> Progress:
    return Progress("rollout", 2, done, total, tokens=done * 1000, seconds=seconds)


def test_elsewhere_a_long_rollout_has_a_line_now_and_then(tmp_path):
    now = [100.0]
    stream = io.StringIO()
    terminal = Terminal(file=stream, force_terminal=False, width=40)
    console = Console(3, terminal, clock=lambda: now[0])
    console.start(tmp_path, {}, None)
    for second in range(1, 36):
        now[0] += 1
        console.progress(rollout_at(second // 5, second))
    assert stream.getvalue().splitlines() == [
        "step 2/3  rollout 2/8 prompts  2,000 tokens  182 tokens/s",
        "step 2/3  rollout 4/8 prompts  4,000 tokens  190 tokens/s",
        "step 2/3  rollout 6/8 prompts  6,000 tokens  194 tokens/s",
    ]
    console.progress(rollout_at(8, 36))
    now[0] += 100
    console.progress(rollout_at(1, 1))
    assert len(stream.getvalue().splitlines()) == 3, "the next one's time begins with its own first word"


def test_on_a_terminal_a_rollout_has_a_bar_until_it_is_over(tmp_path):
    console, stream = live_console()
    console.start(tmp_path, {}, None)
    console.progress(rollout_at(5, 2.0))
    console.note("a note")
    shown = stream.getvalue()
    assert "rollout of step 2" in shown
    assert "5/8" in shown
    assert "5,000 tokens  2,500 tokens/s" in shown
    console.progress(rollout_at(8, 3.0))
    stream.truncate(0)
    console.log(2, METRICS)
    console.close(ok=True)
    assert "8/8" not in stream.getvalue()


def test_a_resumed_run_counts_on(tmp_path):
    console, stream = live_console()
    console.start(tmp_path, {}, 7)
    console.close(ok=True)
    assert "7/30" in stream.getvalue()


def test_a_missing_metric_is_a_dash_in_the_table(tmp_path):
    console, stream = live_console()
    console.start(tmp_path, {}, None)
    console.log(1, METRICS)
    console.log(2, {"reward/mean": 0.5})
    console.close(ok=True)
    rows = [line.split() for line in shown_at_the_end(stream.getvalue())]
    assert ["2", "0.500"] + ["-"] * 7 in rows


def test_ctrl_c_on_a_real_terminal_gives_the_cursor_back(tmp_path):
    program = f"""
import time
from pathlib import Path
from dagrl.config.schema.run import TrackerSpec
from dagrl.tracking import open_trackers
shown = [TrackerSpec(tracker="console")]
with open_trackers(shown, run_dir=Path({str(tmp_path)!r}), run_name="r", config={{}}, total_steps=9,
                   resumed_step=None) as trackers:
    trackers.log(1, {{"reward/mean": 0.5}})
    trackers.note("ready")
    time.sleep(60)
"""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        # A shell that runs the tests in the background has them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    output = ""
    while "ready" not in output:
        output += os.read(ours, 65536).decode()
    # It is asleep by then: an interrupt amid the drawing might be raised where Python drops it.
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    while chunk := read_rest(ours):
        output += chunk
    assert "KeyboardInterrupt" in errors
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
    assert "0.500" in output


def read_rest(terminal: int) -> str:
    """More output; Linux raises EIO at the end of a terminal whose other side is closed."""
    try:
        return os.read(terminal, 65536).decode()
    except OSError:
        return ""


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    script = (
        "from pathlib import Path\n"
        "from dagrl.tracking.console import Console\n"
        "console = Console(1000)\n"
        f"console.start(Path({str(tmp_path)!r}), {{}}, None)\n"
        "for step in range(1, 1001):\n"
        "    console.log(step, {'reward/mean': 0.5})\n"
        "console.close(ok=True)\n"
        f"Path({str(tmp_path / 'reached')!r}).touch()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read() if process.stderr else b""
    assert process.wait(timeout=240) == 0
    assert errors == b""
    assert (tmp_path / "reached").exists()


def test_a_terminal_that_is_hung_up_does_not_end_the_run(tmp_path):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dagrl.tracking.console import Console\n"
        "console = Console(1000)\n"
        f"console.start(Path({str(tmp_path)!r}), {{}}, None)\n"
        "console.note('ready')\n"
        "sys.stdin.read()\n"
        "for step in range(1, 4):\n"
        "    console.log(step, {'reward/mean': 0.5})\n"
        "console.close(ok=True)\n"
        "print('the last words', flush=True)\n"
    )
    ours, theirs = pty.openpty()
    # A session of its own, as of what `disown` has left behind: nobody tells it that the terminal goes.
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    output = b""
    while b"ready" not in output:
        output += os.read(ours, 65536)
    os.close(ours)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, b"")


def test_a_quiet_console_prints_nothing_and_a_verbose_one_every_metric():
    printed = {}
    for verbosity in Verbosity:
        stream = io.StringIO()
        console = Console(10, Terminal(file=stream), verbosity=verbosity)
        console.log(1, {"reward/mean": 0.25, "time/update": 1.5})
        console.note("a note")
        printed[verbosity] = stream.getvalue().splitlines()
    assert printed[Verbosity.QUIET] == []
    assert printed[Verbosity.NORMAL] == ["step 1/10  reward 0.250", "a note"]
    assert printed[Verbosity.VERBOSE] == [
        "step 1/10  reward 0.250", "  reward/mean 0.25", "  time/update 1.5", "a note"
    ]  # fmt: skip


CONFIG = {"nodes": {"sample": {"op": "rollout", "sampling": {"max_new_tokens": 512}}, "reward": {"op": "reward"}}}
CUT = {**METRICS, "response_tokens/cut_fraction": 0.96}


def test_cut_responses_are_reported_once_with_the_key_to_raise(tmp_path):
    console, stream = plain_console(9)
    console.start(tmp_path, CONFIG, None)
    console.log(1, {**METRICS, "response_tokens/cut_fraction": 0.4})
    console.log(2, CUT)
    console.log(3, CUT)
    console.log(3, {"val/reward/mean": 0.1, "val/response_tokens/cut_fraction": 1.0})
    told = [line for line in stream.getvalue().splitlines() if "cut at" in line]
    assert told == [
        "step 2: 96% of the responses were cut at the token limit; raise nodes.sample.sampling.max_new_tokens (512)",
        "step 3: 100% of the responses in validation were cut at the token limit; raise "
        "nodes.sample.sampling.max_new_tokens (512)",
    ]
