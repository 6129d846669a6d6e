"use strict";
// The confusion matrix on a canvas. Where there are many classes, several share a square.

const SMALLEST = 4; // least side of a square in pixels; smaller ones are merged
const LABEL = 13; // distance between labels in pixels

function confusionView(canvas, onHover, onClick, onDraw) {
  const context = canvas.getContext("2d");
  const view = { x: 0, y: 0, span: 1 };
  let model, names, order, place, rows, hideRight, box, squares;

  function show(newModel, newNames, newOrder, mistakesOnly, keepView) {
    [model, names, order, hideRight] = [newModel, newNames, newOrder, mistakesOnly];
    place = new Int32Array(names.length);
    order.forEach((number, at) => (place[number] = at));
    rows = model.classes.map((row) => row.images);
    if (!keepView) Object.assign(view, { x: 0, y: 0, span: names.length });
    draw();
  }

  // The squares in view, with their numbers of classes and images. Squares that are partly in view
  // are counted as a whole, so that colours do not change while the matrix is moved.
  function gather(side) {
    const block = Math.max(1, Math.ceil((SMALLEST * view.span) / side));
    const found = new Map();
    const totals = new Map();
    const [firstRow, firstColumn] = [Math.floor(view.y / block), Math.floor(view.x / block)];
    const [endRow, endColumn] = [Math.ceil((view.y + view.span) / block), Math.ceil((view.x + view.span) / block)];
    for (let at = firstRow * block; at < Math.min(names.length, endRow * block); at++) {
      const key = Math.floor(at / block);
      totals.set(key, (totals.get(key) || 0) + rows[order[at]]);
    }
    for (const [actual, predicted, count] of model.confusion) {
      const [row, column] = [Math.floor(place[actual] / block), Math.floor(place[predicted] / block)];
      if (row < firstRow || row >= endRow || column < firstColumn || column >= endColumn) continue;
      const key = row * 100000 + column;
      let square = found.get(key);
      if (!square) found.set(key, (square = { row, column, right: 0, wrong: 0, pairs: [] }));
      if (actual === predicted) square.right += count;
      else {
        square.wrong += count;
        square.pairs.push([actual, predicted, count]);
      }
    }
    return { block, found, totals };
  }

  function draw() {
    const width = canvas.clientWidth;
    const margin = Math.min(150, Math.max(88, width * 0.215));
    const side = width - margin - 4;
    const ratio = window.devicePixelRatio || 1;
    const height = side + margin + 4;
    canvas.style.height = height + "px";
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    box = { left: margin, top: margin, side };
    squares = gather(side);
    paintSquares();
    paintLabels();
    onDraw(squares.most);
  }

  function paintSquares() {
    const { block, found, totals } = squares;
    const { left, top, side } = box;
    const cell = side / view.span;
    const [paper, blue, orange] = [rgb(theme("panel")), rgb(theme("accent")), rgb(theme("wrong"))];
    context.save();
    context.beginPath();
    context.rect(left, top, side, side);
    context.clip();
    context.fillStyle = theme("back");
    context.fillRect(left, top, side, side);
    let most = 0;
    for (const square of found.values()) most = Math.max(most, square.wrong / totals.get(square.row));
    squares.most = most;
    const gap = cell * block > 9 ? 1 : 0;
    for (const square of found.values()) {
      const total = totals.get(square.row);
      const right = hideRight ? 0 : square.right;
      if (!right && !square.wrong) continue;
      const x = left + (square.column * block - view.x) * cell;
      const y = top + (square.row * block - view.y) * cell;
      const size = cell * block - gap;
      const share = right ? right / total : square.wrong / total / Math.max(most, 1e-9);
      context.fillStyle = blend(paper, right ? blue : orange, right ? share * share : 0.04 + 0.96 * share);
      context.fillRect(x, y, Math.max(size, 1), Math.max(size, 1));
      if (block === 1 && cell > 27) paintNumber(x + size / 2, y + size / 2, cell, right || square.wrong, share);
    }
    context.restore();
    context.strokeStyle = theme("line");
    context.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
  }

  function paintNumber(x, y, cell, number, share) {
    context.fillStyle = share > 0.3 ? theme("panel") : theme("ink");
    context.font = `${Math.min(14, cell / 2.6)}px system-ui, "DejaVu Sans", sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(String(number), x, y);
  }

  function paintLabels() {
    const { left, top, side } = box;
    const cell = side / view.span;
    const step = Math.max(1, Math.ceil(LABEL / cell));
    context.fillStyle = theme("muted");
    context.font = '11.5px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    for (const down of [true, false]) {
      const start = down ? view.y : view.x;
      for (let at = Math.ceil(start / step) * step; at < Math.min(names.length, start + view.span); at += step) {
        const middle = (at - start + Math.min(step, 1) / 2) * cell;
        if (middle > side) continue;
        context.save();
        if (down) context.translate(left - 7, top + middle);
        else {
          context.translate(left + middle, top - 7);
          context.rotate(Math.PI / 2);
        }
        context.textAlign = "right";
        context.fillText(shortened(names[order[at]], left - 12), 0, 0);
        context.restore();
      }
    }
  }

  // The whole name, its first synonym, or as much of its beginning and end as fits: the end
  // distinguishes "blue striped disc" from "blue striped cross".
  function shortened(text, room) {
    const fits = (part) => context.measureText(part).width <= room;
    if (fits(text)) return text;
    const [first] = text.split(",");
    if (fits(first)) return first;
    const letters = [...first];
    for (let kept = letters.length - 1; kept > 1; kept--) {
      const part = letters.slice(0, Math.ceil(kept / 2)).join("") + "…" + letters.slice(letters.length - Math.floor(kept / 2)).join("");
      if (fits(part)) return part;
    }
    return letters[0] + "…";
  }

  // The square at a point of the canvas.
  function at(x, y) {
    const cell = box.side / view.span;
    const across = (x - box.left) / cell + view.x;
    const down = (y - box.top) / cell + view.y;
    if (x < box.left || y < box.top || x >= box.left + box.side || y >= box.top + box.side) return null;
    if (across >= names.length || down >= names.length || across < 0 || down < 0) return null;
    const { block, found, totals } = squares;
    const [row, column] = [Math.floor(down / block), Math.floor(across / block)];
    const square = found.get(row * 100000 + column) || { row, column, right: 0, wrong: 0, pairs: [] };
    const classes = (from) => order.slice(from * block, from * block + block);
    return { block, rows: classes(row), columns: classes(column), total: totals.get(row) || 0, ...square };
  }

  function clamp() {
    view.span = Math.min(names.length, Math.max(Math.min(4, names.length), view.span));
    view.x = Math.min(Math.max(0, view.x), names.length - view.span);
    view.y = Math.min(Math.max(0, view.y), names.length - view.span);
  }

  function zoom(factor, x = box.left + box.side / 2, y = box.top + box.side / 2) {
    const [across, down] = [(x - box.left) / box.side, (y - box.top) / box.side];
    const span = Math.min(names.length, Math.max(Math.min(4, names.length), view.span * factor));
    view.x += across * (view.span - span);
    view.y += down * (view.span - span);
    view.span = span;
    clamp();
    draw();
  }

  function goTo(number) {
    view.span = Math.min(names.length, 24);
    view.x = view.y = place[number] - view.span / 2;
    clamp();
    draw();
  }

  function fit() {
    Object.assign(view, { x: 0, y: 0, span: names.length });
    draw();
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, y: event.offsetY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && (drag.moved || Math.hypot(event.offsetX - drag.x, event.offsetY - drag.y) > 4)) {
      const cell = box.side / view.span;
      view.x -= (event.offsetX - drag.x) / cell;
      view.y -= (event.offsetY - drag.y) / cell;
      drag = { x: event.offsetX, y: event.offsetY, moved: true };
      clamp();
      draw();
    } else if (!drag) onHover(at(event.offsetX, event.offsetY));
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) onClick(at(event.offsetX, event.offsetY));
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => onHover(null));
  canvas.addEventListener("dblclick", (event) => zoom(0.5, event.offsetX, event.offsetY));
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX, event.offsetY);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = view.span / 8;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") fit();
    else if (moves[event.key]) {
      view.x += moves[event.key][0];
      view.y += moves[event.key][1];
      clamp();
      draw();
    } else return;
    event.preventDefault();
  });
  return { show, draw, zoom, fit, goTo, at, view, state: () => ({ ...box, block: squares.block, most: squares.most }) };
}

// Classes in a chain: each is followed by the one that it is most often confused with.
function similarOrder(model) {
  const number = model.classes.length;
  const near = Array.from({ length: number }, () => new Map());
  for (const [actual, predicted, count] of model.confusion) {
    if (actual === predicted) continue;
    near[actual].set(predicted, (near[actual].get(predicted) || 0) + count);
    near[predicted].set(actual, (near[predicted].get(actual) || 0) + count);
  }
  const mass = near.map((others) => [...others.values()].reduce((sum, count) => sum + count, 0));
  const starts = [...mass.keys()].sort((a, b) => mass[b] - mass[a]);
  const done = new Set();
  const order = [];
  for (const start of starts) {
    for (let next = start; next !== undefined && !done.has(next); ) {
      done.add(next);
      order.push(next);
      let best;
      for (const [other, count] of near[next]) {
        if (!done.has(other) && (best === undefined || count > near[next].get(best))) best = other;
      }
      next = best;
    }
  }
  return order;
}
