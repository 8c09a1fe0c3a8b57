"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const graph = document.getElementById("graph"), svg = graph.querySelector("svg");
const whole = { w: +svg.dataset.w, h: +svg.dataset.h };
let view = { x: 0, y: 0, s: 1 };
const show = () => {
  const w = graph.clientWidth / view.s, h = graph.clientHeight / view.s;
  svg.setAttribute("viewBox", `${view.x} ${view.y} ${w} ${h}`);
};
const zoom = (factor, px, py) => {
  const s = Math.min(4, Math.max(0.02, view.s * factor));
  view.x += px / view.s - px / s;
  view.y += py / view.s - py / s;
  view.s = s;
  show();
};
const top_ = () => {
  // What stands in the boxes can be read.
  const s = Math.min(1, Math.max(0.85, graph.clientWidth / whole.w));
  const first = svg.querySelector(".b");
  let x = (whole.w - graph.clientWidth / s) / 2;
  if (first && whole.w * s > graph.clientWidth) {
    const at = first.transform.baseVal[0].matrix;
    x = at.e + first.firstChild.width.baseVal.value / 2 - graph.clientWidth / s / 2;
  }
  view = { x, y: -46 / s, s };
  show();
};
const fit = () => {
  const s = Math.min(1, graph.clientWidth / whole.w, graph.clientHeight / whole.h);
  view = { x: (whole.w - graph.clientWidth / s) / 2, y: (whole.h - graph.clientHeight / s) / 2, s };
  show();
};
const middle = () => [graph.clientWidth / 2, graph.clientHeight / 2];
document.getElementById("in").onclick = () => zoom(1.4, ...middle());
document.getElementById("out").onclick = () => zoom(1 / 1.4, ...middle());
document.getElementById("fit").onclick = fit;
document.getElementById("top").onclick = top_;
graph.addEventListener("wheel", (e) => {
  e.preventDefault();
  const r = graph.getBoundingClientRect();
  zoom(Math.exp(-e.deltaY * 0.0015), e.clientX - r.left, e.clientY - r.top);
}, { passive: false });
let drag = null, moved = false;
graph.addEventListener("pointerdown", (e) => {
  if (e.target.closest("button")) return;
  drag = { x: e.clientX, y: e.clientY, vx: view.x, vy: view.y, id: e.pointerId };
  moved = false;
});
graph.addEventListener("pointermove", (e) => {
  if (!drag) return;
  const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
  if (!moved && Math.hypot(dx, dy) < 4) return;
  if (!moved) { moved = true; graph.setPointerCapture(drag.id); graph.classList.add("drags"); }
  view.x = drag.vx - dx / view.s;
  view.y = drag.vy - dy / view.s;
  show();
});
const drop = () => { drag = null; graph.classList.remove("drags"); };
graph.addEventListener("pointerup", drop);
graph.addEventListener("pointercancel", drop);
const maker = new Map(), readers = new Map();
data.forEach((node, n) => {
  node.outputs.forEach((o) => maker.set(o, n));
  node.inputs.forEach((i) => readers.set(i, [...(readers.get(i) || []), n]));
});
const box = (n) => svg.querySelector(`.b[data-n="${n}"]`);
const element = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
const values = (names, near) => {
  const dd = document.createElement("dd");
  names.forEach((name, k) => {
    if (k) dd.append(", ");
    const to = near(name);
    if (to === undefined || !box(to)) { dd.append(name); return; }
    const a = element("a", name);
    a.onclick = () => pick(to, true);
    dd.append(a);
  });
  return dd;
};
const pick = (n, move) => {
  document.querySelectorAll(".lit").forEach((e) => e.classList.remove("lit"));
  const node = data[n], panel = document.getElementById("details"), target = box(n);
  const list = document.createElement("dl");
  const row = (key, value) => list.append(element("dt", key), typeof value === "string" ? element("dd", value) : value);
  row("operator", node.operator);
  if (node.shape) row("output", node.shape);
  if (node.known) { row("read", node.read); row("written", node.written); row("moved", node.moved); }
  else row("bytes", "sizes do not follow");
  if (node.arithmetic !== "0") row("multiply-adds", node.arithmetic);
  if (node.inside) row("inside", `${node.inside} nodes`);
  row("reads", values(node.inputs, (name) => maker.get(name)));
  row("gives", values(node.outputs, (name) => (readers.get(name) || [])[0]));
  panel.replaceChildren(element("h3", node.name), list);
  const tr = document.querySelector(`tr[data-n="${n}"]`);
  if (tr) tr.classList.add("lit");
  if (!target) return;
  target.classList.add("lit");
  svg.querySelectorAll(`#lines path[data-s="${target.dataset.b}"]`).forEach((p) => p.classList.add("lit"));
  if (move) {
    const at = target.transform.baseVal[0].matrix;
    view.s = Math.max(view.s, 0.7);
    view.x = at.e + 50 - graph.clientWidth / view.s / 2;
    view.y = at.f + 20 - graph.clientHeight / view.s / 2;
    show();
  }
};
svg.addEventListener("click", (e) => {
  const hit = e.target.closest(".b[data-n]");
  if (hit && !moved) pick(+hit.dataset.n, false);
});
document.querySelectorAll("tr[data-n]").forEach((tr) => {
  tr.onclick = () => { pick(+tr.dataset.n, true); graph.scrollIntoView({ behavior: "smooth", block: "center" }); };
});
document.querySelectorAll("th[data-k]").forEach((th) => {
  th.onclick = () => {
    const body = th.closest("table").tBodies[0], at = th.cellIndex, isNumber = th.dataset.k === "n";
    const down = isNumber ? !th.classList.contains("down") : th.classList.contains("up");
    th.parentNode.querySelectorAll("th").forEach((o) => o.classList.remove("up", "down"));
    th.classList.add(down ? "down" : "up");
    const key = (tr) => isNumber ? +tr.cells[at].dataset.v : tr.cells[at].textContent;
    const order = (a, b) => isNumber ? key(a) - key(b) : key(a).localeCompare(key(b));
    body.append(...[...body.rows].sort((a, b) => down ? order(b, a) : order(a, b)));
  };
});
document.getElementById("filter").oninput = (e) => {
  const text = e.target.value.toLowerCase();
  document.querySelectorAll("#nodes tbody tr").forEach((tr) => {
    tr.hidden = !`${tr.cells[1].textContent} ${tr.cells[2].textContent}`.toLowerCase().includes(text);
  });
};
addEventListener("resize", show);
top_();
