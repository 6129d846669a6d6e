"use strict";
// Draws the page of a comparison: summary, history, importances, parallel coordinates, rows.

const data = JSON.parse(byId("data").textContent);
const rows = data.rows;
const best = data.best === null ? null : rows[data.best];
const shown = (value) => (data.percent ? percent(value, 2) : decimal(value));
const measured = rows.filter((row) => row.value !== null);
const isBetter = (a, b) => (data.minimize ? a < b : a > b);
const isWinner = (row) => row === best || data.front.includes(rows.indexOf(row));
const word = data.study ? "trial" : "row";

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e5 ? value.toExponential(1).replace(".0e", "e") : String(Number(value.toPrecision(3)));
}

function kindOf(row) {
  if (row.value === null || row.status === "failed") return "failed";
  return row.status === "finished" ? "finished" : row.status === "pruned" ? "pruned" : "other";
}

function titleOf(row) {
  const settings = data.axes.map((axis, i) => `${axis.name} = ${row.texts[i]}`).join("\n");
  return `${word} ${row.number}, ${row.status}\n${data.metric} = ${shown(row.value)}\n${settings}`;
}

function cross(x, y, attributes) {
  return element("path", { ...attributes, d: `M${x - 4},${y - 4}l8,8M${x - 4},${y + 4}l8,-8` });
}

function mark(row, x, y) {
  const kind = kindOf(row);
  const attributes = { class: `dot ${kind} ${isWinner(row) ? "winner" : ""}` };
  const node = kind === "failed" ? cross(x, y, attributes) : element("circle", { ...attributes, cx: x, cy: y, r: isWinner(row) ? 6 : 4.5 });
  node.append(element("title", {}, titleOf(row)));
  return node;
}

function summary() {
  const count = (kind) => rows.filter((row) => kindOf(row) === kind).length;
  const cards = [[rows.length, data.study ? "different trials" : "rows"], [count("finished"), "finished"]];
  for (const [kind, text] of [["pruned", "pruned: stopped early as worse than others"], ["failed", "failed or without a result"], ["other", "not finished"]]) {
    if (count(kind)) cards.push([count(kind), text]);
  }
  const hero = element("div", { class: "panel hero" },
    element("b", {}, best ? shown(best.value) : "–"), element("span", {}, best ? `best ${data.metric}, ${word} ${best.number}` : "nothing has finished"));
  byId("summary").replaceChildren(hero, element("div", { class: "cards" },
    ...cards.map(([number, text]) => element("div", { class: "card" }, element("b", {}, whole(number)), element("span", {}, text)))));
}

function bestCommand() {
  byId("best").hidden = !best || !best.command;
  if (!best || !best.command) return;
  byId("command").textContent = best.command;
  byId("best-about").textContent = `${word} ${best.number}, in ${best.folder}`;
  byId("copy").onclick = async () => {
    const range = document.createRange();
    range.selectNodeContents(byId("command"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    try { await navigator.clipboard.writeText(best.command); byId("copy").textContent = "copied"; }
    catch { byId("copy").textContent = "selected: press Ctrl-C"; }
  };
}

// Round steps that cover an interval with about five ticks.
function ticks(low, high) {
  const raw = (high - low) / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((n) => n * power >= raw) * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

function history() {
  const width = Math.max(320, byId("history").clientWidth), height = 300;
  const left = 64, right = 14, top = 12, bottom = 34;
  const values = measured.map((row) => row.value);
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length || low === high) { low = (low || 0) - 0.5; high = low + 1; }
  const pad = (high - low) * 0.06;
  low -= pad; high += pad;
  const last = Math.max(1, ...rows.map((row) => row.number));
  const x = (number) => left + 8 + (number / last) * (width - left - right - 16);
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${data.metric} of each ${word} in order` });
  for (const value of ticks(low, high)) {
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, data.percent ? percent(value, high - low < 0.02 ? 2 : high - low < 0.2 ? 1 : 0) : short(value)));
  }
  for (const number of ticks(0, last).filter(Number.isInteger)) {
    svg.append(element("text", { x: x(number), y: height - 14, "text-anchor": "middle" }, String(number)));
  }
  let soFar = null, path = "";
  for (const row of rows.filter((one) => kindOf(one) === "finished")) {
    if (soFar === null) path = `M${x(row.number)},${y(row.value)}`;
    else path += `H${x(row.number)}`;
    if (soFar === null || isBetter(row.value, soFar)) { soFar = row.value; path += `V${y(soFar)}`; }
  }
  if (path) svg.append(element("path", { class: "so-far", d: `${path}H${width - right}` }));
  for (const row of rows) svg.append(mark(row, x(row.number), row.value === null ? height - bottom - 8 : y(row.value)));
  byId("history").replaceChildren(svg);
  const item = (kind, text) => {
    const icon = element("svg", { viewBox: "0 0 14 14" });
    const attributes = { class: `dot ${kind}` };
    if (kind === "line") icon.append(element("path", { class: "so-far", d: "M0,7H14" }));
    else icon.append(kind === "failed" ? cross(7, 7, attributes) : element("circle", { ...attributes, cx: 7, cy: 7, r: 4.5 }));
    return element("span", {}, icon, text);
  };
  const kinds = new Set(rows.map(kindOf));
  byId("history-legend").replaceChildren(item("finished", "finished"), item("finished winner", data.front.length ? "Pareto front" : "best"), item("line", "best so far"),
    ...(kinds.has("pruned") ? [item("pruned", "pruned: best value until then")] : []), ...(kinds.has("other") ? [item("other", "not finished")] : []),
    ...(kinds.has("failed") ? [item("failed", "failed or without a result")] : []));
}

function importances() {
  const box = byId("importances");
  byId("importances-about").textContent = data.importances_missing ||
    `Part of each setting in what sets the best results apart from all finished ones (PED-ANOVA); a rough guide for few ${word}s, and blind to pruned ones.`;
  const most = Math.max(...data.importances.map(([, share]) => share), 1e-9);
  box.className = "importance";
  box.replaceChildren(...data.importances.flatMap(([key, share]) => [
    element("span", {}, key), element("i", { style: `width:${(100 * share) / most}%` }), element("b", {}, percent(share, 0))]));
}

function coordinates() {
  const axes = [...data.axes, { name: data.metric, metric: true, ...extent() }];
  const width = Math.max(byId("coordinates").clientWidth, 150 * axes.length), height = 360;
  const left = 60, right = 90, top = 40, bottom = 30;
  const x = (i) => left + (axes.length > 1 ? (i / (axes.length - 1)) * (width - left - right) : 0);
  const share = (axis, value, text) => {
    if (axis.texts) return axis.texts.length > 1 ? axis.texts.indexOf(text) / (axis.texts.length - 1) : 0.5;
    if (axis.high === axis.low) return 0.5;
    const scale = axis.log ? Math.log : (number) => number;
    return (scale(value) - scale(axis.low)) / (scale(axis.high) - scale(axis.low));
  };
  const y = (part) => height - bottom - part * (height - top - bottom);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, style: `min-width:${150 * axes.length}px`, role: "img", "aria-label": "Parallel coordinates of settings and result" });
  const ranked = [...measured].sort((a, b) => (isBetter(a.value, b.value) ? 1 : -1));
  const from = rgb(theme("line")), to = rgb(theme("accent"));
  ranked.forEach((row, rank) => {
    const points = axes.map((axis, i) => `${x(i)},${y(axis.metric ? share(axis, row.value) : share(axis, row.settings[i], row.texts[i]))}`);
    const colour = blend(from, to, ranked.length > 1 ? (rank / (ranked.length - 1)) ** 3 : 1);
    const line = element("path", { class: `run ${isWinner(row) ? "winner" : ""}`, "data-row": rows.indexOf(row), d: `M${points.join("L")}`, stroke: colour,
      "stroke-dasharray": kindOf(row) === "finished" ? null : "4 4", onmouseenter: () => single(rows.indexOf(row)), onmouseleave: () => single(null) });
    line.append(element("title", {}, titleOf(row)));
    svg.append(line);
  });
  axes.forEach((axis, i) => {
    svg.append(element("line", { class: "axis", x1: x(i), x2: x(i), y1: top, y2: height - bottom, style: "stroke:var(--muted)" }),
      element("text", { class: "label", x: x(i), y: 20, "text-anchor": "middle" }, axis.name + (axis.log ? " (log)" : "")));
    const label = (text, part, title) => {
      const node = element("text", { x: x(i) + 7, y: y(part) + 4 }, text.length > 14 ? text.slice(0, 13) + "…" : text);
      node.append(element("title", {}, title || text));
      return node;
    };
    if (axis.texts) axis.texts.forEach((text) => svg.append(label(text, share(axis, null, text))));
    else for (const part of [0, 0.5, 1]) svg.append(label(axis.metric && data.percent ? percent(at(axis, part)) : short(at(axis, part)), part));
  });
  byId("coordinates").replaceChildren(svg);
}

function extent() {
  const values = measured.map((row) => row.value);
  return { low: Math.min(...values), high: Math.max(...values) };
}

const at = (axis, part) => (axis.log ? axis.low * (axis.high / axis.low) ** part : axis.low + part * (axis.high - axis.low));

// Single out the line of a row; null: all of them.
function single(index) {
  for (const line of document.querySelectorAll("#coordinates .run")) {
    const chosen = Number(line.dataset.row) === index;
    line.classList.toggle("chosen", index !== null && chosen);
    line.classList.toggle("dimmed", index !== null && !chosen);
  }
}

function table() {
  const unit = data.percent ? " (%)" : "";
  const headers = [word, data.metric + unit, "n", "status", "run", ...data.axes.map((axis) => axis.name)];
  const order = [...rows].sort((a, b) => {
    const place = (row) => (kindOf(row) === "finished" ? 0 : row.value !== null ? 1 : 2);
    return place(a) - place(b) || (isBetter(a.value, b.value) ? -1 : 1);
  });
  const value = (row) => (row.value === null ? "–" : (data.percent ? (100 * row.value).toFixed(2) : decimal(row.value)) +
    (row.std === null ? "" : ` ± ${(data.percent ? 100 * row.std : row.std).toFixed(data.percent ? 2 : 4)}`));
  const status = (row) => (row.status === "finished" ? row.status : `${row.status} at ${percent(row.part, 0)}`);
  const number = (text) => element("td", { class: "number" }, String(text));
  byId("rows").replaceChildren(
    element("thead", {}, element("tr", {}, ...headers.map((text, i) => element("th", { scope: "col", class: ["status", "run"].includes(text) && i < 5 ? null : "number" }, text)))),
    element("tbody", {}, ...order.map((row) => element("tr", { class: isWinner(row) ? "winner" : null, onmouseenter: () => single(rows.indexOf(row)), onmouseleave: () => single(null) },
      number(row.number), number(value(row)), number(row.n), element("td", {}, status(row)),
      element("td", { class: "muted" }, row.folder.split("/").pop()), ...row.texts.map((text) => number(text))))));
}

function draw() {
  history();
  coordinates();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "☀ light" : "☾ dark";
  draw();
}

document.title = `Comparison: ${data.title}`;
byId("title").textContent = data.title;
byId("about").textContent = data.about;
summary();
bestCommand();
importances();
table();
byId("notes").hidden = data.notes.length === 0;
byId("notes").replaceChildren(...data.notes.map((text) => element("p", {}, text)));
byId("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
addEventListener("resize", draw);
