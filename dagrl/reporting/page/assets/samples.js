"use strict";
// Samples of a step: searched, filtered, sorted, and read one by one.
(() => {
  const { h, number, table, nearest } = window.dagrl;
  const CUT = 80;
  const filter = { text: "", least: "", most: "", reason: "", source: "" };

  const cut = (text) => (text.length > CUT ? `${text.slice(0, CUT)}…` : text);

  function passes(row) {
    const words = filter.text.toLowerCase();
    const texts = [row.prompt, row.response, row.answer, row.demonstration].filter((text) => text !== undefined);
    const least = filter.least === "" || row.reward >= Number(filter.least);
    const most = filter.most === "" || row.reward <= Number(filter.most);
    const reason = !filter.reason || row.finish_reason === filter.reason;
    const source = !filter.source || row.data_source === filter.source;
    return least && most && reason && source && (!words || texts.some((text) => text.toLowerCase().includes(words)));
  }

  function list(rows, open, across) {
    const columns = [
      ...(across ? [{ name: "Step", width: "70px" }] : []),
      { name: "Sample", open: true, width: "88px" }, { name: "Prompt", left: true, format: cut }, { name: "Response", left: true, format: cut },
      { name: "Reward", width: "90px" }, { name: "Advantage", width: "110px" }, { name: "Tokens", width: "86px" }, { name: "Ended", left: true, width: "84px" },
    ];
    const cells = rows.map(({ step, row }) => [
      ...(across ? [step] : []),
      row.sample_id, row.asked, row.response ?? row.demonstration ?? "", row.reward, row.advantage, row.token_count, row.finish_reason ?? "",
    ]);
    return table(columns, cells, { open: (cells) => (across ? open(cells[1], cells[0]) : open(cells[0])), limit: 20, label: "Samples" });
  }

  function choices(rows, name) {
    return [...new Set(rows.map((row) => row[name]).filter((value) => value))].sort();
  }

  function selection(label, key, values, changed) {
    if (values.length < 2) return null;
    return h("label", {}, `${label} `, h("select", { onchange: (event) => { filter[key] = event.target.value; changed(); } },
      h("option", { value: "" }, "all"), values.map((value) => h("option", { value, selected: filter[key] === value }, value))));
  }

  function field(label, key, type, changed) {
    return h("label", {}, `${label} `, h("input", {
      type, step: "any", value: filter[key], class: type === "number" ? "short" : null,
      oninput: (event) => { filter[key] = event.target.value; changed(); },
    }));
  }

  function chooser(app, kinds, kind, steps, step) {
    const place = steps.indexOf(step);
    const to = (index) => () => app.go({ step: steps[index], sample: undefined });
    return h("div", { class: "controls" },
      kinds.length > 1 ? h("label", {}, "From ", h("select", { onchange: (event) => app.go({ kind: event.target.value, step: undefined, sample: undefined }) },
        kinds.map((each) => h("option", { value: each, selected: each === kind }, each === "train" ? "training" : "validation")))) : null,
      h("button", { onclick: to(place - 1), disabled: place <= 0, "aria-label": "Step before" }, "←"),
      h("label", {}, "Step ", h("select", { onchange: (event) => app.go({ step: Number(event.target.value), sample: undefined }) },
        steps.map((each) => h("option", { value: each, selected: each === step }, each)))),
      h("button", { onclick: to(place + 1), disabled: place >= steps.length - 1, "aria-label": "Step after" }, "→"));
  }

  async function everywhere(app, kind, steps, found, progress) {
    const all = [];
    for (const step of steps) {
      progress.value = `step ${step}`;
      for (const row of (await app.run.samples(kind, step)) ?? []) if (passes(row)) all.push({ step, row });
      if (all.length >= 500) break;
    }
    progress.value = `${all.length} found${all.length >= 500 ? ", and perhaps more" : ""}`;
    found(all);
  }

  async function render(view, app) {
    const kinds = ["train", "val"].filter((kind) => app.run.sampleSteps(kind).length);
    if (!kinds.length) {
      view.append(h("p", { class: "note" }, "This run has stored no samples (run.samples_per_step)."));
      return;
    }
    const kind = kinds.includes(app.params.kind) ? app.params.kind : kinds[0];
    const steps = app.run.sampleSteps(kind);
    const step = app.params.step === undefined ? steps.at(-1) : nearest(steps, Number(app.params.step));
    const rows = (await app.run.samples(kind, step)) ?? [];
    const place = h("div", {});
    const side = h("aside", { class: "side reading", "aria-live": "polite" });
    const progress = h("output", { class: "note" });

    function open(sample, other = step) {
      if (other !== step) return app.go({ step: other, sample });
      const row = rows.find((each) => each.sample_id === Number(sample));
      if (!row) return undefined;
      side.replaceChildren(...window.dagrl.conversation(row, rows, open).flat().filter(Boolean));
      app.keep({ kind, step, sample: row.sample_id });
      return undefined;
    }

    function changed() {
      const shown = rows.filter(passes);
      progress.value = `${shown.length} of ${rows.length}`;
      place.replaceChildren(list(shown.map((row) => ({ step, row })), open, false));
    }

    const found = (all) => place.replaceChildren(list(all, open, true));
    view.append(
      chooser(app, kinds, kind, steps, step),
      h("div", { class: "controls" },
        field("Search", "text", "search", changed), field("Reward from", "least", "number", changed), field("to", "most", "number", changed),
        selection("Ended", "reason", choices(rows, "finish_reason"), changed), selection("Source", "source", choices(rows, "data_source"), changed),
        h("button", { onclick: () => everywhere(app, kind, steps, found, progress) }, "Search all steps"), progress),
      h("div", { class: "beside samples" }, place, side),
    );
    const whole = app.run.overview.samples[kind].length;
    if (steps.length < whole) view.append(h("p", { class: "note" }, `This file has the samples of ${steps.length} of ${whole} steps; dagrl ui shows all.`));
    changed();
    open(app.params.sample ?? rows[0]?.sample_id);
  }

  window.dagrl.views.samples = { title: "Samples", render };
})();
