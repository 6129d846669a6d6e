// Drawing: the large image and the colour scale.

const BAND = 11; // pixels beside the image where padding is shown

function readColours(text) {
  const letters = atob(text.trim());
  const table = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  return { shares: table.subarray(0, 768), differences: table.subarray(768) };
}

function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const size = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function cellValues(result) { return result.values.subarray(result.layout.prefixCount); }

// The value that is drawn in the brightest colour: at least `least` times that of a uniform map, so
// that a nearly uniform map looks dull, as in the figures. A difference has no such limit.
function upperLimit(cells, state, uniform, least) {
  let largest = 0;
  let sum = 0;
  for (let cell = 0; cell < cells.length; cell++) {
    const size = Math.abs(cells[cell]);
    sum += size;
    if (size > largest) largest = size;
  }
  const even = uniform ? 1 / uniform : sum / cells.length;
  if (state.limit === 'fixed') return state.fixed * even;
  const end = state.other ? 0 : least * even;
  if (state.limit === 'max') return Math.max(largest, end);
  const seen = Float64Array.from(cells, Math.abs).filter((size) => size > 0).sort();
  return seen.length ? Math.max(seen[Math.min(seen.length - 1, Math.floor(0.99 * seen.length))], end) : end;
}

// The fewest cells that together hold the wanted share of all cells' mass.
function heaviest(cells, mass) {
  if (mass >= 1) return null;
  const order = Array.from(cells.keys()).sort((a, b) => cells[b] - cells[a]);
  const wanted = mass * cells.reduce((a, b) => a + Math.max(0, b), 0);
  const kept = new Uint8Array(cells.length);
  let sum = 0;
  for (const cell of order) {
    if (sum >= wanted) break;
    kept[cell] = 1;
    sum += Math.max(0, cells[cell]);
  }
  return kept;
}

// The scaled image, kept between renders.
function background(page, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const key = `${width} ${height} ${ratio}`;
  if (page.background && page.background.key === key) return page.background.canvas;
  const canvas = document.createElement('canvas');
  const context = fitCanvas(canvas, width, height);
  context.imageSmoothingEnabled = page.elements.source.naturalWidth > 128;
  context.imageSmoothingQuality = 'high';
  context.drawImage(page.elements.source, 0, 0, width, height);
  page.background = { key, canvas };
  return canvas;
}

function drawImage(page, shown) {
  const { model, state, elements } = page;
  const [height, width] = model.header.image_size;
  const band = model.layers.some((layer) => layer.layout.padded) ? BAND : 0;
  const room = Math.min(page.sizes().stage - band, (Math.max(240, window.innerHeight * 0.6) - band) * (width / height));
  const scale = Math.max(0.1, room / width);
  page.scale = scale;
  const context = fitCanvas(elements.image, width * scale + band, height * scale + band);
  context.save();
  context.beginPath();
  context.rect(0, 0, width * scale, height * scale);
  context.clip();
  context.drawImage(background(page, width * scale, height * scale), 0, 0, width * scale, height * scale);
  if (state.overlay && shown) drawOverlay(page, context, shown);
  drawMarks(page, context);
  context.restore();
  if (band) drawPadding(page, context, width * scale, height * scale);
}

// A token of a convolutional stem sees beyond its cell: a pixel gets the mean of the cells that see it.
function overFields(layout, cells) {
  const [above, left, below, right] = layout.margins;
  const along = (axis, before, after, values, across) => {
    const length = layout.grid[axis] * layout.stride[axis];
    const means = new Float32Array(length * across);
    for (let pixel = 0; pixel < length; pixel++) {
      const first = Math.max(0, Math.floor((pixel - after) / layout.stride[axis]));
      const last = Math.min(layout.grid[axis] - 1, Math.floor((pixel + before) / layout.stride[axis]));
      for (let cell = first; cell <= last; cell++) {
        for (let at = 0; at < across; at++) means[pixel * across + at] += values(cell, at) / (last - first + 1);
      }
    }
    return means;
  };
  const [height, columns] = [layout.grid[0] * layout.stride[0], layout.grid[1]];
  const tall = along(0, above, below, (row, column) => cells[row * columns + column], columns);
  const turned = along(1, left, right, (column, row) => tall[row * columns + column], height);
  const width = columns * layout.stride[1];
  return Float32Array.from({ length: height * width }, (_, at) => turned[(at % width) * height + Math.floor(at / width)]);
}

function drawOverlay(page, context, { layout, cells, signed, high, kept }) {
  if (layout.margins.some(Boolean)) {
    const pixels = overFields(layout, kept ? cells.map((value, cell) => (kept[cell] ? value : 0)) : cells);
    const grid = layout.grid.map((size, axis) => size * layout.stride[axis]);
    layout = { grid, stride: [1, 1] };
    [cells, kept] = [pixels, null];
  }
  const [rows, columns] = layout.grid;
  const { opacity, smooth } = page.state;
  const scratch = page.scratch(columns, rows);
  const image = page.tileImage(columns, rows);
  const table = signed ? page.colours.differences : page.colours.shares;
  const factor = high > 0 ? 1 / high : 0;
  for (let cell = 0; cell < cells.length; cell++) {
    let part = kept && !kept[cell] ? 0 : Math.max(signed ? -1 : 0, Math.min(1, cells[cell] * factor));
    const entry = 3 * Math.round(signed ? 127.5 + 127.5 * part : 255 * part);
    for (let band = 0; band < 3; band++) image.data[4 * cell + band] = table[entry + band];
    part = Math.abs(part);
    // Small values darken the image a little, so that large ones stand out.
    image.data[4 * cell + 3] = 255 * opacity * (signed ? 0.1 + 0.9 * part : 0.45 + 0.55 * part);
  }
  scratch.context.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = smooth;
  context.drawImage(scratch.canvas, 0, 0, columns, rows, 0, 0,
    columns * layout.stride[1] * page.scale, rows * layout.stride[0] * page.scale);
}

function cellBox(page, layout, cell) {
  const [high, wide] = layout.stride.map((step) => step * page.scale);
  return [cell[1] * wide, cell[0] * high, wide, high];
}

// What the token of a cell sees before the first block.
function fieldBox(page, layout, cell) {
  const [above, left, below, right] = layout.margins.map((margin) => margin * page.scale);
  const [x, y, wide, high] = cellBox(page, layout, cell);
  return [x - left, y - above, wide + left + right, high + above + below];
}

function strokeBox(context, box, colour, width, dash) {
  context.setLineDash([]);
  context.strokeStyle = 'rgba(0, 0, 0, 0.75)';
  context.lineWidth = width + 2;
  context.strokeRect(...box);
  context.setLineDash(dash || []);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(...box);
  context.setLineDash([]);
}

// Windows, what is masked, the lineage of the query, and the queries themselves.
function drawMarks(page, context) {
  const { model, state } = page;
  const method = methodOf(state.method);
  const layout = page.queryLayout();
  const isCell = (query) => query && query.kind === 'pixel';
  if (layout.windowed && state.outlines && state.method === 'attention') {
    drawWindows(page, context, layout);
    if (isCell(state.query)) drawMasked(page, context, layout);
  }
  if (method.query && isCell(state.query)) {
    if (state.outlines) drawLineage(page, context, layout);
    strokeBox(context, fieldBox(page, layout, cellAt(layout, state.query.at)), page.theme.mark, 2);
  }
  if (method.query && isCell(state.other)) {
    strokeBox(context, fieldBox(page, layout, cellAt(layout, state.other.at)), '#ffffff', 2, [4, 3]);
  }
  if (page.key && state.pinned) {
    const shown = page.shown ? page.shown.layout : layout;
    strokeBox(context, cellBox(page, shown, cellAt(shown, page.key)), '#ffffff', 1);
  }
}

function drawWindows(page, context, layout) {
  for (const [top, left, bottom, right] of layout.outlines) {
    const [x, y, wide, high] = cellBox(page, layout, [top, left]);
    context.strokeStyle = 'rgba(255, 255, 255, 0.55)';
    context.lineWidth = 1;
    context.strokeRect(x, y, wide * (right - left), high * (bottom - top));
  }
}

function drawMasked(page, context, layout) {
  const token = tokenFor(layout, page.state.query);
  context.fillStyle = page.hatch(context);
  for (const other of windowCells(layout, token, false)) {
    context.fillRect(...cellBox(page, layout, cellOf(layout, other)));
  }
}

// The cell of every stage that the query's patch ends up in.
function drawLineage(page, context, layout) {
  let before = null;
  for (const layer of page.model.layers) {
    const other = layer.layout;
    if (before && !differs(before, other)) continue;
    before = other;
    if (!differs(other, layout)) continue;
    context.strokeStyle = page.theme.mark;
    context.lineWidth = 1;
    context.setLineDash([2, 2]);
    context.strokeRect(...cellBox(page, other, cellAt(other, page.state.query.at)));
    context.setLineDash([]);
  }
}

// A hatched band along the edges at which the query's window hangs over the image.
function drawPadding(page, context, width, height) {
  const { state } = page;
  const layout = page.queryLayout();
  if (!layout.padded || state.query.kind !== 'pixel' || state.method !== 'attention') return;
  const token = tokenFor(layout, state.query);
  const first = layout.slot[token] - (layout.slot[token] % layout.size);
  const window_ = layout.index.subarray(first, first + layout.size);
  if (!window_.some((other) => other < 0)) return;
  const cells = Array.from(window_).filter((other) => other >= 0).map((other) => cellOf(layout, other));
  const rows = cells.map((cell) => cell[0]);
  const columns = cells.map((cell) => cell[1]);
  const [high, wide] = layout.stride.map((step) => step * page.scale);
  const [top, left] = [Math.min(...rows) * high, Math.min(...columns) * wide];
  const [bottom, right] = [Math.min(height, (Math.max(...rows) + 1) * high), Math.min(width, (Math.max(...columns) + 1) * wide)];
  context.fillStyle = page.hatch(context, page.theme.ink);
  if (right >= width - 0.5) context.fillRect(width + 2, top, BAND - 2, bottom - top);
  if (bottom >= height - 0.5) context.fillRect(left, height + 2, right - left, BAND - 2);
}

function drawScale(page, shown) {
  const { elements } = page;
  const width = page.sizes().scale;
  const signed = Boolean(shown && shown.signed);
  const key = `${width} ${signed} ${window.devicePixelRatio}`;
  if (page.scaleKey === key) return;
  page.scaleKey = key;
  const context = fitCanvas(elements.scale, width, 10);
  const table = signed ? page.colours.differences : page.colours.shares;
  for (let x = 0; x < width; x++) {
    const entry = 3 * Math.round((255 * x) / Math.max(1, width - 1));
    context.fillStyle = `rgb(${table[entry]}, ${table[entry + 1]}, ${table[entry + 2]})`;
    context.fillRect(x, 0, 1.5, 10);
  }
}
