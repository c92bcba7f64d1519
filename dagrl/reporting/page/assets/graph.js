"use strict";
// The DAG with the time and the memory of each node.
(() => {
  const { h, svg, number, seconds, percent, shade, mean } = window.dagrl;
  const RECENT = 20;

  // Mean of a metric over the last steps that have it.
  const recent = (run, name) => mean(run.metrics.inTraining(name).slice(-RECENT));

  function facts(run, node) {
    const length = recent(run, `time/${node.name}_s`);
    const step = recent(run, "time/step_s");
    const share = length !== null && step ? length / step : null;
    const memory = recent(run, `memory/${node.name}_peak_gib`);
    const parts = [length === null ? null : seconds(length), share === null ? null : percent(share), memory === null ? null : `${number(memory)} GiB`];
    return { share, text: parts.filter(Boolean).join(" · ") };
  }

  function box(run, node, choose) {
    const [x, y, width, height] = node.box;
    const { share, text } = facts(run, node);
    const engine = node.executor && node.executor !== "host";
    const middle = x + width / 2;
    const line = (content, at, name) => svg("text", { x: middle, y: y + at, class: name, "text-anchor": "middle" }, content);
    const open = () => choose(node);
    return svg("g", {
      class: `node ${node.skipped ? "skipped" : ""}`, tabindex: 0, role: "button",
      "aria-label": `${node.name}, ${node.subtitle}. ${text}`, onclick: open,
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } },
    },
    svg("rect", { x, y, width, height, rx: 8, class: "frame" }),
    engine ? svg("rect", { x, y, width: 6, height, rx: 3, fill: shade(node.executor, "engine") }) : null,
    line(node.name, 20, "name"), line(node.subtitle, 36, "subtitle"),
    text ? line(text, 53, "facts") : null,
    share === null ? null : svg("rect", { x: x + 10, y: y + height - 7, width: Math.max(1, (width - 20) * Math.min(1, share)), height: 3, rx: 1.5, class: "share" }));
  }

  function picture(run, dag, choose) {
    const edges = dag.edges.map((edge) => svg("polyline", {
      points: edge.points.map((point) => point.join(",")).join(" "), class: "edge", "marker-end": edge.arrow ? "url(#arrow)" : null,
    }));
    const labels = dag.labels.map((label) => {
      const [x, y, width, height] = label.box;
      return svg("g", {}, svg("rect", { x, y, width, height, class: "plate" }),
        label.columns.map((column, place) => svg("text", { x: x + width / 2, y: y + 13 * (place + 0.8) + 2, class: "column", "text-anchor": "middle" }, column)));
    });
    return svg("svg", { viewBox: `0 0 ${dag.width} ${dag.height}`, class: "dag", style: { maxWidth: `${dag.width * 1.15}px` }, role: "group", "aria-label": "The DAG of the pipeline" },
      svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto" },
        svg("path", { d: "M0,0 L10,5 L0,10 z", class: "tip" }))),
      edges, labels, dag.nodes.map((node) => box(run, node, choose)));
  }

  function details(app, node) {
    const belongs = new RegExp(`(^|/)${node.name.replace(/[^\w]/g, "\\$&")}(_|/|$)`);
    const names = [...app.run.metrics.columns.keys()].filter((name) => belongs.test(name));
    return [
      h("h2", {}, node.name),
      h("p", {}, node.subtitle, node.skipped ? ` Skipped: ${node.skipped}` : ""),
      names.length
        ? h("div", { class: "charts one" }, names.map((name) => window.dagrl.metricCard(name, app)))
        : h("p", { class: "note" }, "It has no metrics under its own name."),
    ];
  }

  function render(view, app) {
    const { dag } = app.run.overview;
    if (dag.error) {
      view.append(h("p", { class: "warning" }, dag.error));
      return;
    }
    const side = h("aside", { class: "side", "aria-live": "polite" }, h("p", { class: "note" }, "Choose a node to see its metrics."));
    const choose = (node) => side.replaceChildren(...details(app, node));
    view.append(
      h("p", { class: "note" }, `Mean times of the last ${RECENT} steps, and their share of a step; nodes may overlap. Memory is the peak of a GPU.`),
      h("div", { class: "beside" }, h("div", { class: "scroll", tabindex: 0 }, picture(app.run, dag, choose)), side),
    );
  }

  window.dagrl.views.graph = { title: "DAG", render };
})();
