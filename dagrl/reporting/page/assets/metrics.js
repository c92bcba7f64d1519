"use strict";
// All metrics, several runs over each other.
(() => {
  const { h, charts } = window.dagrl;
  const FIRST = ["reward", "val", "loss", "response_tokens", "entropy", "kl", "ratio", "grad_norm", "lr", "mismatch", "time", "throughput"];
  const SINGLE = "single values";
  const MOST_MARKS = 200;
  const settings = { axis: "step", smoothing: 0.6, log: false, search: "", range: null };

  function lines(name, app, { axis, smoothing }) {
    return app.shownRuns.flatMap((run) => {
      const points = run.metrics.series(name, axis);
      if (!points.length) return [];
      const line = { name: app.shownRuns.length > 1 ? run.name : name, color: run.color };
      // A few points, such as those of validations, need no smoothing.
      if (!smoothing || points.length < 80) return [{ ...line, points }];
      return [{ ...line, points: charts.smoothed(points, smoothing) }, { ...line, points, faint: true }];
    });
  }

  function marks(app, axis) {
    return app.shownRuns.flatMap((run) =>
      run.overview.events.map((event) => ({ x: axis === "hours" ? run.metrics.hours[run.metrics.steps.indexOf(event.step)] : event.step })),
    ).filter((mark) => mark.x !== null && mark.x !== undefined).slice(0, MOST_MARKS);
  }

  // A chart of a metric with its name, of the runs that are shown.
  function metricCard(name, app, options = {}) {
    const set = () => ({ ...settings, search: "", ...(app.view === "metrics" ? {} : { range: null, axis: "step", log: false }), ...options });
    const canvas = h("div", { class: "chart", role: "img", "aria-label": summary(name, app) });
    const card = h("figure", { class: "chart-card", "data-metric": name });
    const wide = h("button", {
      class: "icon", title: "Larger or smaller", "aria-label": `${name}: larger or smaller`,
      onclick: () => card.classList.toggle("wide"),
    }, "⤢");
    card.append(h("figcaption", {}, h("span", { title: name }, name), wide), canvas);
    const chart = new charts.Chart(canvas, () => {
      const now = set();
      return charts.lineOption(lines(name, app, now), { log: now.log, range: now.range, marks: marks(app, now.axis), xName: now.axis });
    });
    if (app.view === "metrics") charts.selectable(chart, (range) => app.selectRange(range));
    return card;
  }

  function summary(name, app) {
    const said = app.shownRuns.map((run) => {
      const [first, last] = run.metrics.ends(name);
      return first === null ? "" : `${run.name}: ${window.dagrl.number(first)} to ${window.dagrl.number(last)}`;
    });
    return `${name}. ${said.filter(Boolean).join("; ")}`;
  }

  function grouped(names) {
    const groups = new Map();
    for (const name of names) {
      const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : SINGLE;
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(name);
    }
    const rank = (group) => (FIRST.includes(group) ? FIRST.indexOf(group) : FIRST.length);
    return [...groups].sort(([one], [other]) => rank(one) - rank(other) || one.localeCompare(other));
  }

  function matching(app) {
    const names = [...new Set(app.shownRuns.flatMap((run) => [...run.metrics.columns.keys()]))].sort();
    const words = settings.search.toLowerCase().split(/\s+/).filter(Boolean);
    return names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  }

  function render(view, app) {
    const list = h("div", {});
    const redraw = () => charts.all.forEach((chart) => chart.draw());
    app.selectRange = (range) => {
      settings.range = range;
      reset.hidden = !range;
      redraw();
    };
    const reset = h("button", { hidden: !settings.range, onclick: () => app.selectRange(null) }, "Whole range");
    function fill() {
      charts.disposeAll();
      const names = matching(app);
      list.replaceChildren(
        ...grouped(names).map(([group, members]) =>
          h("details", { class: "group", open: true }, h("summary", {}, `${group} `, h("span", { class: "note" }, members.length)),
            h("div", { class: "charts" }, members.map((name) => metricCard(name, app))))),
      );
      if (!names.length) list.append(h("p", { class: "note" }, "No metric has such a name."));
    }
    const shown = h("output", {}, settings.smoothing.toFixed(2));
    view.append(
      h("div", { class: "controls" },
        h("label", {}, "Search ", h("input", {
          type: "search", value: settings.search, placeholder: "reward, time/…",
          oninput: (event) => { settings.search = event.target.value; fill(); },
        })),
        h("label", {}, "Smoothing ", h("input", {
          type: "range", min: 0, max: 0.99, step: 0.01, value: settings.smoothing,
          oninput: (event) => { settings.smoothing = Number(event.target.value); shown.value = settings.smoothing.toFixed(2); redraw(); },
        }), shown),
        h("label", {}, h("input", {
          type: "checkbox", checked: settings.log, onchange: (event) => { settings.log = event.target.checked; redraw(); },
        }), " Log scale"),
        h("label", {}, "Over ", h("select", { onchange: (event) => { settings.axis = event.target.value; app.selectRange(null); } },
          h("option", { value: "step", selected: settings.axis === "step" }, "steps"),
          h("option", { value: "hours", selected: settings.axis === "hours" }, "hours"))),
        reset,
        h("span", { class: "note" }, "Drag over a chart to select a range; double-click for all.")),
      list,
    );
    fill();
  }

  window.dagrl.metricCard = metricCard;
  window.dagrl.views.metrics = { title: "Metrics", render };
})();
