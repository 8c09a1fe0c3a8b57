// The page of shorthaul.notebook.Explorer: a step by modules, then kernels, with heat, and the details
// of the chosen kernel and its decisions. Owns the drawing; all numbers come from Python.

const COLOURS = { time: "time", bytes: "bytes moved", distance: "time beyond the bound" };
const LEVELS = { modules: "modules", kernels: "kernels" };
const TRAITS = ["step", "module", "level", "colour", "selected", "previewed", "states", "at", "message"];
const STAGES = ["forward", "backward"];

const element = (tag, options = {}, ...children) => {
  const { data = {}, ...properties } = options;
  const made = Object.assign(document.createElement(tag), properties);
  Object.assign(made.dataset, data);
  made.append(...children);
  return made;
};

const bytes = (n) => {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(n) < 1024) return `${unit === "B" ? n.toFixed(0) : n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(2)} GiB`;
};
const ms = (seconds) => `${(seconds * 1e3).toFixed(3)} ms`;
const times = (ratio) => `${ratio.toFixed(1)} × bound`;

const isWithin = (module, path) => !path || module === path || module.startsWith(`${path}.`);

// What a kernel counts for a module: the share of its operators that lie in it.
const share = (kernel, path) =>
  kernel.operators.filter((o) => isWithin(o.module, path)).length / kernel.operators.length;

// Sums over a module's shares of kernels.
const total = (kernels, path) => {
  const sum = { seconds: 0, bytes_moved: 0, roofline_seconds: 0 };
  for (const kernel of kernels) {
    const part = share(kernel, path);
    for (const key of Object.keys(sum)) sum[key] += part * kernel[key];
  }
  return { ...sum, distance: sum.roofline_seconds ? sum.seconds / sum.roofline_seconds : 0 };
};

// The modules directly below a path that kernels have operators of, in the order of the step.
const childrenOf = (kernels, path) => {
  const found = new Map();
  for (const { module } of kernels.flatMap((kernel) => kernel.operators)) {
    if (module === path || !isWithin(module, path)) continue;
    const name = module.slice(path ? path.length + 1 : 0).split(".")[0];
    found.set(path ? `${path}.${name}` : name, name);
  }
  return [...found];
};

const HEATS = {
  time: (it) => it.seconds,
  bytes: (it) => it.bytes_moved,
  distance: (it) => Math.max(0, it.seconds - it.roofline_seconds),
};

const FACTS = {
  time: (it) => ms(it.seconds),
  bytes: (it) => bytes(it.bytes_moved),
  distance: (it) => times(it.distance),
};

function render({ model, el }) {
  const root = element("div", { className: "shorthaul-explorer" });
  const bar = element("div", { className: "bar" });
  const map = element("div", { className: "map" });
  const details = element("div", { className: "details" });
  const states = element("div");
  const sentences = element("div", { className: "sentences soft" });
  let savePath = "recipe.toml";
  root.append(bar, element("div", { className: "panes" }, map, details), states, sentences);
  el.append(root);

  const step = () => model.get("step");
  const change = (values) => {
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    model.save_changes();
  };
  const open = (path) => {
    const hasChildren = childrenOf(step().kernels, path).length > 0;
    change({ module: path, level: hasChildren ? "modules" : "kernels" });
  };

  const choice = (title, trait, names) => {
    const buttons = Object.entries(names).map(([value, text]) => {
      const button = element("button", { textContent: text, data: { [trait]: value } });
      button.setAttribute("aria-pressed", model.get(trait) === value);
      button.onclick = () => change({ [trait]: value });
      return button;
    });
    return element("span", {}, element("span", { className: "soft", textContent: title }), ...buttons);
  };

  const drawBar = () => {
    const path = model.get("module");
    const crumbs = element("span", { className: "path" });
    const parts = path ? path.split(".") : [];
    [step().title, ...parts].forEach((name, i) => {
      const to = parts.slice(0, i).join(".");
      const crumb = element("button", { textContent: name, data: { crumb: to } });
      crumb.onclick = () => open(to);
      if (i) crumbs.append("›");
      crumbs.append(crumb);
    });
    const legend = element("span", { className: "soft" }, "little", element("i", { className: "ramp" }), "most");
    bar.replaceChildren(crumbs, choice("show", "level", LEVELS), choice("colour", "colour", COLOURS), legend);
  };

  const card = (title, numbers, heat, note) => {
    const facts = Object.keys(FACTS).map((name) => FACTS[name](numbers)).join(" · ");
    const made = element("button", { className: "card" }, element("b", { textContent: title }));
    if (note) made.append(" ", element("span", { className: "soft", textContent: note }));
    made.append(element("small", { textContent: facts }));
    made.style.setProperty("--heat", heat.toFixed(3));
    return made;
  };

  const drawModules = () => {
    const { kernels } = step();
    const path = model.get("module");
    const value = HEATS[model.get("colour")];
    const rows = childrenOf(kernels, path).map(([to, name]) => ({ to, name, sum: total(kernels, to) }));
    const hottest = Math.max(...rows.map((row) => value(row.sum)), 1e-30);
    const cards = rows.map(({ to, name, sum }) => {
      const made = card(name, sum, value(sum) / hottest, "");
      made.dataset.module = to;
      made.onclick = () => open(to);
      return made;
    });
    const left = total(kernels, path);
    for (const { sum } of rows) for (const key of ["seconds", "bytes_moved", "roofline_seconds"]) left[key] -= sum[key];
    left.distance = left.roofline_seconds > 0 ? left.seconds / left.roofline_seconds : 0;
    if (left.bytes_moved > 0.5) {
      const own = card("operators of its own", left, Math.min(1, Math.max(0, value(left)) / hottest), "");
      own.dataset.own = path;
      own.onclick = () => change({ level: "kernels" });
      cards.push(own);
    }
    map.replaceChildren(...cards);
  };

  const nearOf = (kernel) => {
    const { containers } = step();
    const sources = kernel.reads.flatMap((at) => containers[at].writers);
    return new Set([...sources, ...kernel.writes.flatMap((at) => containers[at].readers)]);
  };

  const drawKernels = () => {
    const { kernels } = step();
    const value = HEATS[model.get("colour")];
    const selected = model.get("selected");
    const near = selected >= 0 ? nearOf(kernels[selected]) : new Set();
    const hottest = Math.max(...kernels.map(value), 1e-30);
    const columns = STAGES.map((stage) => {
      const column = element("div", {}, element("h4", { textContent: stage }));
      kernels.forEach((kernel, i) => {
        if (kernel.stage !== stage || !share(kernel, model.get("module"))) return;
        const title = kernel.operators.map((o) => o.node).join(" + ");
        const made = card(title, kernel, value(kernel) / hottest, kernel.path);
        made.dataset.kernel = i;
        made.classList.toggle("near", near.has(i) && i !== selected);
        made.setAttribute("aria-pressed", i === selected);
        made.onclick = () => change({ selected: i });
        column.append(made);
      });
      return column;
    });
    map.replaceChildren(element("div", { className: "columns" }, ...columns));
  };

  const containerItem = (at, neighbours) => {
    const container = step().containers[at];
    const shape = container.shape.length ? container.shape.join(" × ") : "one number";
    const what = `${container.title}: ${container.dtype}, ${shape}, ${bytes(container.bytes)}, ${container.role} `;
    const item = element("li", { data: { container: at } }, what);
    for (const i of neighbours(container)) {
      const to = element("button", { textContent: `${step().kernels[i].stage} ${step().kernels[i].name}` });
      to.onclick = () => change({ selected: i, module: "", level: "kernels" });
      item.append(to);
    }
    return item;
  };

  const section = (title, items) =>
    items.length ? [element("h4", { textContent: `${title} (${items.length})` }), element("ul", {}, ...items)] : [];

  const decisionItem = (at) => {
    const decision = step().decisions[at];
    const saves = decision.applied ? "saves" : "would save";
    const gain = decision.bytes > 0 ? ` (${saves} ${bytes(decision.bytes)})` : "";
    const text = `${decision.kind} at ${decision.node}: ${decision.sentence}${gain} `;
    const item = element("li", { data: { decision: at } }, text);
    if (decision.may_change) {
      const ask = element("button", { textContent: decision.applied ? "leave undone …" : "take …" });
      ask.onclick = () => model.send({ do: "preview", decision: at });
      item.append(ask);
    }
    const shown = model.get("previewed");
    if (shown.decision === at) item.append(previewOf(shown));
    return item;
  };

  const SHOWN = { n_kernels: ["kernels", String], bytes_moved: ["moved", bytes], peak_bytes: ["memory", bytes],
    predicted_us: ["predicted", (us) => ms(us / 1e6)] };

  // What a decision would change, and the button that does it.
  const previewOf = ({ decision, before, after, notes }) => {
    const box = element("div", { className: "preview" });
    for (const [key, [name, text]] of Object.entries(SHOWN)) {
      box.append(element("div", { textContent: `${name} ${text(before[key])} → ${text(after[key])}` }));
    }
    box.append(...notes.map((note) => element("div", { textContent: note })));
    const apply = element("button", { textContent: "apply and measure", data: { do: "apply" } });
    apply.onclick = () => {
      apply.disabled = true;
      model.send({ do: "apply", decision });
    };
    const cancel = element("button", { textContent: "cancel" });
    cancel.onclick = () => change({ previewed: {} });
    box.append(apply, " ", cancel);
    return box;
  };

  // The states so far, and what can be done with the present one.
  const drawStates = () => {
    const rows = model.get("states");
    const at = model.get("at");
    const list = element("ol", { className: "states" });
    rows.forEach((state, i) => {
      const numbers = `${ms(state.seconds)} measured · ${bytes(state.bytes_moved)} · ${bytes(state.peak_bytes)} of memory`;
      const item = element("li", { textContent: `${state.title}: ${numbers}` });
      item.classList.toggle("soft", i > at);
      if (i === at) item.setAttribute("aria-current", "true");
      list.append(item);
    });
    const button = (name, text, disabled, more = () => ({})) => {
      const made = element("button", { textContent: text, disabled, data: { do: name } });
      made.onclick = () => model.send({ do: name, ...more() });
      return made;
    };
    const path = element("input", { value: savePath, ariaLabel: "file of the recipe" });
    path.onchange = () => { savePath = path.value; };
    const tools = element("div", { className: "bar" },
      button("undo", "undo", at === 0),
      button("redo", "redo", at === rows.length - 1),
      button("compare", "compare with float64", false),
      element("span", {}, path, button("save", "save the recipe", false, () => ({ path: path.value }))),
      element("span", { className: "message", textContent: model.get("message") }));
    states.replaceChildren(list, tools);
  };

  const drawDetails = () => {
    const selected = model.get("selected");
    if (selected < 0) {
      const hint = "Open a module, then click a kernel to see its origin, numbers, containers and decisions.";
      details.replaceChildren(element("p", { className: "soft", textContent: hint }));
      return;
    }
    const kernel = step().kernels[selected];
    const facts = [
      ["pass", kernel.stage],
      ["made by", kernel.path],
      ["launches", `${kernel.launches}, ${kernel.calls} × in a step`],
      ["time", ms(kernel.seconds)],
      ["bound", `${ms(kernel.roofline_seconds)}: ${times(kernel.distance)}`],
      ["moved", `${bytes(kernel.bytes_moved)} (read ${bytes(kernel.bytes_read)}, written ${bytes(kernel.bytes_written)})`],
      ["least", bytes(kernel.bytes_least)],
      ["operations", `${(kernel.operations / 1e6).toFixed(2)} MFLOP`],
      ["rates", `${kernel.gb_s.toFixed(1)} GB/s, ${kernel.gflop_s.toFixed(1)} GFLOP/s`],
    ];
    const list = element("dl");
    for (const [name, text] of facts) {
      list.append(element("dt", { textContent: name }), element("dd", { textContent: text }));
    }
    const operators = kernel.operators.map((o) =>
      element("li", { textContent: `${o.node}${o.module ? ` in ${o.module}` : ""}`, title: o.source }));
    const isApplied = (at) => step().decisions[at].applied;
    details.replaceChildren(
      element("h3", { textContent: kernel.origin }),
      list,
      ...section("operators", operators),
      ...section("reads", kernel.reads.map((at) => containerItem(at, (c) => c.writers))),
      ...section("writes", kernel.writes.map((at) => containerItem(at, (c) => c.readers))),
      ...section("applied", kernel.decisions.filter(isApplied).map(decisionItem)),
      ...section("refused", kernel.decisions.filter((at) => !isApplied(at)).map(decisionItem)),
    );
  };

  const draw = () => {
    drawBar();
    if (model.get("level") === "modules") drawModules();
    else drawKernels();
    drawDetails();
    drawStates();
    sentences.replaceChildren(...step().sentences.map((text) => element("div", { textContent: text })));
  };
  const traits = TRAITS.map((name) => `change:${name}`);
  traits.forEach((event) => model.on(event, draw));
  draw();
  return () => traits.forEach((event) => model.off(event, draw));
}

export default { render };
