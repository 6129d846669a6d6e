// How the page computes its methods; their names and texts are data, written by Python.

let METHODS = [];

function readMethods(header) {
  METHODS = header.methods.map((method) => ({
    ...method,
    head: method.options.includes('head'),
    range: method.options.includes('start_layer'),
    rollout: method.options.includes('residual'),
    matrices: method.gradients && !method.finished,
    direction: ['attention', 'rollout'].includes(method.id),
  }));
}

function methodOf(id) { return METHODS.find((method) => method.id === id); }

// Whether the page has the numbers that a method needs: some models and lower rungs do not.
function isAvailable(method, { header }) {
  if (method.id === 'norm') return Boolean(header.maps.norms);
  if (method.finished) return header.classes.some((entry) => entry.maps[method.id]);
  if (method.matrices) return header.classes.some((entry) => entry.matrices);
  return !method.forClass || header.classes.some((entry) => entry.seed);
}

// The values of a method by token, with what is needed to read them.
function evaluate(model, state, query) {
  const method = methodOf(state.method);
  const last = model.layers[model.layers.length - 1].layout;
  if (method.finished) {
    const packed = state.method === 'norm'
      ? model.header.maps.norms : model.header.classes[state.klass].maps[state.method];
    const cells = view(model.buffer, packed);
    const values = new Float64Array(last.tokens);
    values.set(cells, last.prefixCount);
    return { values, layout: last, unit: state.method === 'norm' ? 'length' : 'relevance', padding: 0 };
  }
  if (state.method === 'attention') return attentionOf(model, state, model.layers[state.layer], state.head, query);
  const range = { ...state, start: state.start, end: state.end };
  if (state.method === 'chefer') {
    const seed = seedOf(model.header, model.layers[state.end].layout, query);
    const values = attribution(model, seed, range, classBy(model, state.klass, false));
    return { values, layout: model.layers[state.start].layout, unit: 'relevance', padding: 0 };
  }
  const matrixOf = state.method === 'gradient_rollout'
    ? classBy(model, state.klass, true) : fusedBy(model, state);
  if (state.method === 'cam_rollout') range.end = model.layers.length - 1;
  return rolloutOf(model, state, range, query, matrixOf);
}

function rolloutOf(model, state, range, query, matrixOf) {
  const top = model.layers[range.end].layout;
  const bottom = model.layers[range.start].layout;
  if (state.method === 'rollout' && state.direction === 'column') {
    const values = rolloutColumn(model, seedOf(model.header, bottom, query), range, matrixOf);
    return { values, layout: top, unit: 'share', padding: 0, uniform: bottom.tokens };
  }
  const seed = state.method === 'cam_rollout'
    ? Float64Array.from(view(model.buffer, model.header.classes[state.klass].seed))
    : seedOf(model.header, top, query);
  return {
    values: rolloutRow(model, seed, range, matrixOf), layout: bottom, unit: 'share', padding: 0,
    uniform: bottom.tokens,
  };
}

// One layer and head; null where the page does not keep that head for this query.
function attentionOf(model, state, layer, head, query) {
  const { layout } = layer;
  const seed = seedOf(model.header, layout, query);
  const result = { layout, unit: 'weight', padding: 0, uniform: keysOf(layout, query) };
  const carry = state.direction === 'row' ? carryRow : carryColumn;
  if (head === 'fused') {
    const matrix = fusedMatrix(model, layer, { ...state, discard: 0 });
    result.values = carry(layout, matrix, 0, seed);
    if (state.direction === 'row' && layout.padded && layer.perHead && state.fusion === 'mean') {
      for (let h = 0; h < layer.heads; h++) result.padding += paddingMass(layer, h * layer.plane, seed) / layer.heads;
    }
    return result;
  }
  if (layer.perHead) {
    result.values = carry(layout, layer.values, head * layer.plane, seed);
    if (state.direction === 'row') result.padding = paddingMass(layer, head * layer.plane, seed);
    return result;
  }
  const prefixOnly = seed.every((share, token) => share === 0 || token < layout.prefixCount);
  if (!layer.headRows || state.direction !== 'row' || !prefixOnly) return null;
  result.values = new Float64Array(layout.tokens);
  for (let token = 0; token < layout.prefixCount; token++) {
    const row = (head * layout.prefixCount + token) * layout.tokens;
    for (let key = 0; key < layout.tokens; key++) result.values[key] += seed[token] * layer.headRows[row + key];
  }
  return result;
}
