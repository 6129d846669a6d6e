"use strict";
// Everything on the page but the confusion matrix.

const ONE_LABEL = {
  top1: "top-1 accuracy", top5: "top-5 accuracy", balanced_accuracy: "balanced accuracy",
  macro_f1: "macro-F1", loss: "loss (= NLL)", brier: "Brier score", ece: "calibration error (ECE)",
};
const SEVERAL_LABELS = {
  map: "mean average precision", micro_f1: "micro-F1", macro_f1: "macro-F1", sample_f1: "sample-F1",
  loss: "loss (BCE)",
};
const SUFFIXES = { _tuned: ", tuned thresholds", _flipped: ", with flips", _tuned_flipped: ", tuned, with flips" };
const SHARES = ["top1", "top5", "balanced_accuracy", "map", "micro_f1", "macro_f1", "sample_f1"];
const labelsOf = (report) => (report.task === "multi_label" ? SEVERAL_LABELS : ONE_LABEL);
const LOWER = ["loss", "brier", "ece"];

function summarySection(report, model) {
  const labels = labelsOf(report);
  const [main] = Object.keys(labels);
  const metric = (key, value) => (SHARES.includes(key.replace("_tuned", "").replace("_flipped", "")) ? percent(value, 2) : decimal(value));
  const interval = (key) => {
    const found = model.intervals[key];
    if (!found) return null;
    const [low, high] = found.map((value) => metric(key, value));
    return low === high ? `95\u00a0%: ${low}` : `95\u00a0%: ${low.replace("\u00a0%", "")} – ${high}`;
  };
  const card = (label, value, below) =>
    element("div", { class: "card" }, element("span", {}, label), element("b", {}, value),
      below ? element("span", {}, below) : null);
  const shown = Object.keys(labels).slice(1).filter((key) => key !== "top5" || model.classes.length > 5);
  const cards = shown.map((key) => card(labels[key], metric(key, model.metrics[key]), interval(key)));
  for (const [suffix, words] of Object.entries(SUFFIXES)) {
    for (const [key, label] of Object.entries(labels)) {
      const name = key + suffix;
      if (name in model.metrics) cards.push(card(label + words, metric(name, model.metrics[name]), interval(name)));
    }
  }
  const scaled = model.calibration && model.calibration.temperature;
  if (scaled) cards.push(card("temperature", decimal(scaled.temperature, 3), `ECE ${decimal(scaled.before.ece)} → ${decimal(scaled.after.ece)}${scaled.after.ece < scaled.before.ece ? "" : ": did not help"}`));
  if (model.neighbours) cards.push(card(`${model.neighbours.k}-NN accuracy`, percent(model.neighbours.top1, 2), "of the features"));
  cards.push(card("parameters", large(model.cost.parameters), `${large(model.cost.macs)} MACs per image`));
  cards.push(card("images per second", large(model.speed.model ?? model.speed.total), `${large(model.speed.total)} with loading`));
  const wrong = Math.round(model.metrics.samples * (1 - model.metrics.top1));
  const counted = main === "map" ? `${whole(model.classes.filter((row) => row.images).length)} classes, ${whole(report.images)} images` : `${whole(wrong)} of ${whole(report.images)} images wrong`;
  const hero = element("div", { class: "panel hero" }, element("span", {}, labels[main]),
    element("b", {}, percent(model.metrics[main], 2)), interval(main) ? element("span", {}, interval(main)) : null,
    element("span", {}, counted));
  byId("summary").replaceChildren(hero, element("div", { class: "cards" }, ...cards));
}

function comparisonSection(report) {
  const [baseline, ...others] = report.models;
  const rows = others.flatMap((model) => Object.entries(model.differences || {}).map(([key, value]) => ({ model, key, ...value })));
  byId("comparison").hidden = rows.length === 0;
  if (!rows.length) return;
  byId("comparison-about").textContent = `Model minus ${baseline.name} on the same images. Lines: 95 % confidence intervals of a paired bootstrap; where they cross zero, the images do not decide. Accuracies in percentage points.`;
  const reach = (shares) => Math.max(1e-9, ...rows.filter((row) => SHARES.includes(row.key) === shares).flatMap((row) => [Math.abs(row.low), Math.abs(row.high)]));
  const scales = { true: reach(true), false: reach(false) };
  const body = rows.map((row) => {
    const share = SHARES.includes(row.key);
    const shown = (value) => (share ? signed(100 * value, 2) : signed(value, 4));
    const better = row.value < 0 === LOWER.includes(row.key);
    const verdict = row.decided ? (better ? "better" : "worse") : "undecided";
    return element("tr", {}, element("td", {}, row.model.name), element("td", {}, labelsOf(report)[row.key]),
      element("td", { class: "number" }, shown(row.value)),
      element("td", { class: "number" }, `${shown(row.low)} to ${shown(row.high)}`),
      element("td", {}, forest(row, scales[share], row.decided ? verdict : "")),
      element("td", { class: "number" }, percent(row.better)),
      element("td", { class: row.decided ? verdict : "muted" }, verdict));
  });
  const heads = ["model", "metric", "difference", "95 % confidence", "", "draws in which better", ""];
  const head = element("tr", {}, ...heads.map((text, i) => element("th", { class: [2, 3, 5].includes(i) ? "number" : null }, text)));
  byId("comparison-table").replaceChildren(head, ...body);
}

function forest(row, reach, kind) {
  const x = (value) => 80 + (72 * value) / reach;
  return element("svg", { viewBox: "0 0 160 18", style: "width:160px", "aria-hidden": "true" },
    element("line", { class: "axis", x1: 80, x2: 80, y1: 0, y2: 18 }),
    element("g", { class: kind },
      element("line", { class: "span", x1: x(row.low), x2: x(row.high), y1: 9, y2: 9 }),
      element("circle", { class: "point", cx: x(row.value), cy: 9, r: 4 })));
}

function calibrationSection(model) {
  const { all, temperature } = model.calibration;
  const curves = [["all", "all images", all]];
  if (temperature) {
    curves.push(["before", "other half, T\u00a0=\u00a01", temperature.before]);
    curves.push(["after", `other half, T\u00a0=\u00a0${temperature.temperature.toFixed(2)}`, temperature.after]);
  }
  const choose = (key) => {
    for (const button of byId("curves").children) button.setAttribute("aria-checked", String(button.dataset.key === key));
    byId("reliability").replaceChildren(reliabilityDiagram(curves.find((curve) => curve[0] === key)[2]));
  };
  byId("curves").replaceChildren(...curves.map(([key, label]) =>
    element("button", { type: "button", role: "radio", "data-key": key, onclick: () => choose(key) }, label)));
  choose("all");
  const heads = ["", "images", "NLL", "Brier", "ECE"];
  byId("calibration-table").replaceChildren(
    element("tr", {}, ...heads.map((text, i) => element("th", { class: i ? "number" : null }, text))),
    ...curves.map(([, label, curve]) => element("tr", {}, element("td", {}, label),
      ...[whole(curve.images), decimal(curve.nll), decimal(curve.brier), decimal(curve.ece)].map((text) => element("td", { class: "number" }, text)))));
  byId("calibration-about").textContent = temperature
    ? `The temperature ${temperature.temperature.toFixed(3)} was fitted on ${whole(temperature.fitted_on)} images and is evaluated on the ${whole(temperature.before.images)} others. ` +
      (temperature.at_limit ? "It is at the limit of the search range. " : "") +
      (temperature.after.ece < temperature.before.ece ? "" : "It did not help: the calibration error is not smaller with it. ") +
      (temperature.temperature > 1 ? "Above 1: the model is overconfident." : "Below 1: the model is underconfident.")
    : "No temperature is fitted: there are too few images, or logits are not finite.";
}

function reliabilityDiagram(curve) {
  const [left, top, side, below] = [44, 8, 330, 62];
  const x = (value) => left + side * value;
  const y = (value) => top + side * (1 - value);
  const most = Math.max(...curve.bins.map((bin) => bin.count), 1);
  const base = top + side + 18 + below;
  const parts = [];
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(element("line", { class: "axis", x1: left, x2: left + side, y1: y(tick), y2: y(tick) }));
    parts.push(element("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
    parts.push(element("text", { x: x(tick), y: base + 16, "text-anchor": "middle" }, String(tick)));
  }
  for (const bin of curve.bins) {
    if (!bin.count) continue;
    const [from, width] = [x(bin.low) + 1, side * (bin.high - bin.low) - 2];
    const [low, high] = [Math.min(bin.accuracy, bin.confidence), Math.max(bin.accuracy, bin.confidence)];
    const text = `confidence ${decimal(bin.low, 2)} – ${decimal(bin.high, 2)}: ${whole(bin.count)} images, mean confidence ${percent(bin.confidence)}, ${percent(bin.accuracy)} right`;
    parts.push(element("g", { class: "bin" }, element("title", {}, text),
      element("rect", { class: "right", x: from, y: y(bin.accuracy), width, height: side * bin.accuracy }),
      element("rect", { class: "gap", x: from, y: y(high), width, height: Math.max(0.5, side * (high - low)) }),
      element("rect", { class: "count", x: from, y: base - (below * bin.count) / most, width, height: (below * bin.count) / most })));
  }
  parts.push(element("line", { class: "ideal", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }));
  parts.push(element("line", { class: "axis", x1: left, x2: left + side, y1: base, y2: base }));
  parts.push(element("text", { x: left + side / 2, y: base + 34, "text-anchor": "middle" }, "confidence"));
  parts.push(element("text", { transform: `translate(12 ${top + side / 2}) rotate(-90)`, "text-anchor": "middle" }, "accuracy"));
  parts.push(element("text", { transform: `translate(12 ${base - below / 2}) rotate(-90)`, "text-anchor": "middle" }, "images"));
  const label = `Reliability diagram of ${curve.images} images, expected calibration error ${decimal(curve.ece)}`;
  return element("svg", { viewBox: `0 0 ${left + side + 12} ${base + 40}`, role: "img", "aria-label": label }, ...parts);
}

function classesSection(model, several, onChoose) {
  const columns = several
    ? [["name", "class"], ["images", "images"], ["average_precision", "average precision"], ["recall", "recall"], ["precision", "precision"], ["f1", "F1"], ["threshold", "threshold"]]
    : [["name", "class"], ["images", "images"], ["recall", "recall (accuracy)"], ["precision", "precision"], ["f1", "F1"]];
  const first = columns[2][0];
  let [key, rising] = [first, true];
  const cell = (row, name) => (name === "name" ? element("td", {}, row.name) : name === "images" ? element("td", {}, whole(row.images))
    : name === "threshold" ? element("td", {}, decimal(row.threshold, 3)) : bar(row[name]));
  const bar = (value) => element("td", {}, element("div", { class: "bar" }, element("span", {}, percent(value)),
    element("i", { style: `--share:${100 * (value ?? 0)}%` })));
  function fill() {
    const wanted = byId("class-filter").value.toLowerCase();
    const rows = model.classes.map((row, number) => ({ ...row, number })).filter((row) => row.name.toLowerCase().includes(wanted));
    // Classes without a value come last in both directions.
    const missing = (row) => row[key] === null;
    rows.sort((a, b) => missing(a) - missing(b) ||
      (rising ? 1 : -1) * (key === "name" ? a.name.localeCompare(b.name) : (a[key] ?? 0) - (b[key] ?? 0)) || a.number - b.number);
    const head = columns.map(([name, text]) => element("th", { "aria-sort": name === key ? (rising ? "ascending" : "descending") : null, scope: "col" },
      element("button", { type: "button", "data-key": name, onclick: () => sort(name) }, text + (name === key ? (rising ? " ▲" : " ▼") : ""))));
    byId("classes").replaceChildren(element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...rows.map((row) => element("tr", { ondblclick: () => onChoose(row.number) },
        ...columns.map(([name]) => cell(row, name))))));
    byId("class-count").textContent = `${whole(rows.length)} of ${whole(model.classes.length)} classes` + (several ? "; recall, precision and F1 at the threshold" : "; a double click finds one in the matrix");
  }
  function sort(name) {
    [key, rising] = [name, name === key ? !rising : name === "name" || name === first];
    fill();
  }
  byId("class-filter").oninput = fill;
  fill();
}

function gallerySection(report, model, gallery, pair, onAll) {
  const names = report.class_names;
  const shown = gallery.filter((entry) => !pair || (entry.label === pair[0] && entry.predicted === pair[1]));
  const about = byId("gallery-about");
  const wrong = Math.round(model.metrics.samples * (1 - model.metrics.top1));
  if (pair) {
    about.replaceChildren(`${whole(shown.length)} of these are “${names[pair[0]]}” predicted as “${names[pair[1]]}”. `,
      element("button", { type: "button", id: "show-all", onclick: onAll }, "show all"));
  } else {
    about.textContent = gallery.length
      ? `The ${whole(gallery.length)} most confident of ${whole(wrong)} mistakes, as the model saw the images.`
      : wrong ? "gallery=0: no images were requested." : "No mistakes.";
  }
  byId("gallery").replaceChildren(...shown.map((entry) => {
    const line = (kind, text, share) => element("div", { class: kind }, element("span", {}, text), element("span", {}, percent(share)));
    const image = element("img", { src: entry.image, alt: `${names[entry.label]}, predicted as ${names[entry.predicted]}`,
      class: entry.image.startsWith("data:image/png") ? "small" : null });
    return element("figure", { title: entry.name }, image, element("figcaption", {},
      line("said", names[entry.predicted], entry.confidence), line("muted", `actual: ${names[entry.label]}`, entry.own)));
  }));
}

// Images with any number of classes: which are there, and which were predicted.
function labelGallerySection(report, gallery) {
  const names = report.class_names;
  byId("gallery-about").textContent = gallery.length
    ? `The ${whole(gallery.length)} images with the most confident mistakes, as the model saw them; mistakes in colour.`
    : "No mistakes, or gallery=0: no images were requested.";
  byId("gallery").replaceChildren(...gallery.map((entry) => {
    const missed = entry.labels.filter((label) => !entry.predicted.some(([number]) => number === label));
    const line = (kind, text, value) => element("div", { class: kind }, element("span", {}, text), element("span", {}, value));
    const image = element("img", { src: entry.image, alt: entry.labels.map((label) => names[label]).join(", ") || "no class",
      class: entry.image.startsWith("data:image/png") ? "small" : null });
    return element("figure", { title: entry.name }, image, element("figcaption", {},
      ...entry.predicted.map(([number, chance]) => line(entry.labels.includes(number) ? "" : "said", names[number], percent(chance))),
      ...missed.map((number) => line("said", `missed: ${names[number]}`, "")),
      line("muted", `actual: ${entry.labels.map((label) => names[label]).join(", ") || "none"}`, "")));
  }));
}
