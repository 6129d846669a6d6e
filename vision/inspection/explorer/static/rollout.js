// Rollout: shares of the tokens go down from layer to layer, r ← r Â, where a row of Â is that of
// a · A + (1 - a) · I made to sum to 1. A layer's heads are fused first; muted heads do not count.

// Matrices are large and sliders make many; maps of single heads are small.
const matrices = { most: 400, made: new Map() };
const headMaps = { most: 4000, made: new Map() };

function remembered(key, make, store = matrices) {
  if (!store.made.has(key)) {
    if (store.made.size >= store.most) store.made.clear();
    store.made.set(key, make());
  }
  return store.made.get(key);
}

// A layer's heads as one matrix by slots, nothing on padding.
function fusedMatrix(model, layer, settings) {
  const muted = settings.muted[layer.number] || [];
  const key = `fused ${layer.number} ${settings.fusion} ${muted} ${settings.discard}`;
  return remembered(key, () => {
    const matrix = fuseHeads(model, layer, settings.fusion, muted);
    clearPadding(matrix, layer.layout);
    if (settings.discard > 0) discardSmallest(matrix, layer.layout, settings.discard);
    return matrix;
  });
}

function fuseHeads(model, layer, fusion, muted) {
  const { values, plane } = layer;
  if (!layer.perHead) {
    const at = Math.max(0, model.header.fusions.indexOf(fusion)) * plane;
    return values.slice(at, at + plane);
  }
  const heads = [];
  for (let head = 0; head < layer.heads; head++) if (!muted.includes(head)) heads.push(head);
  const out = new Float32Array(plane);
  heads.forEach((head, nth) => {
    const from = values.subarray(head * plane, (head + 1) * plane);
    if (nth === 0) out.set(from);
    else if (fusion === 'mean') for (let i = 0; i < plane; i++) out[i] += from[i];
    else if (fusion === 'max') for (let i = 0; i < plane; i++) { if (from[i] > out[i]) out[i] = from[i]; }
    else for (let i = 0; i < plane; i++) { if (from[i] < out[i]) out[i] = from[i]; }
  });
  if (fusion === 'mean' && heads.length) for (let i = 0; i < plane; i++) out[i] /= heads.length;
  return out;
}

function clearPadding(matrix, layout) {
  if (!layout.padded) return;
  const { index, size } = layout;
  for (let place = 0; place < index.length; place++) {
    const first = place - (place % size);
    for (let key = 0; key < size; key++) if (index[first + key] < 0) matrix[place * size + key] = 0;
  }
}

// Zero for the smallest weights of each row; prefix tokens and the token itself are spared.
function discardSmallest(matrix, layout, share) {
  const { index, size, prefixCount } = layout;
  const free = new Float32Array(size);
  for (let place = 0; place < index.length; place++) {
    const first = place - (place % size);
    const row = place * size;
    const open = (key) => first + key !== place && index[first + key] >= prefixCount
      && layout.allowed(place, key);
    let count = 0;
    for (let key = 0; key < size; key++) if (open(key)) free[count++] = matrix[row + key];
    let number = Math.floor(count * share + 1e-9);
    if (!number) continue;
    const limit = free.subarray(0, count).sort()[number - 1];
    for (let key = 0; key < size; key++) {
      if (open(key) && matrix[row + key] < limit) { matrix[row + key] = 0; number -= 1; }
    }
    for (let key = 0; key < size && number > 0; key++) {
      if (open(key) && matrix[row + key] === limit) { matrix[row + key] = 0; number -= 1; }
    }
  }
}

// How much of a token's share moves along its row of the matrix, and how much stays.
function mixing(layer, matrix, residual) {
  const { layout } = layer;
  const moves = new Float64Array(layout.tokens);
  const stays = new Float64Array(layout.tokens);
  for (let token = 0; token < layout.tokens; token++) {
    const row = layout.slot[token] * layout.size;
    let sum = 0;
    for (let key = 0; key < layout.size; key++) sum += matrix[row + key];
    const weight = residual === 'measured' ? layer.share[token] : 1 - residual;
    const total = weight * sum + (1 - weight);
    moves[token] = total === 0 ? 0 : weight / total;
    stays[token] = total === 0 ? 1 : (1 - weight) / total;
  }
  return { moves, stays };
}

function prepared(model, layer, settings, matrixOf) {
  const matrix = matrixOf(layer);
  const key = `mixing ${matrixOf.key} ${layer.number} ${settings.residual}`;
  return { matrix, ...remembered(key, () => mixing(layer, matrix, settings.residual)) };
}

function fusedBy(model, settings) {
  const matrixOf = (layer) => fusedMatrix(model, layer, settings);
  matrixOf.key = `fused ${settings.fusion} ${settings.discard} ${JSON.stringify(settings.muted)}`;
  return matrixOf;
}

// Attention × gradient of a class; normalized: rows made to sum to 1.
function classBy(model, number, normalized) {
  const matrixOf = (layer) => {
    const plain = remembered(`class ${number} ${layer.number}`,
      () => decodeRows(model.buffer, model.header.classes[number].matrices[layer.number]));
    if (!normalized) return plain;
    return remembered(`normalized ${number} ${layer.number}`, () => normalizeRows(plain, layer.layout.size));
  };
  matrixOf.key = `class ${number} ${normalized}`;
  return matrixOf;
}

function normalizeRows(matrix, size) {
  const out = new Float32Array(matrix.length);
  for (let row = 0; row < matrix.length; row += size) {
    let sum = 0;
    for (let key = 0; key < size; key++) sum += matrix[row + key];
    if (sum > 0) for (let key = 0; key < size; key++) out[row + key] = matrix[row + key] / sum;
  }
  return out;
}

// Shares of merged tokens, given in equal parts to the cells that each was made of.
function unmerge(shares, above, below) {
  const [height, width] = below.grid;
  const across = above.grid[1];
  const out = new Float64Array(below.tokens);
  for (let y = 0; y < height; y++) {
    const row = (y >> 1) * across;
    const rows = Math.min(2, height - 2 * (y >> 1));
    for (let x = 0; x < width; x++) {
      out[y * width + x] = shares[row + (x >> 1)] / (rows * Math.min(2, width - 2 * (x >> 1)));
    }
  }
  return out;
}

// The mean over the cells that each merged token was made of.
function merge(values, below, above) {
  const [height, width] = below.grid;
  const out = new Float64Array(above.tokens);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const [up, left] = [y >> 1, x >> 1];
      const parts = Math.min(2, height - 2 * up) * Math.min(2, width - 2 * left);
      out[up * above.grid[1] + left] += values[y * width + x] / parts;
    }
  }
  return out;
}

const differs = (one, other) => one.grid[0] !== other.grid[0] || one.grid[1] !== other.grid[1];

// From the tokens of layer `end` down to those that enter layer `start`.
function descend(model, seed, { start, end }, step) {
  let shares = seed;
  for (let number = end; number >= start; number--) {
    const layer = model.layers[number];
    const above = number < end ? model.layers[number + 1].layout : null;
    if (above && differs(above, layer.layout)) shares = unmerge(shares, above, layer.layout);
    shares = step(shares, layer);
  }
  return shares;
}

// Numbers that are needed for one step only: one array for each layout.
function movingShares(layout) {
  if (!layout.moving) layout.moving = new Float64Array(layout.tokens);
  return layout.moving;
}

function rolloutRow(model, seed, settings, matrixOf) {
  return descend(model, seed, settings, (shares, layer) => {
    const { matrix, moves, stays } = prepared(model, layer, settings, matrixOf);
    const stay = new Float64Array(shares.length);
    const move = movingShares(layer.layout);
    for (let token = 0; token < shares.length; token++) {
      stay[token] = shares[token] * stays[token];
      move[token] = shares[token] * moves[token];
    }
    return carryRow(layer.layout, matrix, 0, move, stay);
  });
}

// How much each token of layer `end` draws on the seed, which is one of layer `start`.
function rolloutColumn(model, seed, settings, matrixOf) {
  let values = seed;
  for (let number = settings.start; number <= settings.end; number++) {
    const layer = model.layers[number];
    const below = number > settings.start ? model.layers[number - 1].layout : null;
    if (below && differs(below, layer.layout)) values = merge(values, below, layer.layout);
    const { matrix, moves, stays } = prepared(model, layer, settings, matrixOf);
    const drawn = carryDense(layer.layout, matrix, values);
    values = values.map((value, token) => moves[token] * drawn[token] + stays[token] * value);
  }
  return values;
}

// A · values, for a vector that is not sparse.
function carryDense(layout, matrix, values) {
  const { size, index, slot } = layout;
  const out = new Float64Array(layout.tokens);
  for (let token = 0; token < layout.tokens; token++) {
    const place = slot[token];
    const first = place - (place % size);
    let sum = 0;
    for (let key = 0; key < size; key++) {
      const source = index[first + key];
      if (source >= 0) sum += matrix[place * size + key] * values[source];
    }
    out[token] = sum;
  }
  return out;
}

// Generic attribution, R ← R + Ā R, without the path along which a token only speaks for itself.
function attribution(model, seed, settings, matrixOf) {
  const all = descend(model, seed, settings,
    (shares, layer) => carryRow(layer.layout, matrixOf(layer), 0, shares, Float64Array.from(shares)));
  const identity = descend(model, seed, settings, (shares) => shares);
  return all.map((value, token) => value - identity[token]);
}
