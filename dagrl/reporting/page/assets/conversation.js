"use strict";
// One sample as a conversation, and its tokens coloured by how far log-probs are apart.
(() => {
  const { h, number, table } = window.dagrl;
  // Messages of chat templates: ChatML, and that of Llama 3.
  const TEMPLATES = [
    /<\|im_start\|>([^\n]*)\n([\s\S]*?)(?:<\|im_end\|>\n?|$)/g,
    /<\|start_header_id\|>([\s\S]*?)<\|end_header_id\|>\n\n([\s\S]*?)(?:<\|eot_id\|>|$)/g,
  ];
  const LEAST_SCALE = 0.05;
  const MOST_OPACITY = 0.6;
  const VIEWS = [
    { key: "old", who: "trainer", name: "trainer − generator", of: (row, at) => minus(row.old_logprob, row.rollout_logprob, at), needs: ["old_logprob", "rollout_logprob"] },
    { key: "ref", who: "reference", name: "reference − generator", of: (row, at) => minus(row.ref_logprob, row.rollout_logprob, at), needs: ["ref_logprob", "rollout_logprob"] },
    { key: "surprise", name: "log-prob of the generator", of: (row, at) => row.rollout_logprob[at], needs: ["rollout_logprob"] },
  ];

  const minus = (one, other, at) => (one[at] === null || other[at] === null ? null : one[at] - other[at]);

  function bubble(role, text, note) {
    return h("div", { class: `bubble ${role}` }, h("div", { class: "who" }, role, note ? h("span", { class: "note" }, ` ${note}`) : null), h("pre", {}, text));
  }

  function messages(prompt) {
    for (const template of TEMPLATES) {
      const found = [...prompt.matchAll(template)].filter(([, role, text]) => text.trim() || role !== "assistant");
      if (found.length) return found.map(([, role, text]) => bubble(role.trim(), text));
    }
    return [bubble("prompt", prompt)];
  }

  function replies(row) {
    if (row.turns?.length) {
      return row.turns.map((turn) => turn.turn === null || turn.turn === undefined
        ? bubble("observation", turn.text)
        : bubble("policy", turn.text, `turn ${turn.turn}${turn.reward === null || turn.reward === undefined ? "" : `, reward ${number(turn.reward)}`}`));
    }
    return [row.response === undefined ? null : bubble("policy", row.response)];
  }

  function shading(value, scale, onlyNegative) {
    if (value === null || value === undefined) return null;
    const part = Math.min(1, Math.abs(value) / scale);
    if (part < 0.02) return null;
    const hue = value < 0 ? "214, 69, 65" : "56, 116, 203";
    return `rgba(${onlyNegative ? "202, 138, 4" : hue}, ${(part * MOST_OPACITY).toFixed(3)})`;
  }

  function tokens(row) {
    const known = VIEWS.filter((view) => view.needs.every((name) => row[name]));
    if (!row.token_text || !known.length) {
      return h("p", { class: "note" }, "With run.sample_logprobs: true, a run stores its tokens and their log-probs, and they are coloured here.");
    }
    const area = h("div", {});
    const draw = (view) => area.replaceChildren(...coloured(row, view, known));
    const select = h("select", { onchange: (event) => draw(known.find((view) => view.key === event.target.value)) },
      known.map((view) => h("option", { value: view.key }, view.name)));
    draw(known[0]);
    return h("section", {}, h("div", { class: "controls" }, h("h3", {}, "Tokens"), h("label", {}, "Colour by ", select)), area);
  }

  function coloured(row, view, known) {
    const values = row.token_text.map((_, at) => view.of(row, at));
    const own = values.filter((value, at) => value !== null && !(row.token_turn && row.token_turn[at] === 0));
    const sizes = own.map((value) => Math.abs(value)).sort((one, other) => one - other);
    const only = view.key === "surprise";
    const scale = Math.max(only ? 1 : LEAST_SCALE, sizes[Math.floor(0.99 * (sizes.length - 1))] ?? 0);
    const marks = row.token_text.map((text, at) => {
      const observation = row.token_turn && row.token_turn[at] === 0;
      const said = known.map((each) => `${each.name}: ${number(each.of(row, at))}`).join("\n");
      return h("span", {
        class: `token ${observation ? "observed" : ""}`, title: `token ${at}${observation ? ", an observation" : ""}\n${said}`,
        style: { backgroundColor: observation ? "" : (shading(values[at], scale, only) ?? "") },
      }, visible(text));
    });
    const most = sizes.at(-1) ?? 0;
    const legend = only
      ? [h("span", { class: "key", style: { backgroundColor: shading(-scale, scale, true) } }, `${number(-scale)} or less`), " the generator was surprised"]
      : [
          h("span", { class: "key", style: { backgroundColor: shading(-scale, scale) } }, `−${number(scale)}`), ` less likely to the ${view.who} than to the generator  `,
          h("span", { class: "key", style: { backgroundColor: shading(scale, scale) } }, `+${number(scale)}`), ` more likely; the largest is ${number(most)}`,
        ];
    const rows = row.token_text.map((text, at) => [at, visible(text), ...known.map((each) => each.of(row, at))]);
    const columns = [{ name: "#" }, { name: "Token", left: true }, ...known.map((each) => ({ name: each.name }))];
    const list = h("details", { ontoggle: (event) => {
      if (event.target.open && event.target.children.length === 1) event.target.append(table(columns, rows, { label: "Tokens", limit: 20 }));
    } }, h("summary", {}, "As a table"));
    return [h("p", { class: "tokens" }, marks), h("p", { class: "note" }, legend), list];
  }

  // Line ends and spaces are seen, and still break the line.
  const visible = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");

  function facts(row) {
    const pairs = [
      ["reward", number(row.reward)], ["advantage", row.advantage === undefined ? null : number(row.advantage)],
      ["tokens", row.token_count], ["ended by", row.finish_reason], ["weights' version", row.versions?.length > 1 ? `${row.versions[0]} to ${row.versions.at(-1)}` : row.policy_version],
      ["data source", row.data_source], ["group", row.group_id], ["images", row.images?.join(", ")],
    ];
    return h("p", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
      h("span", { class: "chip" }, `${name} `, h("strong", {}, String(value)))));
  }

  // Images of the prompt, embedded in the samples; nothing is loaded from their paths.
  function images(row) {
    const shown = (row.thumbnails ?? []).filter((source) => source.startsWith("data:image/jpeg;base64,"));
    if (!shown.length) return null;
    return h("p", { class: "thumbnails", "aria-label": "Images of the prompt" }, shown.map((src, at) =>
      h("img", { src, loading: "lazy", decoding: "async", alt: `image ${at}`, title: row.images?.[at] })));
  }

  // Other responses to the same prompt.
  function siblings(row, rows, open) {
    const others = rows.filter((each) => each.group_id === row.group_id && each.data_set === row.data_set);
    if (others.length < 2) return null;
    return h("p", { class: "siblings" }, h("span", { class: "note" }, "The group: "), others.map((each) =>
      h("button", { class: "chip", "aria-current": each === row ? "true" : null, title: each.response, onclick: () => open(each.sample_id) },
        number(each.reward))));
  }

  // The requests of a sequence: what the agent gave, and what the policy replied.
  function requests(row) {
    const found = [];
    let given = row.prompt;
    for (const turn of row.turns ?? []) {
      if (turn.turn === null || turn.turn === undefined) given = turn.text;
      else {
        found.push({ given, reply: turn.text });
        given = "";
      }
    }
    return found.length ? found : [{ given, reply: "" }];
  }

  // The sequences of an agent's trajectory, joined where they share requests.
  function tree(row, rows, open) {
    const branches = rows.filter((each) => row.trajectory !== undefined && each.trajectory === row.trajectory && each.data_set === row.data_set);
    if (branches.length < 2) return null;
    const roots = [];
    for (const branch of branches) {
      let level = roots;
      let last = null;
      for (const { given, reply } of requests(branch)) {
        last = level.find((each) => each.given === given && each.reply === reply);
        if (!last) level.push((last = { given, reply, next: [], ends: [] }));
        level = last.next;
      }
      last.ends.push(branch);
    }
    const draw = (each) => h("li", {},
      h("div", { class: "request" }, h("span", { class: "note", title: each.given }, tail(each.given)), ` ${head(each.reply)} `, each.ends.map((branch) =>
        h("button", { class: "chip", "aria-current": branch === row ? "true" : null, onclick: () => open(branch.sample_id) },
          `sample ${branch.sample_id}, reward ${number(branch.reward)}`))),
      each.next.length ? h("ul", {}, each.next.map(draw)) : null);
    return h("section", { class: "tree", "aria-label": "Trajectory" },
      h("h3", {}, `Trajectory ${row.trajectory}: ${branches.length} sequences`), h("ul", {}, roots.map(draw)));
  }

  const SHORT = 60;
  const head = (text) => (text.length > SHORT ? `${text.slice(0, SHORT)}…` : text);
  // The end of a prompt says what it asks.
  const tail = (text) => (text.length > SHORT ? `…${text.slice(-SHORT)}` : text);

  function conversation(row, rows, open) {
    return [
      h("h2", {}, `Sample ${row.sample_id}`),
      facts(row),
      siblings(row, rows, open),
      tree(row, rows, open),
      images(row),
      h("div", { class: "conversation" }, messages(row.prompt), replies(row),
        row.demonstration === undefined ? null : bubble("demonstration", row.demonstration),
        row.answer ? bubble("answer", row.answer, "the reference") : null),
      row.response === undefined ? null : tokens(row),
    ];
  }

  window.dagrl.conversation = conversation;
})();
