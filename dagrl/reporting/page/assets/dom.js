"use strict";
// Elements, numbers and times. All texts become text nodes.
window.dagrl = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(element.style, value);
      else if (name === "class") element.setAttribute("class", value);
      else if (name === "value" || name === "checked") element[name] = value;
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  }

  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  // Four significant digits, thousands apart: 12,345  3.142  0.00012  1.2e-7
  function number(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
    if (size !== 0 && size < 1e-4) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  function seconds(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (Math.abs(value) < 1) return `${number(value * 1000)} ms`;
    if (Math.abs(value) < 120) return `${number(value)} s`;
    if (Math.abs(value) < 7200) return `${(value / 60).toFixed(1)} min`;
    return `${(value / 3600).toFixed(1)} h`;
  }

  const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`);

  // Dark enough for white text, and light enough for a dark page.
  const PALETTE = [
    "#3f70c8", "#c8662a", "#3d8c53", "#b8434f", "#7d57bd", "#227f8e", "#94701f", "#b44f8b", "#5f7328", "#77665b",
    "#4d5fa8", "#a0522d", "#2f7d6b", "#8c3f6e",
  ];

  // A shade for each name of a kind, the same in all views; a node has the same in validation.
  const shades = new Map();
  function shade(name, kind = "node") {
    const known = shades.get(kind) ?? shades.set(kind, new Map()).get(kind);
    const plain = name.replace(/^val\//, "");
    if (!known.has(plain)) known.set(plain, PALETTE[known.size % PALETTE.length]);
    return known.get(plain);
  }

  // The value of a variable of page.css, for canvases.
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

  const most = (values) => values.reduce((best, value) => Math.max(best, value), -Infinity);
  const least = (values) => values.reduce((best, value) => Math.min(best, value), Infinity);

  return { h, svg, most, least, number, seconds, percent, shade, color, mean, PALETTE };
})();
