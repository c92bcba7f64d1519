"use strict";
// A step as it ran: bars by group and worker, idle time with its cause, and the plan below.
(() => {
  const { h, number, seconds, percent, shade, color, charts, table } = window.dagrl;
  const ROW = 26;

  // Rows of a Gantt chart: bars that overlap on a worker go to several.
  function rowsOf(spans, idle, suffix = "") {
    const groups = [...new Set([...spans.map((span) => span[1]), ...idle.map((pause) => pause[0])])].sort();
    const rows = [];
    const bars = [];
    for (const group of groups) {
      const ends = new Map();
      for (const span of spans.filter((each) => each[1] === group).sort((one, other) => one[3] - other[3])) {
        const [name, , worker, start, length, shard, step] = span;
        const lanes = ends.get(worker) ?? ends.set(worker, []).get(worker);
        let lane = lanes.findIndex((lane) => lane.end <= start + 1e-4);
        if (lane < 0) {
          lane = lanes.length;
          lanes.push({ row: rows.length });
          rows.push({ group, label: lane ? "" : `${group === "host" ? "" : `${group} · `}${worker}${suffix}` });
        }
        lanes[lane].end = start + length;
        bars.push({ kind: "span", row: lanes[lane].row, name, group, worker, start, length, shard, step });
      }
      const pauses = idle.filter((pause) => pause[0] === group);
      if (pauses.length) {
        for (const [, start, length, cause] of pauses) bars.push({ kind: "idle", row: rows.length, name: cause, group, start, length });
        rows.push({ group, label: `${group} · idle` });
      }
    }
    return { rows, bars };
  }

  function gantt(step, view, planned) {
    const actual = rowsOf(view.spans, view.idle);
    if (view.path.length) {
      for (const [name, , cause, start, length] of view.path) actual.bars.push({ kind: "path", row: actual.rows.length, name, cause, start, length, step });
      actual.rows.push({ group: "", label: "critical path" });
    }
    const plan = planned ? rowsOf(planned, [], " (plan)") : { rows: [], bars: [] };
    const rows = [...actual.rows, ...plan.rows];
    const bars = [...actual.bars, ...plan.bars.map((bar) => ({ ...bar, row: bar.row + actual.rows.length, planned: true }))];
    const end = Math.max(view.seconds, ...bars.map((bar) => bar.start + bar.length));
    const element = h("div", { class: "gantt", role: "img", "aria-label": `Timeline of step ${step}`, style: { height: `${rows.length * ROW + 60}px` } });
    new charts.Chart(element, () => ganttOption(step, rows, bars, end));
    return element;
  }

  function ganttOption(step, rows, bars, end) {
    const labels = rows.map((row) => row.label);
    const longest = Math.max(...labels.map((label) => label.length));
    const left = Math.min(230, 20 + 6.6 * longest, 0.3 * window.innerWidth);
    return {
      animation: false,
      textStyle: charts.textStyle(),
      grid: { left, right: 20, top: 6, bottom: 44 },
      xAxis: { type: "value", min: 0, max: end, ...charts.axisStyle(), axisLabel: { ...charts.axisStyle().axisLabel, formatter: seconds } },
      yAxis: { type: "category", data: labels, inverse: true, ...charts.axisStyle(), splitLine: { show: false }, axisLabel: { color: color("ink"), fontSize: 11, interval: 0, width: left - 12, overflow: "truncate" } },
      dataZoom: [
        { type: "slider", xAxisIndex: 0, filterMode: "weakFilter", height: 14, bottom: 4, borderColor: color("line"), showDetail: false, brushSelect: false },
        { type: "inside", xAxisIndex: 0, filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
      ],
      tooltip: charts.tooltip({ formatter: (item) => told(bars[item.dataIndex], step) }),
      series: [{
        type: "custom",
        encode: { x: [1, 2], y: 0 },
        data: bars.map((bar) => [bar.row, bar.start, bar.start + bar.length]),
        renderItem: (params, api) => drawn(bars[params.dataIndex], step, params, api),
      }],
    };
  }

  function drawn(bar, step, params, api) {
    const [left, middle] = api.coord([bar.start, bar.row]);
    const [right] = api.coord([bar.start + bar.length, bar.row]);
    const height = bar.kind === "idle" ? ROW * 0.5 : ROW * 0.74;
    const area = params.coordSys;
    const x = Math.max(left, area.x);
    const width = Math.max(1.5, Math.min(right, area.x + area.width) - x);
    if (right < area.x || left > area.x + area.width) return null;
    const idle = bar.kind === "idle";
    const fill = idle || bar.name === "driver" ? color("idle") : shade(bar.name);
    const opacity = bar.planned ? 0.45 : bar.step === step || idle ? 1 : 0.35;
    const text = { text: width > 34 ? bar.name : "", width: width - 6, overflow: "truncate", fill: idle || bar.planned || bar.step !== step || bar.name === "driver" ? color("ink") : "#fff", fontSize: 10.5, x: x + 3, y: middle, verticalAlign: "middle" };
    return {
      type: "group",
      children: [
        { type: "rect", shape: { x, y: middle - height / 2, width, height, r: 2 }, style: { fill, opacity, stroke: idle ? color("line") : undefined, lineWidth: idle ? 0.5 : 0 } },
        { type: "text", silent: true, style: text },
      ],
    };
  }

  function told(bar, step) {
    const when = `from ${seconds(bar.start)} for ${seconds(bar.length)}`;
    if (bar.kind === "idle") return `${bar.group} is idle ${when}\n${bar.name === "driver" ? "no worker runs: the driver works" : `waits for ${bar.name}`}`;
    if (bar.kind === "path") return `on the critical path: ${bar.name}\n${bar.cause}\n${when}`;
    const of = [bar.shard === null || bar.shard === undefined ? "" : `shard ${bar.shard}`, bar.step === step ? "" : `step ${bar.step}`].filter(Boolean).join(", ");
    return `${bar.planned ? "planned: " : ""}${bar.name}${of ? ` (${of})` : ""}\n${bar.worker}\n${when}`;
  }

  function idleTable(view) {
    const sums = new Map();
    for (const [group, , length, cause] of view.idle) {
      const key = JSON.stringify([group, cause]);
      sums.set(key, (sums.get(key) ?? 0) + length);
    }
    const rows = [...sums].map(([key, length]) => [...JSON.parse(key), length, length / view.seconds]).sort((one, other) => other[2] - one[2]);
    const columns = [{ name: "Group", left: true }, { name: "Waits for", left: true }, { name: "Idle", format: seconds }, { name: "Of the step", format: percent }];
    return rows.length ? table(columns, rows, { label: "Idle time by cause" }) : h("p", { class: "note" }, "No group is idle.");
  }

  function nodeTable(view, step) {
    const sums = new Map();
    for (const [name, group, worker, , length, , of] of view.spans) {
      if (of !== step) continue;
      const key = JSON.stringify([name, worker.slice(0, worker.lastIndexOf("/")) || group]);
      const sum = sums.get(key) ?? { count: 0, length: 0 };
      sums.set(key, { count: sum.count + 1, length: sum.length + length });
    }
    const rows = [...sums].map(([key, sum]) => [...JSON.parse(key), sum.count, sum.length]).sort((one, other) => other[3] - one[3]);
    const columns = [{ name: "Node", left: true }, { name: "On", left: true }, { name: "Bars" }, { name: "Time", format: seconds }];
    return table(columns, rows, { label: "Time by node" });
  }

  function pathTable(view) {
    const sums = new Map();
    for (const [name, on, cause, , length] of view.path) {
      const key = JSON.stringify([name, on, cause]);
      sums.set(key, (sums.get(key) ?? 0) + length);
    }
    const rows = [...sums].map(([key, length]) => [...JSON.parse(key), length, length / view.seconds]).sort((one, other) => other[3] - one[3]);
    const columns = [
      { name: "Node", left: true }, { name: "On", left: true }, { name: "Cause", left: true },
      { name: "Time", format: seconds }, { name: "Of the step", format: percent },
    ];
    return table(columns, rows, { label: "Critical path by cause" });
  }

  // The seconds of all steps; a click selects one.
  function picker(app, steps, chosen) {
    const element = h("div", { class: "chart picker", role: "img", "aria-label": "Seconds of each step; click to choose one" });
    const lengths = new Map(app.run.overview.timed_steps.map((step, place) => [step, app.run.overview.seconds[place]]));
    const points = Float64Array.from(steps.flatMap((step) => [step, lengths.get(step) ?? NaN]));
    const chart = new charts.Chart(element, () =>
      charts.lineOption([{ name: "seconds", color: app.run.color, points }], { marks: [{ x: chosen }], format: seconds }));
    chart.onAppear = (echart) => {
      echart.getZr().on("click", (event) => {
        const x = echart.convertFromPixel({ xAxisIndex: 0 }, event.offsetX);
        app.go({ step: nearest(steps, x) });
      });
    };
    return element;
  }

  const nearest = (steps, x) => steps.reduce((best, step) => (Math.abs(step - x) < Math.abs(best - x) ? step : best));

  function chooser(app, steps, step) {
    const place = steps.indexOf(step);
    const to = (index) => () => app.go({ step: steps[Math.max(0, Math.min(steps.length - 1, index))] });
    const { timed_steps: timed, seconds: lengths } = app.run.overview;
    const slowest = () => {
      const known = timed.map((each, index) => [lengths[index], each]).filter(([, each]) => steps.includes(each) && each > steps[0]);
      app.go({ step: known.reduce((most, each) => (each[0] > most[0] ? each : most))[1] });
    };
    return h("div", { class: "controls" },
      h("button", { onclick: to(place - 1), disabled: place <= 0, "aria-label": "Step before" }, "←"),
      h("label", {}, "Step ", h("input", {
        type: "number", min: steps[0], max: steps.at(-1), value: step,
        onchange: (event) => app.go({ step: nearest(steps, Number(event.target.value)) }),
      })),
      h("button", { onclick: to(place + 1), disabled: place >= steps.length - 1, "aria-label": "Step after" }, "→"),
      h("button", { onclick: to(steps.length - 1) }, "Newest"),
      h("button", { onclick: slowest, disabled: steps.length < 3 }, "Slowest"));
  }

  async function render(view, app) {
    const steps = app.run.timedSteps;
    if (!steps.length) {
      view.append(h("p", { class: "note" }, "timeline.json has no finished step yet."));
      return;
    }
    const step = app.params.step === undefined ? steps.at(-1) : nearest(steps, Number(app.params.step));
    const [found, plan] = await Promise.all([app.run.step(step), app.run.plan()]);
    const busy = Object.entries(found.busy).map(([group, share]) => h("span", { class: "chip" }, `${group} busy ${percent(share)}`));
    view.append(
      chooser(app, steps, step),
      picker(app, steps, step),
      h("p", {}, h("strong", {}, `Step ${step}: ${seconds(found.seconds)} `), busy),
      gantt(step, found, plan?.spans),
      h("p", { class: "note" }, "Ctrl and the mouse wheel zoom. Faint bars are of other steps or of the plan."),
      h("div", { class: "halves" },
        found.path.length ? h("section", {}, h("h2", {}, "Critical path"), pathTable(found)) : null,
        h("section", {}, h("h2", {}, "Idle time by cause"), idleTable(found)),
        h("section", {}, h("h2", {}, "Time by node"), nodeTable(found, step))),
    );
    if (steps.length < app.run.overview.timed_steps.length) {
      view.append(h("p", { class: "note" }, `This file has ${steps.length} of ${app.run.overview.timed_steps.length} steps; dagrl ui shows all.`));
    }
  }

  window.dagrl.nearest = nearest;
  window.dagrl.views.steps = { title: "Timeline", render };
})();
