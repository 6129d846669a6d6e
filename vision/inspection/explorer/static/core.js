// The numbers of the page, and what one layer says about one query.
//
// Every layer is a set of windows: a global layer is one window that holds all tokens. A slot is a
// place in a window, a token a prefix token or a cell; `index` leads from slots to tokens (-1 where
// a slot is padding), `slot` from tokens to slots. Vectors have one number for each token.

async function inflate(text) {
  const letters = atob(text.trim());
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).arrayBuffer();
}

function view(buffer, reference) {
  const types = { u8: Uint8Array, i32: Int32Array, f32: Float32Array };
  return new types[reference.type](buffer, reference.at, reference.count);
}

// Companded rows as plain numbers.
function decodeRows(buffer, rows) {
  const codes = view(buffer, rows.codes);
  const scales = view(buffer, rows.scales);
  const levels = 2 ** rows.bits - 1;
  const table = new Float32Array(levels + 1);
  for (let code = 0; code <= levels; code++) table[code] = (code / levels) ** 2;
  const values = new Float32Array(rows.rows * rows.length);
  let at = 0;
  for (let row = 0; row < rows.rows; row++) {
    const scale = scales[row];
    for (const end = at + rows.length; at < end; at++) {
      const code = rows.bits === 8 ? codes[at] : (codes[at >> 1] >> ((at & 1) * 4)) & 15;
      values[at] = table[code] * scale;
    }
  }
  if (rows.corrected) {
    const corrected = view(buffer, rows.corrected);
    const corrections = view(buffer, rows.corrections);
    let place = 0;
    corrected.forEach((step, i) => {
      place += step;
      values[place] = corrections[i];
    });
  }
  return values;
}

function readLayout(buffer, packed) {
  const prefix = packed.prefix.length;
  const [height, width] = packed.grid;
  const tokens = prefix + height * width;
  const windowed = packed.window !== null;
  const windows = windowed ? packed.windows : 1;
  const index = windowed ? view(buffer, packed.index) : Int32Array.from({ length: tokens }, (_, i) => i);
  const slot = new Int32Array(tokens);
  index.forEach((token, place) => { if (token >= 0) slot[token] = place; });
  const bits = packed.allowed ? view(buffer, packed.allowed) : null;
  const size = index.length / windows;
  const allowed = (query, key) => {
    if (!bits) return true;
    const place = query * size + key;
    return ((bits[place >> 3] >> (place & 7)) & 1) === 1;
  };
  return {
    ...packed, prefixCount: prefix, tokens, windowed, windows, index, slot, size, allowed,
    padded: index.some((token) => token < 0), sums: new Float64Array(size),
  };
}

// Keys of a pooled layer, shared out again among the 1, 2 or 4 cells that they were summed from.
function unpool(values, layout) {
  const [height, width] = layout.grid;
  const across = Math.ceil(width / 2);
  const length = layout.prefixCount + Math.ceil(height / 2) * across;
  const rows = values.length / length;
  const out = new Float32Array(rows * layout.tokens);
  const from = new Int32Array(layout.tokens);
  const part = new Float32Array(layout.tokens).fill(1);
  for (let token = 0; token < layout.tokens; token++) {
    if (token < layout.prefixCount) { from[token] = token; continue; }
    const [y, x] = cellOf(layout, token);
    const group = [y >> 1, x >> 1];
    from[token] = layout.prefixCount + group[0] * across + group[1];
    part[token] = 1 / (Math.min(2, height - 2 * group[0]) * Math.min(2, width - 2 * group[1]));
  }
  for (let row = 0; row < rows; row++) {
    for (let token = 0; token < layout.tokens; token++) {
      out[row * layout.tokens + token] = values[row * length + from[token]] * part[token];
    }
  }
  return out;
}

function readLayers(buffer, header) {
  const layouts = header.layouts.map((packed) => readLayout(buffer, packed));
  let stage = 0;
  let block = 0;
  return header.layers.map((packed, number) => {
    const layout = layouts[packed.layout];
    const below = number ? layouts[header.layers[number - 1].layout] : null;
    const merged = below !== null && String(below.grid) !== String(layout.grid);
    if (merged) stage += 1;
    block = merged || !number ? 0 : block + 1;
    let values = decodeRows(buffer, packed.values);
    if (packed.pooled) values = unpool(values, layout);
    const plane = layout.windows * layout.size * layout.size;
    return {
      name: packed.name, number, layout, stage, block, heads: packed.heads, values, plane,
      perHead: packed.per_head,
      headRows: packed.head_rows ? decodeRows(buffer, packed.head_rows) : null,
      share: packed.share ? view(buffer, packed.share) : null,
    };
  });
}

function cellOf(layout, token) {
  const cell = token - layout.prefixCount;
  return [Math.floor(cell / layout.grid[1]), cell % layout.grid[1]];
}

function tokenOf(layout, cell) {
  return layout.prefixCount + cell[0] * layout.grid[1] + cell[1];
}

function cellAt(layout, pixel) {
  return [0, 1].map((axis) => {
    const cell = Math.floor(pixel[axis] / layout.stride[axis]);
    return Math.max(0, Math.min(layout.grid[axis] - 1, cell));
  });
}

// A query as shares of a layer's tokens. query: {kind: 'pool'} | {kind: 'prefix', token} |
// {kind: 'pixel', at: [y, x]} | {kind: 'cell', at: [row, column]}
function seedOf(header, layout, query) {
  const seed = new Float64Array(layout.tokens);
  if (query.kind === 'pool') {
    header.pool.prefix.forEach((share, token) => { seed[token] = share; });
    const cells = layout.tokens - layout.prefixCount;
    if (header.pool.cells) seed.fill(header.pool.cells / cells, layout.prefixCount);
  } else {
    seed[tokenFor(layout, query)] = 1;
  }
  return seed;
}

function tokenFor(layout, query) {
  if (query.kind === 'prefix') return query.token;
  return tokenOf(layout, query.kind === 'cell' ? query.at : cellAt(layout, query.at));
}

// seed · A of one plane of a layer: where the query looks. Padding is left out. Window by window, so
// that the inner loop runs over neighbours in memory; only its sums are put where their tokens are.
function carryRow(layout, values, offset, seed, keep) {
  const { size, index, sums } = layout;
  const out = keep || new Float64Array(layout.tokens);
  for (let first = 0; first < index.length; first += size) {
    let seen = false;
    for (let query = first; query < first + size; query++) {
      const share = index[query] < 0 ? 0 : seed[index[query]];
      if (share === 0) continue;
      if (!seen) sums.fill(0);
      seen = true;
      const row = offset + query * size;
      for (let key = 0; key < size; key++) sums[key] += share * values[row + key];
    }
    if (!seen) continue;
    for (let key = 0; key < size; key++) {
      const target = index[first + key];
      if (target >= 0) out[target] += sums[key];
    }
  }
  return out;
}

// A · seed of one plane of a layer: who looks at the query.
function carryColumn(layout, values, offset, seed, keep) {
  const { size, index, slot } = layout;
  const out = keep || new Float64Array(layout.tokens);
  for (let token = 0; token < seed.length; token++) {
    const share = seed[token];
    if (share === 0) continue;
    const place = slot[token];
    const first = place - (place % size);
    for (let query = 0; query < size; query++) {
      const target = index[first + query];
      if (target >= 0) out[target] += share * values[offset + (first + query) * size + (place - first)];
    }
  }
  return out;
}

// The mass of a query's row on padding.
function paddingMass(layer, offset, seed) {
  const { size, index, slot, padded } = layer.layout;
  let mass = 0;
  if (!padded) return 0;
  seed.forEach((share, token) => {
    if (share === 0) return;
    const first = slot[token] - (slot[token] % size);
    for (let key = 0; key < size; key++) {
      if (index[first + key] < 0) mass += share * layer.values[offset + slot[token] * size + key];
    }
  });
  return mass;
}

// Cells that share the query's window: those it may attend to, or those masked from it.
function windowCells(layout, token, wanted) {
  const place = layout.slot[token];
  const first = place - (place % layout.size);
  const cells = [];
  for (let key = 0; key < layout.size; key++) {
    const target = layout.index[first + key];
    if (target >= layout.prefixCount && layout.allowed(place, key) === wanted) cells.push(target);
  }
  return cells;
}

// How many keys a query can attend to; padding counts where nothing masks it.
function keysOf(layout, query) {
  if (query.kind === 'pool' || !layout.windowed) return query.kind === 'pool' ? layout.tokens : layout.size;
  const place = layout.slot[tokenFor(layout, query)];
  let keys = 0;
  for (let key = 0; key < layout.size; key++) keys += layout.allowed(place, key) ? 1 : 0;
  return keys;
}
