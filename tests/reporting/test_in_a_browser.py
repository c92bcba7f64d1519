"""What a person sees of runs: the report's file and the live page, in headless Chromium."""

from __future__ import annotations

import http.client
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from browser import browsing, opened, served
from finished_runs import sample, write_run, write_samples
from playwright.sync_api import Browser

from dagrl.model_files.images import thumbnail
from dagrl.reporting.html_report import write_html
from dagrl.reporting.server import Runs
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tracking.timeline import Timeline

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script></script>"
LOGPROBS = {
    "token_text": ["2", "<eos>"],
    "rollout_logprob": [-0.5, -1.0],
    "old_logprob": [-0.5, -1.5],
}
OPENING_S = 2.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "one")
    rows = [
        sample(0, **LOGPROBS),
        sample(
            1, prompt="<|im_start|>user\n7+7=<|im_end|>\n", response=HOSTILE, answer=HOSTILE, reward=0.25, **LOGPROBS
        ),
        sample(2, response="14", reward=0.75, finish_reason="length", **LOGPROBS),
    ]
    write_samples(run, 4, rows)
    write_samples(run, 2, [sample(7, response="a needle", data_source=HOSTILE)])
    pictures = [thumbnail(np.full((200, 400, 3), shade, dtype=np.uint8)) for shade in (20, 220)]
    elsewhere = "http://127.0.0.1:9/picture.jpg"
    write_samples(
        run,
        2,
        [sample(5, images=["a.png", "b.png", HOSTILE], thumbnails=[*pictures, elsewhere]), sample(6, thumbnails=[])],
        validation=True,
    )
    turns = [
        {"turn": 1, "text": "look", "reward": 0.5},
        {"turn": None, "text": HOSTILE, "reward": None},
        {"turn": 2, "text": "found", "reward": None},
    ]
    write_samples(run, 3, [sample(0, turns=turns)], validation=True)
    write_samples(run, 1, trajectory())
    return run


def trajectory() -> list[dict[str, Any]]:
    """Three sequences of an agent: two that part after the first request, and one of its own."""
    paths = {
        8: (("1+1=", "2"), ("+1=", "3")),
        9: (("1+1=", "2"), ("+5=", HOSTILE)),
        10: (("4+4=", "9"),),
    }
    rows = []
    for number, path in paths.items():
        turns = [{"turn": None, "text": path[1][0], "reward": None}] if len(path) > 1 else []
        said = [{"turn": at, "text": reply, "reward": None} for at, (_, reply) in enumerate(path, 1)]
        rows.append(
            sample(
                number,
                prompt=path[0][0],
                turns=[said[0], *turns, *said[1:]],
                trajectory=8,
                group_id=4,
                token_version=[3, -1, 4],
                reward=number / 10,
            )
        )
    return rows


@pytest.fixture(scope="module")
def report(folder: Path) -> Path:
    other = write_run(folder.parent / "other", "engines.actor.optimizer.lr=0.5", steps=3)
    write_html([folder, other], folder / "report.html")
    return folder / "report.html"


def test_the_figures_of_runs_are_seen(browser: Browser, report: Path) -> None:
    with opened(browser, report) as seen:
        assert "4 of 200" in seen.text() and "reward/mean" in seen.text()
        assert "0.4" in seen.text(".card:has-text('reward/mean')")
        seen.wait_for("[aria-label=Differences] tr", "engines.actor.optimizer.lr")
        assert "0.002\t0.5" in seen.text("[aria-label=Differences]")
        seen.page.locator("canvas").nth(1).wait_for()

        seen.show("metrics")
        seen.page.get_by_label("Search").fill("reward")
        assert seen.page.locator("figure").evaluate_all("all => all.map((each) => each.dataset.metric)") == [
            "reward/mean"
        ]
        label = seen.page.locator("[data-metric='reward/mean'] [role=img]").get_attribute("aria-label")
        assert label == "reward/mean. one: 0.1 to 0.4; other: 0.1 to 0.3"

        seen.show("plan")
        seen.wait_for("[aria-label='Planned and actual seconds'] td", "a step")
        assert "rollout generator 6 s 6 s 1.00" in " ".join(seen.text().split())
        assert seen.errors == [] and seen.requests == [report.as_uri()]


def test_an_evaluation_is_seen_first_and_leads_to_its_samples(browser: Browser, folder: Path, tmp_path: Path) -> None:
    figures = {"pass@1": {"value": 0.25, "low": 0.125, "high": 0.5, "prompts": 1}}
    row = {"group_id": 0, "sample_id": 5, "data_source": "sums", "prompt": HOSTILE, "answer": "7"}
    of_set = {"set": "val", "source": None, "prompts": 12, "n": 1, "lost": 3, "figures": figures}
    of_set |= {"tokens": {"mean": 2.0, "max": 2}, "finish_reasons": {"stop": 9, "network": 3}}
    result = {"name": "one", "step": 2, "sets": [of_set], "prompts": [{"set": "val", **row, "mean": 0.25}] * 12}
    paired = {"set": "val", "figures": figures, "better": [{**row, "change": 0.5}], "worse": []}
    comparisons = [{"first": "one", "second": "two", "sets": [paired]}]
    document = {"results": [result, result | {"name": "two"}], "comparisons": comparisons}
    other = write_run(tmp_path / "two")
    write_samples(other, 2, [sample(5, response="the other's")], validation=True)
    write_html([folder, other], tmp_path / "page.html", evaluation=document)
    with opened(browser, tmp_path / "page.html") as seen:
        assert "0.25 (0.125 to 0.5)" in seen.text("[aria-label=Figures]") and "network 3" in seen.text()
        assert "1 prompts are better, 0 worse" in seen.text()
        seen.page.locator("[aria-label=Change] button.link").first.click()
        seen.wait_for("aside", "the other's")
        assert seen.errors == []


def test_the_overview_says_that_responses_were_cut(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    cut = [json.dumps(line | {"response_tokens/cut_fraction": 1.0}) + "\n" for line in lines]
    (run / "metrics.jsonl").write_text("".join(cut))
    write_html([run], run / "report.html")
    with opened(browser, run / "report.html") as seen:
        assert "100% of the responses were cut at the token limit; raise nodes.rollout.sampling." in seen.text()
        assert seen.errors == []


def test_sources_are_shown_beside_validations(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {"train/sums/reward/mean": 0.25, "train/sums/pass_rate": 0.5, "train/code/pass_rate": 0.125}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_html([run], run / "report.html")
    with opened(browser, run / "report.html") as seen:
        seen.show("validation")
        seen.wait_for("[aria-label='Training by source'] td", "sums")
        rows = seen.text("[aria-label='Training by source']")
        assert "Source\tpass_rate\treward/mean" in rows and "code\t0.125\t–" in rows and "sums\t0.5\t0.25" in rows
        assert seen.errors == []


def test_a_step_has_bars_and_names_for_its_idle_time(browser: Browser, report: Path) -> None:
    with opened(browser, report) as seen:
        seen.show("steps?step=3")
        assert "Step 3: " in seen.text()
        seen.wait_for("[aria-label='Idle time by cause']", "update (actor)")
        seen.wait_for("[aria-label='Time by node']", "update")
        assert "rollout generator 2 6 s" in " ".join(seen.text("[aria-label='Time by node']").split())
        seen.page.get_by_label("Step before").click()
        seen.wait_for("main", "Step 2: ")
        assert seen.errors == []


def test_the_dag_shows_times_and_opens_nodes_by_key(browser: Browser, report: Path) -> None:
    with opened(browser, report) as seen:
        seen.show("graph")
        node = seen.page.get_by_role("button", name="rollout, rollout on generator.")
        node.focus()
        seen.page.keyboard.press("Enter")
        assert "rollout on generator" in seen.text("aside")
        assert seen.errors == []


def test_samples_are_text_whatever_they_hold(browser: Browser, report: Path) -> None:
    with opened(browser, report) as seen:
        seen.show("samples?step=4&sample=1")
        assert [bubble.inner_text() for bubble in seen.page.locator(".bubble").all()] == [
            "user\n7+7=",
            f"policy\n{HOSTILE}",
            f"answer the reference\n{HOSTILE}",
        ]
        assert "reward 0.25" in seen.text("aside") and "advantage 0.5" in seen.text("aside")
        shades = seen.page.locator(".token").evaluate_all("all => all.map((each) => each.style.backgroundColor)")
        assert shades == ["", "rgba(214, 69, 65, 0.6)"]
        assert "trainer − generator: -0.5" in (seen.page.locator(".token").last.get_attribute("title") or "")

        seen.show("samples?kind=val&step=3")
        whos = [bubble.inner_text().splitlines()[0] for bubble in seen.page.locator(".bubble").all()]
        assert whos == ["prompt", "policy turn 1, reward 0.5", "observation", "policy turn 2", "answer the reference"]
        assert seen.page.title() != "owned" and seen.page.locator("img").count() == 0
        # And a script that would make HTML of a text is stopped by the browser.
        refused = (
            "() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (error) { return error.name; } }"
        )
        assert seen.page.evaluate(refused) == "TypeError"


def test_samples_show_their_images(browser: Browser, report: Path) -> None:
    with opened(browser, report) as seen:
        seen.show("samples?kind=val&step=2&sample=5")
        pictures = seen.page.locator("[aria-label='Images of the prompt'] img")
        pictures.nth(1).wait_for()
        size = "async (each) => { await each.decode(); return [each.naturalWidth, each.naturalHeight]; }"
        loaded = f"all => Promise.all(all.map({size}))"
        assert pictures.evaluate_all(loaded) == [[160, 80], [160, 80]], "none from another address"
        assert pictures.evaluate_all("all => all.map((each) => [each.title, each.loading])") == [
            ["a.png", "lazy"],
            ["b.png", "lazy"],
        ]
        seen.show("samples?kind=val&step=2&sample=6")
        seen.wait_for("aside", "Sample 6")
        assert pictures.count() == 0 and seen.errors == []


def test_a_trajectory_is_a_tree_of_requests(browser: Browser, report: Path) -> None:
    with opened(browser, report) as seen:
        seen.show("samples?step=1&sample=8")
        tree = seen.page.locator(".tree")
        tops = tree.locator("> ul > li")
        assert [top.locator("> .request").inner_text() for top in tops.all()] == [
            "1+1= 2",
            "4+4= 9 sample 10, reward 1",
        ]
        assert tops.first.locator("> ul > li").all_inner_texts() == [
            "+1= 3 sample 8, reward 0.8",
            f"+5= {HOSTILE[:60]}… sample 9, reward 0.9",
        ]
        assert tree.locator("[aria-current=true]").inner_text() == "sample 8, reward 0.8"
        assert "weights' version 3 to 4" in seen.text("aside")
        tree.get_by_role("button", name="sample 9").click()
        seen.wait_for("aside h2", "Sample 9")
        seen.show("samples?step=4&sample=1")
        assert not seen.page.locator(".tree").count()
        assert seen.errors == []


def test_samples_are_searched_and_filtered(browser: Browser, report: Path) -> None:
    with opened(browser, report) as seen:
        seen.show("samples?step=4")
        rows = seen.page.locator(".samples tbody tr")
        rows.nth(2).wait_for()
        seen.page.get_by_label("Reward from").fill("0.5")
        seen.page.get_by_label("to", exact=True).fill("0.8")
        assert "1 of 3" in seen.text()
        seen.page.locator(".samples tbody tr:only-child", has_text="14").wait_for()
        seen.page.get_by_label("Reward from").fill("")
        seen.page.get_by_label("to", exact=True).fill("")
        seen.page.get_by_label("Ended").select_option("length")
        assert "1 of 3" in seen.text()
        seen.page.get_by_label("Ended").select_option("")
        seen.page.get_by_label("Search").fill("needle")
        seen.page.get_by_role("button", name="Search all steps").click()
        seen.page.get_by_role("button", name="7", exact=True).click()
        seen.wait_for("aside", "a needle")
        assert seen.errors == []


def contrast(page) -> float:
    """The least contrast of texts with the ground they are on, as WCAG 2 computes it."""
    return page.evaluate(
        """() => {
          const pairs = [["ink", "paper"], ["ink", "raised"], ["faint", "paper"], ["faint", "raised"],
            ["accent", "raised"],
            ["ink", "idle"], ["ink", "policy"], ["ink", "observation"], ["ink", "answer"], ["faint", "prompt"],
            ["faint", "policy"], ["ink", "warn-paper"]];
          const light = (name) => {
            const hex = dagrl.color(name);
            const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
              .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
          };
          return Math.min(...pairs.map((pair) => {
            const [low, high] = pair.map(light).sort((one, other) => one - other);
            return (high + 0.05) / (low + 0.05);
          }));
        }"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_in_both_colour_schemes(browser: Browser, report: Path, scheme: str) -> None:
    with opened(browser, report, color_scheme=scheme) as seen:
        assert contrast(seen.page) >= 4.5


def write_long_run(folder: Path, steps: int, metrics: int) -> Path:
    run = write_run(folder)
    names = [f"group_{number % 9}/metric_{number}" for number in range(metrics)]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: (step * 7919 + place * 104729) % 1000003 / 1e5 for place, name in enumerate(names)}
            file.write(json.dumps({"step": step, "reward/mean": step / steps, "time/step_s": 9.0, **values}) + "\n")
    timeline = Timeline()
    timeline.start(run, None)
    bars = (("rollout", "rollout", 0.0, 3.0), ("rollout", "rollout", 3.0, 4.0), ("update", "train", 4.0, 9.0))
    timeline.extend(
        Activity(name, name, at + step * 9, end + step * 9, step, None, group, WorkerId(name, 0))
        for step in range(1, steps + 1)
        for name, group, at, end in bars
    )
    timeline.close()
    return run


def test_a_run_of_ten_thousand_steps_opens_in_two_seconds(browser: Browser, tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "long", 10_000, 40)
    write_html([run], tmp_path / "long.html")
    with opened(browser, None) as seen:
        # Seconds of the processor: those of the clock say how busy the machine is.
        client = seen.page.context.new_cdp_session(seen.page)
        client.send("Performance.enable", {"timeDomain": "threadTicks"})
        seen.page.goto((tmp_path / "long.html").as_uri())
        seen.page.wait_for_selector("body[data-ready]")
        seen.page.locator("canvas").nth(1).wait_for()
        metrics = {each["name"]: each["value"] for each in client.send("Performance.getMetrics")["metrics"]}
        assert metrics["TaskDuration"] < OPENING_S
        assert "10,000 of 200" in seen.text()
        seen.show("steps?step=7001")
        assert "Step 7001: 9 s" in seen.text() and seen.errors == []


# -- live


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder of runs that a server shows, and its port."""
    run = write_run(tmp_path / "runs" / "first")
    with served(Runs([tmp_path / "runs"])) as port:
        yield run, port


def test_the_live_page_follows_a_run_and_finds_new_ones(browser: Browser, live: tuple[Path, int]) -> None:
    run, port = live
    with opened(browser, f"http://127.0.0.1:{port}/") as seen:
        assert "4 of 200" in seen.text()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "time/step_s": 6.0, "reward/mean": 0.875}) + "\n")
        seen.wait_for("main", "0.875")
        assert "5 of 200" in seen.text()
        write_run(run.parent / "second")
        seen.wait_for(".runs", "second")
        write_samples(run, 4, [sample(3, response=HOSTILE)])
        seen.show("samples?run=0")
        seen.page.reload()
        seen.page.wait_for_selector(".bubble.policy")
        assert HOSTILE in seen.text(".bubble.policy") and seen.page.title() != "owned"
        assert seen.errors == []
        assert {request.split("/api")[0].partition("?")[0] for request in seen.requests} <= {
            f"http://127.0.0.1:{port}",
            f"http://127.0.0.1:{port}/",
        }


def test_the_newest_runs_are_loaded_and_others_on_selection(browser: Browser, tmp_path: Path) -> None:
    first = write_run(tmp_path / "runs" / "r00")
    for number in range(1, 12):
        copied = tmp_path / "runs" / f"r{number:02}"
        shutil.copytree(first, copied)
        os.utime(copied / "metrics.jsonl", (2e9 + number, 2e9 + number))
    with served(Runs([tmp_path / "runs"])) as port, opened(browser, f"http://127.0.0.1:{port}/") as seen:
        boxes = seen.page.locator(".runs input")
        assert boxes.evaluate_all("all => all.map((each) => each.checked)") == [False] * 4 + [True] * 8
        assert not any("/api/0/" in request for request in seen.requests)
        seen.page.get_by_label("Filter runs").fill("r00")
        assert seen.page.locator(".runs .run").count() == 1
        seen.page.get_by_label("r00 in the curves").check()
        seen.wait_for("[aria-label=Differences] th", "r00")
        assert any("/api/0/" in request for request in seen.requests) and seen.errors == []


def test_only_this_machine_is_answered(live: tuple[Path, int]) -> None:
    _, port = live

    def status(path: str, host: str = f"127.0.0.1:{port}", method: str = "GET") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        connection.request(method, path, headers={"Host": host})
        answer = connection.getresponse()
        answer.read()
        return answer.status

    with urlopen(f"http://127.0.0.1:{port}/", timeout=240) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert status("/api/0/overview") == 200 and status("/", f"localhost:{port}") == 200
    # Another site that resolves its name to this machine.
    assert status("/api/0/overview", "evil.example") == 400
    assert status("/api/0/overview", method="POST") == 405
    for path in ("/api/9/overview", "/api/0/steps/99", "/api/0/samples/train/1", "/api/0/samples/..%2f/1"):
        assert status(path) == 404, path
