"use strict";
// What was planned beside what was.
(() => {
  const { h, seconds, percent, table } = window.dagrl;
  const ratio = (value) => (value === null ? "–" : value.toFixed(2));

  async function render(view, app) {
    const plan = await app.run.plan();
    if (plan.error) {
      view.append(h("p", { class: "warning" }, `There is no plan beside this run: ${plan.error}`));
      return;
    }
    const nodes = plan.nodes.map(([name, executor, planned, actual]) => [name, executor, planned, actual, planned !== null && actual ? planned / actual : null]);
    const columns = [
      { name: "Node", left: true }, { name: "On", left: true }, { name: "Planned", format: seconds }, { name: "Actual", format: seconds }, { name: "Planned / actual", format: ratio },
    ];
    const idle = [{ name: "Group", left: true }, { name: "Idle as planned", format: percent }, { name: "Idle", format: percent }];
    view.append(
      h("p", {}, `Steps 1 to ${plan.steps}, planned by ${plan.basis}. The timeline shows a planned step below each real one.`),
      h("div", { class: "halves" },
        h("section", {}, h("h2", {}, "Seconds of a step"), table(columns, nodes, { label: "Planned and actual seconds" })),
        h("section", {}, h("h2", {}, "Idle groups"), table(idle, plan.groups, { label: "Planned and actual idle time" }))),
    );
  }

  window.dagrl.views.plan = { title: "Plan", render };
})();
