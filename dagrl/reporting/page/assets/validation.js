"use strict";
// Validations as curves and as a table, a row for each; and the sources of training prompts.
(() => {
  const { h, number, table } = window.dagrl;

  // The newest values of each source of training prompts, where there are several.
  function sources(view, app) {
    const { metrics } = app.run, found = new Map(), kinds = new Set();
    for (const [name, values] of metrics.columns) {
      const [, source, kind] = /^train\/([^/]+)\/(.+)$/.exec(name) ?? [];
      if (source === undefined) continue;
      if (!found.has(source)) found.set(source, new Map());
      found.get(source).set(kind, values.findLast((value) => value !== null) ?? null);
      kinds.add(kind);
    }
    if (!found.size) return;
    const rows = [...found].map(([source, values]) => [source, ...[...kinds].map((kind) => values.get(kind) ?? null)]);
    view.append(
      h("h2", {}, "Training by source"),
      h("div", { class: "scroll", tabindex: 0 }, table([{ name: "Source", left: true }, ...[...kinds].map((name) => ({ name }))], rows, { label: "Training by source" })),
      h("div", { class: "charts" }, [...metrics.columns.keys()].filter((name) => /^train\/[^/]+\/(reward\/mean|pass_rate)$/.test(name)).map((name) => window.dagrl.metricCard(name, app))),
    );
  }

  function render(view, app) {
    validations(view, app);
    sources(view, app);
  }

  function validations(view, app) {
    const { metrics } = app.run;
    const rank = (name) => (/^val\/(reward|loss)\//.test(name) ? 0 : /@\d+$/.test(name) ? 1 : name.startsWith("val/data/") ? 3 : 2);
    const names = [...metrics.columns.keys()].filter((name) => name.startsWith("val/"))
      .sort((one, other) => rank(one) - rank(other) || one.localeCompare(other));
    if (!names.length) {
      view.append(h("p", { class: "note" }, "This run has not validated yet (run.validate_every)."));
      return;
    }
    const rows = metrics.steps.map((step, place) => [step, ...names.map((name) => metrics.columns.get(name)[place])]).filter((row) => row.slice(1).some((value) => value !== null));
    const columns = [{ name: "Step" }, ...names.map((name) => ({ name: name.slice("val/".length) }))];
    const best = names.find((name) => name === "val/reward/mean");
    const top = best && rows.reduce((most, row) => ((row[1 + names.indexOf(best)] ?? -Infinity) > (most[1 + names.indexOf(best)] ?? -Infinity) ? row : most));
    view.append(
      top ? h("p", {}, `The best mean reward, ${number(top[1 + names.indexOf(best)])}, is that of step ${top[0]}. `,
        app.run.sampleSteps("val").length ? h("a", { href: app.link("samples", { kind: "val", step: top[0] }) }, "Read its samples") : null) : null,
      h("div", { class: "scroll", tabindex: 0 }, table(columns, rows, { label: "Validations" })),
      h("h2", {}, "Curves"),
      h("div", { class: "charts" }, names.map((name) => window.dagrl.metricCard(name, app, { smoothing: 0 }))),
    );
  }

  window.dagrl.views.validation = { title: "Validation", render };
})();
