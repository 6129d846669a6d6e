// What the page is showing, and the same as a part of its address.

function startState(model) {
  const last = model.layers.length - 1;
  return {
    method: 'attention', layer: last, head: 'fused', query: restingQuery(model), pinned: false,
    other: null, direction: 'row', klass: 0, start: 0, end: last, residual: 0.5, discard: 0,
    fusion: 'mean', muted: {}, mass: 1, opacity: 0.75, limit: 'max', fixed: 8, overlay: true,
    smooth: false, outlines: true, zoom: true, shared: false, theme: '', tab: 'explore',
  };
}

// The query where no cell is chosen: the pooled output, or else the middle of the image.
function restingQuery(model) {
  if (model.header.pool) return { kind: 'pool' };
  const [height, width] = model.header.image_size;
  return { kind: 'pixel', at: [height / 2, width / 2] };
}

const CODES = {
  method: 'm', layer: 'l', head: 'h', query: 'q', pinned: 'p', other: 'o', direction: 'd', klass: 'c',
  start: 's', end: 'e', residual: 'r', discard: 'x', fusion: 'f', muted: 'u', mass: 't', opacity: 'a',
  limit: 'k', fixed: 'v', overlay: 'y', smooth: 'b', outlines: 'w', zoom: 'z', shared: 'g',
  theme: 'n', tab: 'i',
};

function writeQuery(query) {
  if (!query) return '';
  if (query.kind === 'prefix') return `t${query.token}`;
  if (query.kind === 'pixel') return `${query.at[0]},${query.at[1]}`;
  return 'pool';
}

function readQuery(text, model) {
  if (text === 'pool' && model.header.pool) return { kind: 'pool' };
  const layout = model.layers[0].layout;
  const token = /^t(\d+)$/.exec(text);
  if (token && Number(token[1]) < layout.prefixCount) return { kind: 'prefix', token: Number(token[1]) };
  const pixel = /^([\d.]+),([\d.]+)$/.exec(text);
  const size = model.header.image_size;
  if (pixel && Number(pixel[1]) < size[0] && Number(pixel[2]) < size[1]) {
    return { kind: 'pixel', at: [Number(pixel[1]), Number(pixel[2])] };
  }
  return null;
}

function writeMuted(muted) {
  return Object.entries(muted).filter(([, heads]) => heads.length)
    .map(([layer, heads]) => `${layer}:${heads.join(',')}`).join(';');
}

function readMuted(text, model) {
  const muted = {};
  for (const part of text.split(';')) {
    const [layer, heads] = part.split(':');
    const known = model.layers[Number(layer)];
    if (!known || heads === undefined) continue;
    muted[layer] = heads.split(',').map(Number).filter((head) => head >= 0 && head < known.heads);
  }
  return muted;
}

function writeHash(state, first) {
  const parts = new URLSearchParams();
  for (const [key, code] of Object.entries(CODES)) {
    let [value, usual] = [state[key], first[key]];
    if (key === 'query' || key === 'other') [value, usual] = [writeQuery(value), writeQuery(usual)];
    if (key === 'muted') [value, usual] = [writeMuted(value), writeMuted(usual)];
    if (String(value) !== String(usual)) parts.set(code, String(value));
  }
  return parts.toString();
}

// A state from an address; what does not fit this page is left at its start.
function readHash(hash, model) {
  const state = startState(model);
  const parts = new URLSearchParams(hash.replace(/^#/, ''));
  for (const [key, code] of Object.entries(CODES)) {
    const text = parts.get(code);
    if (text === null) continue;
    if (key === 'query' || key === 'other') {
      const query = readQuery(text, model);
      if (query) state[key] = query;
    } else if (key === 'muted') state.muted = readMuted(text, model);
    else if (key === 'head') state.head = text === 'fused' ? 'fused' : Number(text);
    else if (key === 'residual') state.residual = text === 'measured' ? text : Number(text);
    else if (typeof state[key] === 'number') state[key] = Number(text);
    else if (typeof state[key] === 'boolean') state[key] = text === 'true';
    else state[key] = text;
  }
  return sound(state, model);
}

// The nearest state that this model has.
function sound(state, model) {
  const first = startState(model);
  const last = model.layers.length - 1;
  const within = (key, low, high, whole) => {
    let value = Number.isFinite(state[key]) ? Math.max(low, Math.min(high, state[key])) : first[key];
    if (whole) value = Math.round(value);
    state[key] = value;
  };
  const among = (key, choices) => { if (!choices.includes(state[key])) state[key] = first[key]; };
  within('layer', 0, last, true);
  within('end', 0, last, true);
  within('start', 0, state.end, true);
  within('klass', 0, Math.max(0, model.header.classes.length - 1), true);
  within('discard', 0, 0.95);
  within('mass', 0.05, 1);
  within('opacity', 0, 1);
  within('fixed', 0.1, 1000);
  if (state.residual !== 'measured') within('residual', 0, 1);
  else if (model.layers.some((layer) => !layer.share)) state.residual = first.residual;
  if (state.head !== 'fused') {
    const whole = Number.isInteger(state.head) && state.head >= 0;
    state.head = whole ? Math.min(state.head, model.layers[state.layer].heads - 1) : 'fused';
  }
  among('method', METHODS.filter((method) => isAvailable(method, model)).map((method) => method.id));
  among('direction', ['row', 'column']);
  among('fusion', model.header.fusions);
  among('limit', ['max', 'p99', 'fixed']);
  among('theme', ['', 'light', 'dark']);
  among('tab', ['explore', 'methods']);
  const method = methodOf(state.method);
  if (!method.direction) state.direction = 'row';
  if (!classHas(model, method, state.klass)) state.klass = 0;
  if (!state.pinned || !method.query) state.other = null;
  return state;
}

// On lower rungs some classes have no matrices.
function classHas(model, method, klass) {
  return !method.matrices || Boolean(model.header.classes[klass].matrices);
}
