"use strict";
// Where the data of the page comes from: elements of the file, or the server of `dagrl ui`.
(() => {
  const manifest = JSON.parse(document.getElementById("manifest").textContent);

  function decoded(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let place = 0; place < raw.length; place++) bytes[place] = raw.charCodeAt(place);
    return bytes;
  }

  async function unpack(id) {
    const element = document.getElementById(id);
    if (!element) return null;
    const stream = new Blob([decoded(element.textContent.trim())]).stream();
    return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).json();
  }

  async function ask(path) {
    const answer = await fetch(`api/${path}`, { cache: "no-store" });
    if (answer.status === 404) return null;
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  // The metrics of a run, a column for each; grows while the run goes on.
  class Metrics {
    constructor() {
      this.generation = -1;
      this.clear();
    }

    clear() {
      this.steps = [];
      this.hours = [];
      this.columns = new Map();
    }

    // Add a table of dagrl/reporting/run_data/views.py. True if anything is new.
    add(table) {
      if (table.generation !== this.generation) this.clear();
      const known = this.steps.length;
      const changed = table.generation !== this.generation || table.first + table.steps.length > known;
      this.generation = table.generation;
      this.steps.length = this.hours.length = table.first;
      this.steps.push(...table.steps);
      this.hours.push(...table.hours);
      for (const name of Object.keys(table.columns)) {
        if (!this.columns.has(name)) this.columns.set(name, new Array(table.first).fill(null));
      }
      for (const [name, column] of this.columns) {
        column.length = table.first;
        const values = table.columns[name];
        if (Array.isArray(values)) {
          for (const value of values) column.push(value);
        } else {
          for (let place = 0; place < table.steps.length; place++) column.push(null);
          values?.at.forEach((place, index) => (column[table.first + place] = values.values[index]));
        }
      }
      return changed;
    }

    values(name) {
      return (this.columns.get(name) ?? []).filter((value) => value !== null);
    }

    // The same without the validation before the first step, which is step 0.
    inTraining(name) {
      const column = this.columns.get(name) ?? [];
      return column.filter((value, place) => value !== null && this.steps[place] > 0);
    }

    at(name, step) {
      const place = this.steps.indexOf(step);
      return place < 0 ? null : (this.columns.get(name)?.[place] ?? null);
    }

    // The first and the last value of a metric; null without any.
    ends(name) {
      const column = this.columns.get(name) ?? [];
      const known = (value) => value !== null;
      return [column.find(known) ?? null, column.findLast(known) ?? null];
    }

    // x, y, x, y, ... of a metric. Steps without it are gaps (NaN), unless most lack it.
    series(name, axis) {
      const column = this.columns.get(name) ?? [];
      const xs = axis === "hours" ? this.hours : this.steps;
      let known = 0;
      for (const value of column) known += value !== null;
      const sparse = known * 2 < column.length;
      const points = new Float64Array(2 * column.length);
      let end = 0;
      for (let place = 0; place < column.length; place++) {
        if (xs[place] === null || (sparse && column[place] === null)) continue;
        points[end++] = xs[place];
        points[end++] = column[place] ?? NaN;
      }
      return points.subarray(0, end);
    }
  }

  class Run {
    constructor(entry, place) {
      this.id = entry.id ?? String(place);
      this.name = entry.name;
      this.entry = entry;
      this.shown = true;
      this.color = window.dagrl.PALETTE[place % window.dagrl.PALETTE.length];
      this.metrics = new Metrics();
      this.overview = null;
      this._cache = new Map();
    }

    async load() {
      const [overview, table] = await Promise.all([this._get("overview"), this._get("metrics")]);
      this.overview = overview;
      this.metrics.add(table);
    }

    // Ask for what is new. True if there was anything.
    async refresh() {
      const first = Math.max(0, this.metrics.steps.length - 1);
      const table = await ask(`${this.id}/metrics?first=${first}&generation=${this.metrics.generation}`);
      const changed = this.metrics.add(table);
      if (changed) {
        this.overview = await ask(`${this.id}/overview`);
        this._cache.clear();
      }
      return changed;
    }

    // Steps whose bars, or samples, can be shown.
    get timedSteps() {
      return manifest.live ? this.overview.timed_steps : this.entry.timed.flat();
    }

    sampleSteps(kind) {
      return manifest.live ? this.overview.samples[kind] : this.entry.samples[kind];
    }

    async step(number) {
      if (manifest.live) return this._kept(`steps/${number}`);
      const chunk = this.entry.timed.find((steps) => steps.includes(number));
      return chunk ? (await this._kept(`steps/${chunk[0]}`))[number] : null;
    }

    samples(kind, step) {
      return this._kept(`samples/${kind}/${step}`);
    }

    plan() {
      return this._kept("plan");
    }

    _get(path) {
      return manifest.live ? ask(`${this.id}/${path}`) : unpack(`${this.id}/${path}`);
    }

    _kept(path) {
      if (!this._cache.has(path)) this._cache.set(path, this._get(path));
      return this._cache.get(path);
    }
  }

  window.dagrl.manifest = manifest;
  window.dagrl.Run = Run;
  window.dagrl.ask = ask;
  window.dagrl.unpack = unpack;
})();
