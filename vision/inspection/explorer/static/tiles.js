// The small maps: one for each layer and head, the fusion of the heads first.

const TILE = { label: 26, stageLabel: 44, gap: 3, least: 18, line: 26, most: 92, head: 18, bar: 3 };

// Where each small map goes, for the width there is.
function arrangeTiles(page, width, height) {
  const { model } = page;
  const heads = Math.max(...model.layers.map((layer) => layer.heads));
  const label = model.layers[0].layout.windowed ? TILE.stageLabel : TILE.label;
  const free = width - label - TILE.gap;
  // All heads in one line where the maps stay legible, else in lines of equal length.
  const fits = (least) => Math.max(1, Math.floor(free / (least + TILE.gap)) - 1);
  const columns = heads <= fits(TILE.least) ? heads : Math.ceil(heads / Math.ceil(heads / fits(TILE.line)));
  const lines = model.layers.reduce((sum, layer) => sum + Math.ceil(layer.heads / columns), 0);
  // As large as the width allows, but no larger than lets all layers be seen at once.
  const widest = Math.floor((free - 4) / (columns + 1)) - TILE.gap;
  const highest = Math.floor((height - 24 - TILE.head * (1 + model.layers[model.layers.length - 1].stage)) / lines) - TILE.gap - TILE.bar;
  const side = Math.max(12, Math.min(TILE.most, widest, Math.max(TILE.line, highest)));
  const boxes = [];
  const labels = [];
  let y = 2;
  for (const layer of model.layers) {
    const [rows, across] = [layer.layout.grid[0] * layer.layout.stride[0], layer.layout.grid[1] * layer.layout.stride[1]];
    const [wide, high] = rows > across ? [(side * across) / rows, side] : [side, (side * rows) / across];
    if (layer.layout.windowed && layer.block === 0) {
      labels.push({ layer, x: 0, y: y + 12, heading: true });
      y += TILE.head;
    }
    labels.push({ layer, x: 0, y: y + high / 2 + 4 });
    boxes.push({ layer, head: 'fused', x: label, y, wide, high });
    for (let head = 0; head < layer.heads; head++) {
      const line = Math.floor(head / columns);
      const x = label + 4 + (side + TILE.gap) * (1 + (head % columns));
      boxes.push({ layer, head, x, y: y + line * (high + TILE.gap + TILE.bar), wide, high });
    }
    y += Math.ceil(layer.heads / columns) * (high + TILE.gap + TILE.bar);
  }
  return { boxes, labels, height: y + 4 };
}

// The part of a layer's grid that a tile shows: the query's window, or all.
function tileCrop(page, layout) {
  const { state } = page;
  const whole = [0, 0, ...layout.grid];
  if (!layout.windowed || !state.zoom || state.other || state.query.kind !== 'pixel') return whole;
  const cells = windowCells(layout, tokenFor(layout, state.query), true).map((token) => cellOf(layout, token));
  const rows = cells.map((cell) => cell[0]);
  const columns = cells.map((cell) => cell[1]);
  return [Math.min(...rows), Math.min(...columns), Math.max(...rows) + 1, Math.max(...columns) + 1];
}

// One head's values for a query, by token. The array is used again for the next head.
function headValues(page, layer, head, query) {
  const { model, state } = page;
  const { layout } = layer;
  if (query.kind === 'pool' || (!layer.perHead && head !== 'fused')) {
    // These take a whole matrix, but do not follow the pointer.
    const muted = head === 'fused' ? state.muted[layer.number] : '';
    const key = `tile ${layer.number} ${head} ${writeQuery(query)} ${state.direction} ${state.fusion} ${muted}`;
    const found = remembered(key, () => attentionOf(model, state, layer, head, query), headMaps);
    return found && found.values;
  }
  const values = head === 'fused' ? fusedMatrix(model, layer, { ...state, discard: 0 }) : layer.values;
  const offset = head === 'fused' ? 0 : head * layer.plane;
  const out = page.row(layout);
  const { size, index, slot } = layout;
  const place = slot[tokenFor(layout, query)];
  const first = place - (place % size);
  const [from, step] = state.direction === 'row'
    ? [offset + place * size, 1] : [offset + first * size + place - first, size];
  for (let other = 0; other < size; other++) {
    const token = index[first + other];
    if (token >= 0) out[token] = values[from + other * step];
  }
  return out;
}

function tileMap(page, box, keep) {
  const { state } = page;
  const { layout } = box.layer;
  let values = headValues(page, box.layer, box.head, state.query);
  if (!values) return null;
  if (state.other) {
    const first = Float64Array.from(values);
    const other = headValues(page, box.layer, box.head, state.other);
    if (!other) return null;
    values = first.map((value, token) => value - other[token]);
  }
  let prefix = 0;
  for (let token = 0; token < layout.prefixCount; token++) prefix += values[token];
  let cells = values.subarray(layout.prefixCount);
  if (keep) cells = cells.slice();
  const high = upperLimit(cells, state, layout.size, page.model.header.least_limit);
  return { cells, prefix, signed: Boolean(state.other), high };
}

function drawTiles(page) {
  const { elements, state, model } = page;
  const width = page.sizes().tiles;
  if (!page.tiles || page.tiles.width !== width) {
    page.tiles = { width, ...arrangeTiles(page, width, page.sizes().tilesHeight) };
  }
  const context = fitCanvas(elements.tiles, width, page.tiles.height);
  const ratio = elements.tiles.width / width;
  const image = page.tileImage(elements.tiles.width, elements.tiles.height);
  const pixels = new Uint32Array(image.data.buffer);
  const crops = new Map(model.layers.map((layer) => [layer, tileCrop(page, layer.layout)]));
  const all = state.shared ? page.tiles.boxes.map((box) => tileMap(page, box, true)) : null;
  const shared = all ? Math.max(...all.map((map) => (map ? map.high : 0))) : 0;
  page.tiles.boxes.forEach((box, i) => {
    const map = all ? all[i] : tileMap(page, box, false);
    box.prefix = map && !map.signed && state.direction === 'row' ? map.prefix : 0;
    fillTile(page, pixels, image.width, ratio, box, map, crops.get(box.layer), shared);
  });
  context.putImageData(image, 0, 0);
  page.tiles.boxes.forEach((box) => markTile(page, context, box));
  context.drawImage(labelsOf(page), 0, 0, width, page.tiles.height);
  if (page.tiles.chosen !== state.layer) showChosen(page);
}

// Scrolls the chosen layer into view.
function showChosen(page) {
  const area = page.elements.tiles.parentElement;
  const { y, high } = page.tiles.boxes.find((box) => box.layer.number === page.state.layer);
  if (y < area.scrollTop) area.scrollTop = y - TILE.head;
  else if (y + high > area.scrollTop + area.clientHeight) area.scrollTop = y + high + TILE.gap - area.clientHeight;
  page.tiles.chosen = page.state.layer;
}

// Each cell as a block of pixels; hatched without a map.
function fillTile(page, pixels, stride, ratio, box, map, crop, shared) {
  const [left, top] = [Math.round(box.x * ratio), Math.round(box.y * ratio)];
  const [wide, high] = [Math.round(box.wide * ratio), Math.round(box.high * ratio)];
  const { layout } = box.layer;
  const muted = box.head !== 'fused' && (page.state.muted[box.layer.number] || []).includes(box.head);
  const table = page.packed(map && map.signed, muted);
  const scale = Math.min(wide / ((crop[3] - crop[1]) * layout.stride[1]), high / ((crop[2] - crop[0]) * layout.stride[0]));
  const [cellHigh, cellWide] = layout.stride.map((step) => step * scale);
  const limit = map ? shared || map.high : 0;
  const factor = limit > 0 ? (map.signed ? 127.5 : 255) / limit : 0;
  const base = map && map.signed ? 127.5 : 0;
  const columns = columnsOf(page, crop, wide, cellWide);
  const { soft, line } = page.packed;
  const cells = map && map.cells;
  let before = -1;
  for (let y = 0; y < high; y++) {
    const row = crop[0] + Math.floor((y + 0.5) / cellHigh);
    let at = (top + y) * stride + left;
    // Most lines of pixels show the same cells as the one above, most pixels the same as the last.
    if (map && row === before) { pixels.copyWithin(at, at - stride, at - stride + wide); continue; }
    before = row;
    const first = row * layout.grid[1];
    let [shown, colour] = [-2, soft];
    for (let x = 0; x < wide; x++, at++) {
      if (!map) { pixels[at] = (x + y) % 6 === 0 ? line : soft; continue; }
      const column = row >= crop[2] ? -1 : columns[x];
      if (column !== shown) {
        shown = column;
        const entry = column < 0 ? 0 : base + cells[first + column] * factor + 0.5;
        colour = column < 0 ? soft : table[entry < 0 ? 0 : entry > 255 ? 255 : entry | 0];
      }
      pixels[at] = colour;
    }
  }
}

// The column of cells that each column of pixels shows; -1 beside the last. Alike for many tiles.
function columnsOf(page, crop, wide, cellWide) {
  const key = `${crop[1]} ${crop[3]} ${wide} ${cellWide}`;
  if (!page.columns || page.columns.key !== key) {
    const places = Int32Array.from({ length: wide }, (_, x) => {
      const column = crop[1] + Math.floor((x + 0.5) / cellWide);
      return column < crop[3] ? column : -1;
    });
    page.columns = { key, places };
  }
  return page.columns.places;
}

function markTile(page, context, { x, y, wide, high, layer, head, prefix }) {
  const { state } = page;
  // The line below a map: the share that prefix tokens take.
  if (layer.layout.prefixCount) {
    context.fillStyle = page.theme.accent;
    context.clearRect(x, y + high + 1, wide, 2);
    if (prefix > 0) context.fillRect(x, y + high + 1, wide * Math.min(1, prefix), 2);
  }
  if (head !== 'fused' && (state.muted[layer.number] || []).includes(head)) {
    context.strokeStyle = page.theme.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x + 3, y + 3);
    context.lineTo(x + wide - 3, y + high - 3);
    context.stroke();
  }
  if (layer.number === state.layer && head === state.head) {
    context.strokeStyle = page.theme.accent;
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, wide + 2, high + 2);
  }
}

// The words beside and between the maps, which stay while the pointer moves.
function labelsOf(page) {
  const { tiles, state, elements } = page;
  const key = `${state.layer} ${document.documentElement.dataset.theme} ${elements.tiles.width}`;
  if (!tiles.words || tiles.words.key !== key) {
    const canvas = document.createElement('canvas');
    drawLabels(page, fitCanvas(canvas, tiles.width, tiles.height));
    tiles.words = { key, canvas };
  }
  return tiles.words.canvas;
}

function drawLabels(page, context) {
  context.textBaseline = 'alphabetic';
  for (const { layer, x, y, heading } of page.tiles.labels) {
    const chosen = layer.number === page.state.layer;
    context.fillStyle = chosen && !heading ? page.theme.accent : page.theme.quiet;
    context.font = `${chosen && !heading ? 600 : 400} 11px ${page.theme.font}`;
    const { grid, stride, window: size } = layer.layout;
    const text = heading
      ? `Stage ${layer.stage} · ${grid[0]} × ${grid[1]} cells of ${stride[1]} px · windows of ${size[0]} × ${size[1]} · ${layer.heads} heads`
      : layer.layout.windowed ? `${layer.stage}.${layer.block}${layer.layout.shift.some(Boolean) ? ' ⇲' : ''}` : `${layer.number}`;
    context.fillText(text, x, y);
  }
}
