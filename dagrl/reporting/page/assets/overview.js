"use strict";
// How far each run is, its main curves, its time by node, and what happened to it.
(() => {
  const { h, number, seconds, percent, table, mean, most, least } = window.dagrl;
  const MAIN = [
    "reward/mean", "val/reward/mean", "loss/sft", "loss/dpo", "loss/policy", "time/step_s",
    "response_tokens/mean", "entropy", "kl/ref", "mismatch/logprob_diff/mean",
  ];
  const MOST_CHARTS = 8;

  function card(title, value, note) {
    return h("div", { class: "card" }, h("h3", {}, title), h("p", { class: "big" }, value), h("p", { class: "note" }, note));
  }

  function cards(run) {
    const { metrics, overview } = run;
    const found = [];
    const of = overview.steps ? ` of ${overview.steps.toLocaleString("en-US")}` : "";
    const done = overview.steps && overview.last_step >= overview.steps;
    found.push(card("Steps", `${overview.last_step.toLocaleString("en-US")}${of}`, done ? "finished" : lastSeen(run)));
    for (const name of ["reward/mean", "val/reward/mean", "loss/sft", "loss/dpo"]) {
      const values = metrics.values(name);
      if (!values.length) continue;
      const best = name.includes("loss") ? least(values) : most(values);
      found.push(card(name, number(values.at(-1)), `from ${number(values[0])}, best ${number(best)}`));
    }
    const step = metrics.inTraining("time/step_s");
    if (step.length) found.push(card("Seconds a step", number(mean(step)), `last ${number(step.at(-1))}`));
    const speed = metrics.inTraining("throughput/tokens_per_s");
    if (speed.length) found.push(card("Tokens per second", number(mean(speed)), `last ${number(speed.at(-1))}`));
    const restarts = overview.events.filter((event) => event.kind === "restart").length;
    found.push(card("Restarts", String(restarts), restarts ? "see events" : "no worker was lost"));
    return h("div", { class: "cards" }, found);
  }

  function lastSeen(run) {
    const { timed_steps: timed } = run.overview;
    return timed.length ? `step ${timed.at(-1)} was the last to end` : "no step has ended";
  }

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  function times(run) {
    const { metrics } = run;
    const whole = sum(metrics.inTraining("time/step_s"));
    const rows = [...metrics.columns.keys()]
      .filter((name) => /^time\/.+_s$/.test(name) && name !== "time/step_s")
      .map((name) => {
        const values = metrics.inTraining(name);
        const share = whole ? sum(values) / whole : null;
        const node = name.slice("time/".length, -"_s".length);
        return [node, mean(values), most(values), share, last(metrics, `memory/${node}_peak_gib`)];
      })
      .sort((one, other) => other[3] - one[3]);
    const columns = [
      { name: "Node", left: true }, { name: "Mean", format: seconds }, { name: "Most", format: seconds },
      { name: "Of a step", format: percent }, { name: "Peak GiB" },
    ];
    return table(columns, rows, { label: "Time by node" });
  }

  // What became of the samples that were generated.
  function account(run) {
    const rows = run.overview.account.flatMap((each) => Object.keys(each.samples)
      .filter((end) => each.samples[end] || each.tokens[end])
      .map((end) => [
        [each.rollout, each.source].filter(Boolean).join(", ") || "all", end,
        each.samples[end], each.samples[end] / each.samples.generated,
        each.tokens[end], each.tokens[end] / each.tokens.generated,
      ]));
    if (!rows.length) return [];
    const columns = [
      { name: "Samples of", left: true }, { name: "End", left: true },
      { name: "Samples" }, { name: "Share", format: percent }, { name: "Tokens" }, { name: "Share", format: percent },
    ];
    return [h("section", {}, h("h2", {}, "What became of the samples"), table(columns, rows, { label: "What became of the samples" }))];
  }

  const last = (metrics, name) => metrics.ends(name)[1];

  function events(run) {
    const { overview } = run;
    const rows = overview.events.map((event) => [event.step, event.kind, event.text, event.seconds]);
    const parts = [];
    if (overview.torn) parts.push(h("p", { class: "warning" }, `${overview.torn} torn lines of metrics.jsonl are left out.`));
    for (const note of overview.notes) parts.push(h("p", { class: "warning" }, note));
    if (overview.failure) {
      parts.push(h("details", { class: "warning" }, h("summary", {}, "The last failure (logs/failure.txt)"), h("pre", {}, overview.failure)));
    }
    if (overview.best) parts.push(h("p", {}, `Best checkpoint: ${overview.best}`));
    if (!rows.length) return [...parts, h("p", { class: "note" }, "No restarts, no pauses and no alarms.")];
    const columns = [
      { name: "Step" }, { name: "Event", left: true }, { name: "What", left: true }, { name: "For", format: seconds },
    ];
    return [...parts, table(columns, rows, { label: "Events" })];
  }

  // Lines of the pipelines in which the runs differ.
  function differences(runs) {
    const lines = runs.map((run) => flattened(run.overview.pipeline));
    const keys = [...new Set(lines.flatMap((each) => [...each.keys()]))];
    const rows = keys
      .map((key) => [key, ...lines.map((each) => each.get(key) ?? "–")])
      .filter(([, ...values]) => new Set(values).size > 1);
    const columns = [{ name: "Key", left: true }, ...runs.map((run) => ({ name: run.name, left: true }))];
    return h("section", {}, h("h2", {}, "Differences of the pipelines"), table(columns, rows, { search: rows.length > 10, label: "Differences" }));
  }

  // Path -> text of the values of block-style YAML, as dagrl writes it.
  function flattened(text) {
    const found = new Map();
    const path = [];
    text.split("\n").forEach((line) => {
      const match = /^(\s*)(?:- )?([^\s:][^:]*):(?:\s+(.*))?$/.exec(line);
      if (!match) {
        if (!line.trim()) return;
        // An item of a list, which may be no further to the right than its key.
        while (path.length && path.at(-1).indent > line.search(/\S/)) path.pop();
        const key = path.map((each) => each.key).join(".");
        let item = 0;
        while (found.has(`${key}[${item}]`)) item += 1;
        found.set(`${key}[${item}]`, line.trim().replace(/^- /, ""));
        return;
      }
      while (path.length && path.at(-1).indent >= match[1].length) path.pop();
      const key = [...path.map((each) => each.key), match[2]].join(".");
      if (match[3] !== undefined && match[3] !== "") found.set(key, match[3]);
      path.push({ indent: match[1].length, key: match[2] });
    });
    return found;
  }

  function render(view, app) {
    const { run } = app;
    const names = MAIN.filter((name) => app.runs.some((each) => each.metrics.columns.has(name))).slice(0, MOST_CHARTS);
    view.append(
      cards(run),
      h("section", {}, h("h2", {}, "Curves"), names.length
        ? h("div", { class: "charts" }, names.map((name) => window.dagrl.metricCard(name, app, { smoothing: 0.6 })))
        : h("p", { class: "note" }, "No step is finished yet.")),
      h("div", { class: "halves" },
        h("section", {}, h("h2", {}, "Time by node"), times(run)),
        h("section", {}, h("h2", {}, "Events"), events(run))),
      ...account(run),
    );
    if (app.shownRuns.length > 1) view.append(differences(app.shownRuns));
    view.append(h("section", {}, h("h2", {}, "Pipeline"), h("details", {}, h("summary", {}, `${run.overview.folder}/pipeline.yaml`), h("pre", { tabindex: 0 }, run.overview.pipeline))));
  }

  window.dagrl.views = { overview: { title: "Overview", render } };
})();
