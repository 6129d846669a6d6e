"use strict";
// Assembles the page and keeps its state: model, theme and pair of classes.

const { report, galleries } = JSON.parse(byId("data").textContent);
const names = report.class_names;
const several = report.task === "multi_label";
const state = { model: 0, pair: null };
const matrix = confusionView(byId("confusion"), (square) => readout(square), (square) => pick(square), (most) => legend(most));

function readout(square) {
  const box = byId("readout");
  if (!square) {
    const block = matrix.state().block;
    const text = block > 1 ? `Each square contains ${block} × ${block} classes; zoom in to see single ones.` : "Point at a square to read it.";
    box.replaceChildren(element("span", { class: "muted" }, text));
    return;
  }
  const list = (classes) => (classes.length > 1 ? `${names[classes[0]]} … ${names[classes[classes.length - 1]]}` : names[classes[0]]);
  const lines = [["actual", list(square.rows)], ["predicted", list(square.columns)]];
  const share = (count) => `${whole(count)} of ${whole(square.total)} images (${percent(square.total ? count / square.total : null)})`;
  const parts = lines.map(([word, text]) => element("div", {}, element("span", { class: "muted" }, word + " "), text));
  if (square.right) parts.push(element("div", {}, element("b", {}, share(square.right)), " right"));
  if (square.wrong || !square.right) parts.push(element("div", {}, element("b", {}, share(square.wrong)), square.block > 1 ? " wrong" : ""));
  if (square.block > 1 && square.pairs.length) {
    const [actual, predicted, count] = square.pairs.reduce((best, pair) => (pair[2] > best[2] ? pair : best));
    parts.push(element("div", { class: "muted" }, `most: ${names[actual]} → ${names[predicted]} (${count})`));
  }
  box.replaceChildren(...parts);
}

function pick(square) {
  if (square && square.pairs.length) {
    const [actual, predicted] = square.pairs.reduce((best, pair) => (pair[2] > best[2] ? pair : best));
    showPair([actual, predicted]);
  }
}

function showPair(pair) {
  state.pair = pair;
  if (several) labelGallerySection(report, galleries[state.model]);
  else gallerySection(report, report.models[state.model], galleries[state.model], pair, () => showPair(null));
}

function order() {
  const model = report.models[state.model];
  const all = [...names.keys()];
  if (byId("order").value === "recall") {
    const recall = (number) => model.classes[number].recall ?? 2;
    return all.sort((a, b) => recall(a) - recall(b) || a - b);
  }
  return byId("order").value === "similar" ? similarOrder(model) : all;
}

function drawMatrix(keepView) {
  matrix.show(report.models[state.model], names, order(), byId("only-mistakes").checked, keepView);
  readout(null);
}

// The colours; that of mistakes is scaled to the largest one in view.
function legend(most) {
  const ramp = (colour) => element("div", { class: "ramp", style: `background:linear-gradient(90deg, var(--panel), var(--${colour}))` });
  const line = (word, colour, end) => [element("span", {}, word), ramp(colour), element("span", {}, `0 to ${end}`)];
  byId("legend").replaceChildren(...line("right", "accent", "100\u00a0%"), ...line("wrong", "wrong", percent(most)),
    element("span", { class: "wide" }, "of the images in a row"));
}

function pairsList(model) {
  const mistakes = model.confusion.filter(([actual, predicted]) => actual !== predicted);
  mistakes.sort((a, b) => b[2] - a[2]);
  byId("pairs").replaceChildren(...mistakes.slice(0, 12).map(([actual, predicted, count]) => {
    const text = `${names[actual]} → ${names[predicted]}`;
    const show = () => showPair([actual, predicted]);
    return element("li", {}, element("button", { type: "button", title: text, onclick: show }, element("span", {}, text), element("b", {}, whole(count))));
  }));
}

function showModel(index) {
  state.model = index;
  const model = report.models[index];
  byId("title").textContent = model.name;
  const window_ = model.window ? `, windows ${[...new Set(model.window.map((w) => w.join("×")))].join(", ")}` : "";
  const views = report.augmentation === "none" ? "" : `, ${report.augmentation.replace("_", " ")}`;
  byId("about").textContent = `${whole(report.images)} images of ${report.data} (${report.split}), ${whole(names.length)} classes · ` +
    `${model.image_size.join(" × ")} pixels${window_}${views} · ${model.weights} weights${model.step ? `, step ${whole(model.step)}` : ""} · ${model.checkpoint}`;
  summarySection(report, model);
  if (!several) {
    drawMatrix(false);
    pairsList(model);
    calibrationSection(model);
  }
  classesSection(model, several, (number) => { if (!several) { matrix.goTo(number); byId("confusion").scrollIntoView({ block: "center" }); } });
  showPair(null);
}

// The class of this name, else the first one whose name contains it.
function jump(text) {
  const part = text.trim().toLowerCase();
  const exact = names.indexOf(text.trim());
  const number = exact >= 0 ? exact : names.findIndex((name) => name.toLowerCase().includes(part));
  if (!part || number < 0) return;
  matrix.goTo(number);
  readout(null);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "☀ light" : "☾ dark";
  if (report.models.length && matrix.view.span > 0 && byId("title").textContent) matrix.draw();
}

function start() {
  document.title = `Evaluation: ${report.models.map((model) => model.name).join(", ")}`;
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  byId("model-choice").hidden = report.models.length < 2;
  byId("model").replaceChildren(...report.models.map((model, i) => element("option", { value: i }, model.name)));
  byId("model").onchange = (event) => showModel(Number(event.target.value));
  for (const id of ["matrix-panel", "calibration-panel"]) byId(id).hidden = several;
  byId("order").onchange = () => drawMatrix(true);
  byId("only-mistakes").onchange = () => drawMatrix(true);
  byId("class-names").replaceChildren(...names.map((name) => element("option", { value: name })));
  byId("jump").onchange = (event) => jump(event.target.value);
  byId("zoom-in").onclick = () => { matrix.zoom(0.5); readout(null); };
  byId("zoom-out").onclick = () => { matrix.zoom(2); readout(null); };
  byId("zoom-fit").onclick = () => { matrix.fit(); readout(null); };
  const skipped = report.skipped.length ? [`${report.skipped.length} images could not be read and are not counted: ${report.skipped.slice(0, 5).join(", ")}${report.skipped.length > 5 ? " …" : ""}`] : [];
  const notes = [...report.notes, ...skipped];
  byId("notes").hidden = notes.length === 0;
  byId("notes").replaceChildren(...notes.map((text) => element("p", {}, text)));
  byId("definitions").replaceChildren(...Object.entries(report.definitions).flatMap(([word, text]) => [element("dt", {}, word), element("dd", {}, text)]));
  comparisonSection(report);
  showModel(0);
  if (!several) addEventListener("resize", () => matrix.draw());
}

start();
window.api = { report, galleries, state, matrix, showModel, showPair };
