"use strict";
// The frame of the page: views, runs, addresses, and news of runs that go on.
(() => {
  const { h, charts, manifest, views, ask, Run } = window.dagrl;
  const POLL_MS = 2000;
  // Of more runs than this the newest are shown at first; a field filters their names.
  const MOST_SHOWN = 8;

  const app = {
    runs: manifest.runs.map((entry, place) => new Run(entry, place)),
    view: "overview",
    params: {},
    selectRange: () => {},

    get run() {
      return this.runs.find((run) => run.id === this.params.run) ?? this.shownRuns[0] ?? this.runs.find((run) => run.shown) ?? this.runs[0];
    },

    get shownRuns() {
      return this.runs.filter((run) => run.shown && run.overview);
    },

    link(view, params) {
      const kept = { run: this.run?.id, ...params };
      const text = new URLSearchParams(Object.entries(kept).filter(([, value]) => value !== undefined && value !== null));
      return `#${view}?${text}`;
    },

    // Go to another place of the same view.
    go(params) {
      location.hash = this.link(this.view, { ...this.params, ...params });
    },

    // Remember the place without drawing the view anew.
    keep(params) {
      this.params = { ...this.params, ...params };
      history.replaceState(null, "", this.link(this.view, this.params));
    },
  };

  const main = h("main", { id: "main", tabindex: -1 });
  const nav = h("nav", { "aria-label": "Views" });
  const runs = h("div", { class: "runs", role: "group", "aria-label": "Runs" });
  const status = h("p", { class: "status note", role: "status" });
  const wanted = h("input", { type: "search", class: "filter", placeholder: "Filter runs…", "aria-label": "Filter runs", oninput: () => drawRuns() });
  let drawing = 0;

  // Runs whose data are needed now.
  const needed = () => app.runs.filter((run) => run.shown || run === app.run);

  function showNewest() {
    if (app.runs.length <= MOST_SHOWN) return;
    const newest = [...app.runs].sort((one, other) => (other.entry.changed ?? 0) - (one.entry.changed ?? 0)).slice(0, MOST_SHOWN);
    for (const run of app.runs) run.shown = newest.includes(run);
  }

  function read() {
    const [view, query] = location.hash.slice(1).split("?");
    app.view = views[view] ? view : Object.keys(views)[0];
    app.params = Object.fromEntries(new URLSearchParams(query ?? ""));
  }

  // Draw the view of the address; a newer call overtakes one that waits for data.
  async function draw({ keepScroll = false } = {}) {
    const turn = ++drawing;
    const content = h("div", { class: "view" });
    nav.replaceChildren(...Object.entries(views).map(([name, view]) =>
      h("a", { href: app.link(name, {}), "aria-current": name === app.view ? "page" : null }, view.title)));
    drawRuns();
    if (app.run && !app.run.overview) await loaded(app.run);
    if (turn !== drawing) return;
    if (!app.run?.overview) {
      main.replaceChildren(h("p", { class: "note" }, manifest.runs.length ? "Loading…" : "There is no run yet."));
      return;
    }
    charts.disposeAll();
    try {
      await views[app.view].render(content, app);
    } catch (error) {
      content.append(h("p", { class: "warning" }, `This view cannot be shown: ${error.message}`));
      console.error(error);
    }
    if (turn !== drawing) return;
    main.replaceChildren(content);
    document.title = `${app.run.name} – dagrl`;
    if (!keepScroll) window.scrollTo(0, 0);
    document.body.dataset.drawn = app.view;
  }

  const loaded = (run) => run.load().catch((error) => { status.textContent = `${run.name}: ${error.message}`; });

  async function toggle(run, shown) {
    run.shown = shown;
    if (shown && !run.overview) await loaded(run);
    await draw({ keepScroll: true });
  }

  function drawRuns() {
    const several = app.runs.length > 1;
    const words = wanted.value.toLowerCase();
    wanted.hidden = app.runs.length <= MOST_SHOWN;
    runs.replaceChildren(...app.runs.filter((run) => run.name.toLowerCase().includes(words)).map((run) => {
      const swatch = h("span", { class: "swatch", style: { backgroundColor: run.color } });
      const choose = h("button", { class: "name", "aria-pressed": String(run === app.run), title: "Show this run", onclick: () => app.go({ run: run.id, step: undefined, sample: undefined }) }, run.name);
      const box = several ? h("input", {
        type: "checkbox", checked: run.shown, "aria-label": `${run.name} in the curves`, onchange: (event) => toggle(run, event.target.checked),
      }) : null;
      return h("span", { class: "run" }, box, swatch, choose);
    }));
  }

  async function poll() {
    try {
      const entries = await ask("runs");
      for (const entry of entries) if (!app.runs.some((run) => run.id === entry.id)) app.runs.push(new Run(entry, app.runs.length));
      let changed = false;
      for (const run of needed()) {
        if (run.overview) changed = (await run.refresh()) || changed;
        else { await run.load(); changed = true; }
      }
      status.textContent = `live, ${new Date().toLocaleTimeString()}`;
      // Somebody who reads or types is not disturbed.
      const busy = main.contains(document.activeElement) && document.activeElement.matches("input, select");
      if (changed && !busy && app.view !== "samples" && app.params.step === undefined) await draw({ keepScroll: true });
    } catch (error) {
      status.textContent = `no answer: ${error.message}`;
    }
    setTimeout(poll, POLL_MS);
  }

  async function start() {
    document.body.append(
      h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, "To the content"),
      h("header", {}, h("h1", {}, "dagrl"), wanted, runs, status), nav, main);
    if (manifest.live) showNewest();
    read();
    window.addEventListener("hashchange", () => { read(); draw(); });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw({ keepScroll: true }));
    if (!manifest.live) status.textContent = `written ${new Date(manifest.written * 1000).toLocaleString()} by dagrl ${manifest.version}`;
    await Promise.all(needed().map(loaded));
    await draw();
    document.body.dataset.ready = "true";
    if (manifest.live) setTimeout(poll, POLL_MS);
  }

  window.dagrl.app = app;
  start();
})();
