"use strict";
// Results of `dagrl eval`: figures with intervals, differences between targets, and prompts.
(() => {
  const { h, number, table, manifest, unpack } = window.dagrl;
  const CUT = 100;

  const short = (value) => number(Number(value.toFixed(3)));
  const shown = (figure) => (figure?.value === undefined ? "–" : `${short(figure.value)} (${short(figure.low)} to ${short(figure.high)})`);
  const cut = (text) => (text.length > CUT ? `…${text.slice(-CUT)}` : text);
  const scroll = (...children) => h("div", { class: "scroll", tabindex: 0 }, children);

  function figures(results) {
    const names = [...new Set(results.flatMap((result) => result.sets.flatMap((each) => Object.keys(each.figures))))];
    const left = (name) => ({ name, left: true });
    const columns = [left("Target"), left("Set"), left("Source"), { name: "Prompts" }, { name: "n" }, ...names.map(left), { name: "Tokens" }, { name: "Longest" }, { name: "Lost" }, left("Ended by")];
    const rows = results.flatMap((result) => result.sets.map((each) => [
      result.name, each.set, each.source ?? "all", each.prompts, each.n, ...names.map((name) => shown(each.figures[name])),
      each.tokens.mean, each.tokens.max, each.lost, Object.entries(each.finish_reasons).map(([reason, count]) => `${reason} ${count}`).join(", "),
    ]));
    return scroll(table(columns, rows, { label: "Figures" }));
  }

  // The samples of a prompt, in the view of its target's run.
  function prompts(rows, value, run, step, app) {
    const columns = [{ name: "Sample", open: true, width: "88px" }, { name: "Set", left: true }, { name: "Prompt", left: true, format: cut }, { name: "Answer", left: true, format: cut }, { name: value.name }];
    const open = (cells) => { location.hash = app.link("samples", { run: run.id, kind: "val", step, sample: cells[0] }); };
    return table(columns, rows.map((row) => [row.sample_id, row.set, row.prompt, row.answer, value.of(row)]), { open, limit: 10, label: value.name });
  }

  async function render(view, app) {
    const { results, comparisons } = await unpack("evaluation");
    const place = (name) => results.findIndex((result) => result.name === name);
    view.append(
      h("p", { class: "note" }, "Intervals cover 95 %, over prompts. Lost responses, by failures of machines, are in no figure."),
      figures(results));
    for (const { first, second, sets } of comparisons) {
      view.append(h("h2", {}, `${second} minus ${first}`));
      const run = app.runs[place(second)], step = results[place(second)].step;
      for (const each of sets) {
        const rows = Object.entries(each.figures).map(([name, figure]) => [name, number(figure.value), number(figure.low), number(figure.high)]);
        const changed = [...each.better, ...each.worse].map((row) => ({ set: each.set, ...row }));
        view.append(
          h("h3", {}, `${each.set}: ${each.better.length} prompts are better, ${each.worse.length} worse`),
          scroll(table([{ name: "Figure", left: true }, { name: "Difference" }, { name: "From" }, { name: "To" }], rows, { label: "Differences" })),
          changed.length ? scroll(prompts(changed, { name: "Change", of: (row) => row.change }, run, step, app)) : null);
      }
    }
    const { step, prompts: all, name } = results[Math.max(0, app.runs.indexOf(app.run))];
    const rows = all.filter((row) => row.mean !== null).sort((one, other) => one.mean - other.mean);
    view.append(
      h("h2", {}, `Prompts of ${name}, the worst first`),
      scroll(prompts(rows, { name: "Mean reward", of: (row) => row.mean }, app.run, step, app)));
  }

  if (manifest.evaluation) window.dagrl.views = { evaluation: { title: "Evaluation", render }, ...window.dagrl.views };
})();
