"use strict";
// Line charts that draw themselves once they can be seen. Texts of tooltips are drawn on the canvas, never as HTML.
(() => {
  const { h, number, color } = window.dagrl;
  const charts = new Set();

  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) if (entry.isIntersecting) entry.target.chart?.appear();
    },
    { rootMargin: "200px" },
  );
  const resizes = new ResizeObserver((entries) => {
    for (const entry of entries) entry.target.chart?.resize();
  });

  // A canvas of ECharts in an element, disposed with the view that made it.
  class Chart {
    constructor(element, option) {
      this.element = element;
      this.option = option;
      element.chart = this;
      charts.add(this);
      observer.observe(element);
      resizes.observe(element);
    }

    appear() {
      if (this.echart || !this.element.isConnected) return;
      this.echart = window.echarts.init(this.element, null, { renderer: "canvas" });
      this.onAppear?.(this.echart);
      this.draw();
    }

    draw() {
      this.echart?.setOption(this.option(), { notMerge: true });
    }

    resize() {
      const { clientWidth: width, clientHeight: height } = this.element;
      if (this.echart && (width !== this.echart.getWidth() || height !== this.echart.getHeight())) this.echart.resize();
    }

    dispose() {
      observer.unobserve(this.element);
      resizes.unobserve(this.element);
      this.echart?.dispose();
      charts.delete(this);
    }
  }

  function disposeAll() {
    for (const chart of [...charts]) chart.dispose();
  }

  // Exponential moving average without a bias to the first value, as TensorBoard has it.
  function smoothed(points, weight) {
    const found = points.slice();
    let last = 0;
    let rest = 1;
    for (let place = 1; place < found.length; place += 2) {
      if (Number.isNaN(found[place])) continue;
      last = last * weight + (1 - weight) * found[place];
      rest *= weight;
      found[place] = last / (1 - rest);
    }
    return found;
  }

  function textStyle() {
    return { color: color("ink"), fontFamily: getComputedStyle(document.body).fontFamily, fontSize: 11 };
  }

  function axisStyle() {
    return {
      axisLine: { lineStyle: { color: color("line") } },
      axisTick: { show: false },
      axisLabel: { color: color("faint"), fontSize: 11, hideOverlap: true },
      splitLine: { lineStyle: { color: color("grid") } },
    };
  }

  function tooltip(more) {
    return {
      renderMode: "richText",
      confine: true,
      transitionDuration: 0,
      backgroundColor: color("raised"),
      borderColor: color("line"),
      textStyle: textStyle(),
      ...more,
    };
  }

  // Where a logarithm has no value, a line has a gap.
  function positive(points) {
    return points.map((value, place) => (place % 2 && value <= 0 ? NaN : value));
  }

  // Options of a chart of lines. lines: [{name, color, points: x, y, x, y, ..., faint?}]; marks: [{x}].
  function lineOption(lines, { log = false, range = null, marks = [], xName = "step", format = number } = {}) {
    return {
      animation: false,
      textStyle: textStyle(),
      grid: { left: 54, right: 14, top: 12, bottom: 24 },
      xAxis: { type: "value", min: range?.[0] ?? "dataMin", max: range?.[1] ?? "dataMax", ...axisStyle(), splitLine: { show: false } },
      yAxis: {
        type: log ? "log" : "value",
        scale: true,
        ...axisStyle(),
        axisLabel: { ...axisStyle().axisLabel, formatter: format },
        splitNumber: 4,
      },
      tooltip: tooltip({
        trigger: "axis",
        axisPointer: { type: "line", lineStyle: { color: color("faint") } },
        formatter: (items) => {
          const shown = items.filter((item) => !item.seriesName.startsWith("\u0000"));
          const rows = shown.map((item) => `${item.marker} ${item.seriesName}  ${number(item.value[1])}`);
          return [`${xName} ${number(items[0]?.value[0])}`, ...rows].join("\n");
        },
      }),
      series: lines.map((line, place) => ({
        type: "line",
        name: line.faint ? `\u0000${line.name}` : line.name,
        dimensions: ["x", "y"],
        data: log ? positive(line.points) : line.points,
        showSymbol: line.points.length < 32 && !line.faint,
        symbolSize: 5,
        sampling: "lttb",
        silent: line.faint,
        z: line.faint ? 1 : 2,
        lineStyle: { width: line.faint ? 1 : 1.8, opacity: line.faint ? 0.35 : 1, type: line.dashed ? "dashed" : "solid" },
        itemStyle: { color: line.color },
        markLine: place === 0 && marks.length ? markLine(marks) : undefined,
      })),
    };
  }

  function markLine(marks) {
    return {
      silent: true,
      symbol: "none",
      label: { show: false },
      lineStyle: { color: color("warn"), type: "dotted", width: 1.5 },
      data: marks.map((mark) => ({ xAxis: mark.x })),
    };
  }

  // Dragging over a chart selects a range of x; a double click selects all.
  function selectable(chart, onRange) {
    chart.onAppear = (echart) => {
      const area = chart.element;
      const x = (event) => echart.convertFromPixel({ xAxisIndex: 0 }, event.clientX - area.getBoundingClientRect().left);
      const band = h("div", { class: "band", hidden: true });
      area.append(band);
      area.addEventListener("pointerdown", (event) => {
        const begin = event.clientX;
        const from = x(event);
        const move = (moved) => {
          const box = area.getBoundingClientRect();
          const [left, right] = [begin, moved.clientX].sort((one, other) => one - other);
          band.hidden = right - left < 4;
          Object.assign(band.style, { left: `${left - box.left}px`, width: `${right - left}px` });
        };
        const up = (ended) => {
          window.removeEventListener("pointermove", move);
          window.removeEventListener("pointerup", up);
          band.hidden = true;
          const range = [from, x(ended)].sort((one, other) => one - other);
          if (Math.abs(ended.clientX - begin) >= 4) onRange(range);
        };
        window.addEventListener("pointermove", move);
        window.addEventListener("pointerup", up);
      });
      area.addEventListener("dblclick", () => onRange(null));
    };
  }

  window.dagrl.charts = { Chart, disposeAll, smoothed, lineOption, selectable, textStyle, axisStyle, tooltip, all: charts };
})();
