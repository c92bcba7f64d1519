"use strict";
// Tables with Grid.js. Cells are texts, numbers, or buttons made here.
(() => {
  const { h, number } = window.dagrl;

  function ascending(one, other) {
    const empty = (value) => value === null || value === undefined || Number.isNaN(value);
    if (empty(one) || empty(other)) return Number(empty(one)) - Number(empty(other));
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other), "en", { numeric: true });
  }

  // columns: [{name, format?, open?, width?}]; rows: lists of cells. `open(row)` is called by the button of a cell.
  function table(columns, rows, { search = false, limit = 25, sort = true, open = null, label = "" } = {}) {
    const element = h("div", { class: "table", "aria-label": label || null });
    const grid = new window.gridjs.Grid({
      columns: columns.map((column) => ({
        name: column.name,
        width: column.width,
        sort: sort ? { compare: ascending } : false,
        attributes: (cell, row) => {
          const left = column.left ? "left" : "";
          return row ? { className: `gridjs-td ${left}` } : { className: `gridjs-th ${sort ? "gridjs-th-sort" : ""} ${left}` };
        },
        formatter: (cell, row) => {
          const text = column.format ? column.format(cell) : typeof cell === "number" ? number(cell) : (cell ?? "–");
          if (!column.open || !open) return String(text);
          const onClick = () => open(row.cells.map((each) => each.data));
          return window.gridjs.h("button", { className: "link", onClick }, String(text));
        },
      })),
      data: rows,
      autoWidth: false,
      search,
      sort,
      pagination: rows.length > limit ? { limit, summary: true } : false,
      language: { search: { placeholder: "Search…" } },
    });
    grid.render(element);
    return element;
  }

  window.dagrl.table = table;
})();
